//! The owners of I/O virtual pages: a two-level array for the pages of replay memory, and a map for
//! higher pages.

use std::collections::HashMap;

use super::grants::{GrantSlot, Grants};

/// Pages of one leaf of the array.
const LEAF_PAGES: usize = 1024;
/// Pages of the array; higher pages are in the map.
const LOW_PAGES: u64 = crate::replay_platform::DATA_BYTES >> 12;

/// Entry of a page without an owner.
const NONE: u32 = u32::MAX;
/// Flag of an entry that is an index in `shared` instead of a grant slot.
const SHARED: u32 = 1 << 31;

/// Owners of the pages of one device.
#[derive(Debug, Default)]
pub(super) struct Owners {
    low: Vec<Option<Box<[u32; LEAF_PAGES]>>>,
    high: HashMap<u64, u32>,
    /// Owner lists of pages with several owners.
    shared: Vec<Vec<GrantSlot>>,
}

impl Owners {
    /// Returns the entry of `page`: a grant slot, [`NONE`], or an index with the flag [`SHARED`].
    #[inline]
    fn entry(&self, page: u64) -> u32 {
        if page < LOW_PAGES {
            match self.low.get(page as usize / LEAF_PAGES) {
                Some(Some(leaf)) => leaf[page as usize % LEAF_PAGES],
                _ => NONE,
            }
        } else {
            self.high.get(&page).copied().unwrap_or(NONE)
        }
    }

    #[inline]
    fn set_entry(&mut self, page: u64, entry: u32) {
        if page < LOW_PAGES {
            let index = page as usize / LEAF_PAGES;
            if self.low.len() <= index {
                self.low.resize_with(index + 1, || None);
            }
            let leaf = self.low[index].get_or_insert_with(|| Box::new([NONE; LEAF_PAGES]));
            leaf[page as usize % LEAF_PAGES] = entry;
        } else {
            self.high.insert(page, entry);
        }
    }

    /// Returns the owners of `page`.
    #[inline]
    pub(super) fn owners_of(&self, page: u64) -> impl Iterator<Item = GrantSlot> + '_ {
        let entry = self.entry(page);
        let single = (entry & SHARED == 0).then_some(GrantSlot(entry));
        let several = if entry != NONE && entry & SHARED != 0 {
            self.shared
                .get((entry & !SHARED) as usize)
                .map_or(&[][..], Vec::as_slice)
        } else {
            &[]
        };
        single.into_iter().chain(several.iter().copied())
    }

    /// Makes `owner` the only owner of `page`. The owner holds a reference to its grant (`pin`). If
    /// the page had exactly one owner, that one loses its reference.
    #[inline]
    pub(super) fn acquire(&mut self, page: u64, owner: GrantSlot, grants: &mut Grants) {
        let entry = self.entry(page);
        if entry & SHARED == 0 {
            grants.unpin(GrantSlot(entry));
        }
        grants.pin(owner);
        self.set_entry(page, owner.0);
    }

    /// Adds `owner` to the owners of `page` and removes the owners for which `outlives` is false.
    /// Each owner holds a reference to its grant (`pin`). Returns false, and adds nothing, if
    /// `max_owners` owners remain.
    pub(super) fn share(
        &mut self,
        page: u64,
        owner: GrantSlot,
        grants: &mut Grants,
        outlives: impl Fn(GrantSlot, &Grants) -> bool,
        max_owners: usize,
    ) -> bool {
        let entry = self.entry(page);
        if entry & SHARED == 0 {
            let old = GrantSlot(entry);
            if old == owner {
                return true;
            }
            if outlives(old, grants) {
                if max_owners < 2 {
                    return false;
                }
                self.shared.push(vec![old, owner]);
                self.set_entry(page, SHARED | (self.shared.len() as u32 - 1));
            } else {
                grants.unpin(old);
                self.set_entry(page, owner.0);
            }
        } else if entry == NONE {
            if max_owners == 0 {
                return false;
            }
            self.set_entry(page, owner.0);
        } else {
            let Some(list) = self.shared.get_mut((entry & !SHARED) as usize) else {
                return true;
            };
            if list.contains(&owner) {
                return true;
            }
            list.retain(|&old| {
                let is_kept = outlives(old, grants);
                if !is_kept {
                    grants.unpin(old);
                }
                is_kept
            });
            if list.len() >= max_owners {
                return false;
            }
            list.push(owner);
        }
        grants.pin(owner);
        true
    }
}
