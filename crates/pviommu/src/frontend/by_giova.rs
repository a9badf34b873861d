//! Map from a mapping's address to its cache key. The driver unmaps by address, but the cache looks
//! up by key.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use ringfence_types::{Iova, Pfn};

use crate::rtc::MappingKey;

/// Pages per leaf.
const LEAF: usize = 512;

/// Number of low pages, which leaves cover: the pages of 32-bit addresses, which every allocator
/// uses first.
const LOW: u64 = 1 << 20;

/// Keys of mappings, by the first page of their addresses. Leaves are never freed: each 2 MiB
/// region below 4 GiB that was ever used takes 8 bytes per page.
#[derive(Debug, Default)]
pub(super) struct ByGiova {
    /// Key words; 0 means no mapping.
    low: Vec<Option<Box<[u64; LEAF]>>>,
    high: BTreeMap<u64, u64>,
}

impl ByGiova {
    #[inline]
    fn locate(giova: Iova) -> (usize, usize) {
        let page = Pfn::containing(giova).get();
        // The casts do not truncate below `LOW`.
        ((page / LEAF as u64) as usize, (page % LEAF as u64) as usize)
    }

    #[inline]
    fn is_low(giova: Iova) -> bool {
        Pfn::containing(giova).get() < LOW
    }

    /// Returns the key of the mapping that starts in the page of `giova`.
    #[inline]
    pub(super) fn get(&self, giova: Iova) -> Option<MappingKey> {
        let word = if Self::is_low(giova) {
            let (leaf, slot) = Self::locate(giova);
            *self.low.get(leaf)?.as_ref()?.get(slot)?
        } else {
            *self.high.get(&Pfn::containing(giova).get())?
        };
        MappingKey::from_word_if_any(word)
    }

    /// Records the mapping that starts in the page of `giova`.
    pub(super) fn put(&mut self, giova: Iova, key: MappingKey) {
        self.set(giova, key.word());
    }

    /// Removes the mapping that starts in the page of `giova` and returns its key.
    pub(super) fn take(&mut self, giova: Iova) -> Option<MappingKey> {
        let key = self.get(giova)?;
        if Self::is_low(giova) {
            self.set(giova, 0);
        } else {
            self.high.remove(&Pfn::containing(giova).get());
        }
        Some(key)
    }

    fn set(&mut self, giova: Iova, word: u64) {
        if !Self::is_low(giova) {
            self.high.insert(Pfn::containing(giova).get(), word);
            return;
        }
        let (leaf, slot) = Self::locate(giova);
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
        let mut keys = ByGiova::default();
        let key =
            |page: u64| MappingKey::new(PhysAddr::new(page << 12), 3, Direction::ToDevice).unwrap();
        let giovas = [0x1000, 0x20_0000, 0xffff_f000, 1 << 32, 1 << 47].map(Iova::new);
        for (page, giova) in giovas.iter().enumerate() {
            assert_eq!(keys.get(*giova), None);
            keys.put(*giova, key(page as u64));
        }
        for (page, giova) in giovas.iter().enumerate() {
            let inside = giova.wrapping_add(0xfff);
            assert_eq!(keys.get(inside), Some(key(page as u64)), "{giova}");
            let next = giova.wrapping_add(0x1000);
            assert_eq!(keys.get(next).is_some(), giovas.contains(&next), "{giova}");
            assert_eq!(keys.take(inside), Some(key(page as u64)));
            assert_eq!(keys.take(inside), None);
        }
    }
}
