//! The owners of I/O virtual pages: a two-level array for the pages of replay memory, and a map for
//! higher pages.

use std::collections::HashMap;

use super::grants::{GrantSlot, Grants};

const LEAF: usize = 1024;
const LOW_PAGES: u64 = crate::platform::DATA_BYTES >> 12;

/// Entry of a page without an owner.
const NONE: u32 = u32::MAX;
/// Flag of an entry that is an index in `shared` instead of a grant slot.
const SHARED: u32 = 1 << 31;

/// Owners of the pages of one device.
#[derive(Debug, Default)]
pub(super) struct Owners {
    low: Vec<Option<Box<[u32; LEAF]>>>,
    high: HashMap<u64, u32>,
    /// Owner lists of pages with several owners.
    shared: Vec<Vec<GrantSlot>>,
}

impl Owners {
    #[inline]
    fn slot(&self, page: u64) -> u32 {
        if page < LOW_PAGES {
            match self.low.get(page as usize / LEAF) {
                Some(Some(leaf)) => leaf[page as usize % LEAF],
                _ => NONE,
            }
        } else {
            self.high.get(&page).copied().unwrap_or(NONE)
        }
    }

    #[inline]
    fn set(&mut self, page: u64, value: u32) {
        if page < LOW_PAGES {
            let index = page as usize / LEAF;
            if self.low.len() <= index {
                self.low.resize_with(index + 1, || None);
            }
            let leaf = self.low[index].get_or_insert_with(|| Box::new([NONE; LEAF]));
            leaf[page as usize % LEAF] = value;
        } else {
            self.high.insert(page, value);
        }
    }

    /// Returns the owners of `page`.
    #[inline]
    pub(super) fn owners_of(&self, page: u64) -> impl Iterator<Item = GrantSlot> + '_ {
        let slot = self.slot(page);
        let one = (slot & SHARED == 0).then_some(GrantSlot(slot));
        let many = if slot != NONE && slot & SHARED != 0 {
            self.shared
                .get((slot & !SHARED) as usize)
                .map_or(&[][..], Vec::as_slice)
        } else {
            &[]
        };
        one.into_iter().chain(many.iter().copied())
    }

    /// Makes `id` the only owner of `page`, and passes the previous owner to `lost`.
    #[inline]
    pub(super) fn acquire(&mut self, page: u64, id: GrantSlot, mut lost: impl FnMut(GrantSlot)) {
        let slot = self.slot(page);
        if slot & SHARED == 0 {
            lost(GrantSlot(slot));
        }
        self.set(page, id.0);
    }

    /// Adds `id` to the owners of `page` and removes the owners for which `outlives` is false.
    /// Returns false, and adds nothing, if `most` owners remain.
    pub(super) fn share(
        &mut self,
        page: u64,
        id: GrantSlot,
        grants: &mut Grants,
        outlives: impl Fn(GrantSlot, &Grants) -> bool,
        most: usize,
    ) -> bool {
        let slot = self.slot(page);
        grants.pin(id);
        if slot == NONE {
            self.set(page, id.0);
            return true;
        }
        if slot & SHARED == 0 {
            let old = GrantSlot(slot);
            if old == id {
                grants.unpin(id);
            } else if outlives(old, grants) {
                self.shared.push(vec![old, id]);
                self.set(page, SHARED | (self.shared.len() as u32 - 1));
            } else {
                grants.unpin(old);
                self.set(page, id.0);
            }
            return true;
        }
        let Some(list) = self.shared.get_mut((slot & !SHARED) as usize) else {
            return true;
        };
        if list.contains(&id) {
            grants.unpin(id);
            return true;
        }
        list.retain(|&old| {
            let stays = outlives(old, grants);
            if !stays {
                grants.unpin(old);
            }
            stays
        });
        if list.len() >= most {
            grants.unpin(id);
            return false;
        }
        list.push(id);
        true
    }
}
