//! Map from a mapping's address to its cache key. The driver unmaps by address, but the cache looks
//! up by key.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use ringfence_types::{Iova, Pfn};

use crate::cache::MappingKey;

/// Pages per leaf.
const LEAF: usize = 512;

/// Number of low pages, which leaves cover: the pages of 32-bit addresses, which every allocator
/// uses first.
const LOW: u64 = 1 << 20;

/// Keys of mappings, by the first page of their addresses. Leaves are never freed: each 2 MiB
/// region below 4 GiB that was ever used takes 8 bytes per page.
#[derive(Debug, Default)]
pub(super) struct ByIova {
    /// Key words; 0 means no mapping.
    low: Vec<Option<Box<[u64; LEAF]>>>,
    high: BTreeMap<u64, u64>,
}

impl ByIova {
    #[inline]
    fn locate(iova: Iova) -> (usize, usize) {
        let page = Pfn::containing(iova).get();
        // The casts do not truncate below `LOW`.
        ((page / LEAF as u64) as usize, (page % LEAF as u64) as usize)
    }

    #[inline]
    fn is_low(iova: Iova) -> bool {
        Pfn::containing(iova).get() < LOW
    }

    /// Returns the key of the mapping that starts in the page of `iova`.
    #[inline]
    pub(super) fn get(&self, iova: Iova) -> Option<MappingKey> {
        let word = if Self::is_low(iova) {
            let (leaf, slot) = Self::locate(iova);
            *self.low.get(leaf)?.as_ref()?.get(slot)?
        } else {
            *self.high.get(&Pfn::containing(iova).get())?
        };
        MappingKey::from_word_if_any(word)
    }

    /// Records the mapping that starts in the page of `iova`.
    pub(super) fn put(&mut self, iova: Iova, key: MappingKey) {
        self.set(iova, key.word());
    }

    /// Removes the mapping that starts in the page of `iova` and returns its key.
    pub(super) fn take(&mut self, iova: Iova) -> Option<MappingKey> {
        let key = self.get(iova)?;
        if Self::is_low(iova) {
            self.set(iova, 0);
        } else {
            self.high.remove(&Pfn::containing(iova).get());
        }
        Some(key)
    }

    fn set(&mut self, iova: Iova, word: u64) {
        if !Self::is_low(iova) {
            self.high.insert(Pfn::containing(iova).get(), word);
            return;
        }
        let (leaf, slot) = Self::locate(iova);
        if self.low.len() <= leaf {
            self.low.resize_with(leaf.saturating_add(1), || None);
        }
        let leaf = self.low.get_mut(leaf);
        let leaf = leaf.map(|leaf| leaf.get_or_insert_with(|| Box::new([0; LEAF])));
        if let Some(locate) = leaf.and_then(|leaf| leaf.get_mut(slot)) {
            *locate = word;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_types::{Direction, PhysAddr};

    #[test]
    fn inserted_keys_are_found_until_removed() {
        let mut keys = ByIova::default();
        let key =
            |page: u64| MappingKey::new(PhysAddr::new(page << 12), 3, Direction::ToDevice).unwrap();
        let iovas = [0x1000, 0x20_0000, 0xffff_f000, 1 << 32, 1 << 47].map(Iova::new);
        for (page, iova) in iovas.iter().enumerate() {
            assert_eq!(keys.get(*iova), None);
            keys.put(*iova, key(page as u64));
        }
        for (page, iova) in iovas.iter().enumerate() {
            let inside = iova.wrapping_add(0xfff);
            assert_eq!(keys.get(inside), Some(key(page as u64)), "{iova}");
            let next = iova.wrapping_add(0x1000);
            assert_eq!(keys.get(next).is_some(), iovas.contains(&next), "{iova}");
            assert_eq!(keys.take(inside), Some(key(page as u64)));
            assert_eq!(keys.take(inside), None);
        }
    }
}
