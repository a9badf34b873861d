//! Places in RAM for the pages of mappings. No two mappings share a page, so that a landed access
//! shows which one translated it.

use std::collections::BTreeMap;

use ringfence_types::{PageSize, PhysAddr, PhysRange};

use crate::random::Random;

const PAGE: u64 = PageSize::Size4K.bytes();
/// Random addresses tried before the memory counts as full.
const TRIES: usize = 64;

/// The pages of RAM that mappings use.
#[derive(Debug)]
pub(crate) struct Buffers {
    region: PhysRange,
    /// First byte and number of pages of each used range.
    used: BTreeMap<u64, u64>,
}

impl Buffers {
    pub(crate) const fn new(region: PhysRange) -> Self {
        Self {
            region,
            used: BTreeMap::new(),
        }
    }

    /// Takes `pages` pages, aligned to `align` bytes; `None` if no range was found.
    pub(crate) fn take(&mut self, random: &mut Random, pages: u64, align: u64) -> Option<PhysAddr> {
        let bytes = pages * PAGE;
        for _ in 0..TRIES {
            let offset = random.below(self.region.bytes() / align) * align;
            let at = self.region.start().get() + offset;
            let below = self.used.range(..at + bytes).next_back();
            let is_free = below.is_none_or(|(first, pages)| first + pages * PAGE <= at);
            if is_free && offset + bytes <= self.region.bytes() {
                self.used.insert(at, pages);
                return Some(PhysAddr::new(at));
            }
        }
        None
    }

    /// Gives back the range at `at`.
    pub(crate) fn free(&mut self, at: PhysAddr) {
        self.used.remove(&at.get());
    }
}
