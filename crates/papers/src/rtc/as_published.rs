//! The reverse translation cache as published in the PVIOMMU paper: the tree of Figures 7 to 9 and
//! a queue with separators (section 4.5, Fig. 6).
//!
//! It has these defects in addition to the tree's (errata 11, 16):
//!
//! - The key is the guest page alone; the cache compares neither direction nor length.
//! - One bit marks a mapping as in use, so the first of two users releases it.
//! - A mapping that is reused and released is queued again. Its first element decides when it
//!   expires, and the queue grows with every release.
//!
//! If the figures are silent, this implementation takes the reading that works best. A mapping
//! is in the tree from its map on, with its REUSING bit set; release clears the bit. (Step 3
//! inserts it at release. Then two buffers of one page are mapped twice. At the second's release,
//! Insert finds the first and marks it as in use forever.) The embedder sets the limit; the paper
//! has none.

use alloc::collections::VecDeque;

use ringfence_pviommu::rtc::{
    CacheStats, Cycles, MappingKey, NotCached, NotInUse, Retained, ReverseCache,
};
use ringfence_types::{Direction, Iova, PhysAddr};

use super::tree::{Inserted, NodeId, TreeAsPublished};

/// An element of the queue (Fig. 6).
#[derive(Debug, Clone, Copy)]
enum Element {
    /// A released mapping: its leaf and its guest address. Only reports use the direction.
    Mapping(NodeId, u64, Direction),
    Separator,
}

/// The cache as published.
#[derive(Debug)]
pub struct RtcAsPublished {
    tree: TreeAsPublished,
    queue: VecDeque<Element>,
    separators: usize,
    cycles: Cycles,
    limit: usize,
    counts: CacheStats,
}

impl RtcAsPublished {
    /// Creates an empty cache of at most `limit` mappings.
    pub fn new(cycles: Cycles, limit: usize) -> Self {
        Self {
            tree: TreeAsPublished::new(),
            queue: VecDeque::new(),
            separators: 0,
            cycles,
            limit,
            counts: CacheStats::default(),
        }
    }

    /// Returns the tree of the cached mappings, in use or released.
    pub fn tree(&self) -> &TreeAsPublished {
        &self.tree
    }

    /// Returns the number of elements in the queue, separators included.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Returns the leaf that Search finds for the key's first page, and the address in it.
    fn find(&mut self, gpa: u64) -> Option<(NodeId, u64)> {
        let leaf = self.tree.search(gpa)?;
        let giova = self.tree.in_leaf(leaf, gpa)?;
        Some((leaf, giova))
    }

    /// Pops elements from the head of the queue until `enough` returns true for the number of
    /// mappings removed, or until a separator. Mappings in use leave the queue but stay in the
    /// tree.
    fn pop(
        &mut self,
        mut enough: impl FnMut(u64) -> bool,
        mut expired: impl FnMut(MappingKey, Iova),
    ) -> u64 {
        let mut popped = 0;
        while !enough(popped) {
            let Some(element) = self.queue.pop_front() else {
                break;
            };
            let Element::Mapping(leaf, gpa, direction) = element else {
                self.separators = self.separators.saturating_sub(1);
                break;
            };
            if self.tree.is_reusing(leaf, gpa) {
                continue;
            }
            if let Some(giova) = self.tree.in_leaf(leaf, gpa)
                && self.tree.delete(leaf, gpa)
            {
                popped += 1;
                if let Some(key) = MappingKey::new(PhysAddr::new(gpa), 1, direction) {
                    expired(key, Iova::new(giova));
                }
            }
        }
        self.counts.mappings = self
            .counts
            .mappings
            .saturating_sub(usize::try_from(popped).unwrap_or(usize::MAX));
        popped
    }
}

impl ReverseCache for RtcAsPublished {
    fn acquire(&mut self, key: MappingKey) -> Option<Iova> {
        let gpa = key.first().get();
        let found = self.find(gpa);
        let Some((leaf, giova)) = found else {
            self.counts.misses = self.counts.misses.wrapping_add(1);
            return None;
        };
        self.tree.set_reusing(leaf, gpa, true);
        self.counts.hits = self.counts.hits.wrapping_add(1);
        Some(Iova::new(giova))
    }

    fn insert(&mut self, key: MappingKey, giova: Iova) -> Result<(), NotCached> {
        if self.counts.mappings >= self.limit {
            return Err(NotCached::Full);
        }
        let gpa = key.first().get();
        match self.tree.insert(gpa, giova.get()) {
            Inserted::AlreadyExist => return Err(NotCached::Present),
            Inserted::Success => {
                // The second Insert sets the REUSING bit (line 13).
                self.tree.insert(gpa, giova.get());
            }
            // The paper's code does not detect this.
            Inserted::Wild => {}
        }
        self.counts.inserted = self.counts.inserted.wrapping_add(1);
        self.counts.mappings = self.counts.mappings.saturating_add(1);
        Ok(())
    }

    fn release(&mut self, key: MappingKey) -> Result<Retained, NotInUse> {
        let gpa = key.first().get();
        let (leaf, _) = self.find(gpa).ok_or(NotInUse(key))?;
        self.tree.set_reusing(leaf, gpa, false);
        if self.queue.try_reserve(1).is_ok() {
            self.queue
                .push_back(Element::Mapping(leaf, gpa, key.direction()));
        }
        Ok(Retained::Cached)
    }

    fn tick(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        if self.queue.try_reserve(1).is_ok() {
            self.queue.push_back(Element::Separator);
            self.separators += 1;
        }
        if self.separators > usize::from(self.cycles.get()) {
            let popped = self.pop(|_| false, expired);
            self.counts.expired = self.counts.expired.wrapping_add(popped);
        }
    }

    fn evict(&mut self, mut expired: impl FnMut(MappingKey, Iova)) {
        let wanted = self.limit.div_ceil(16) as u64;
        let (mut popped, mut left) = (0, wanted);
        while left > 0 && !self.queue.is_empty() {
            let now = self.pop(|popped| popped >= left, &mut expired);
            left -= now;
            popped += now;
        }
        self.counts.forced = self.counts.forced.wrapping_add(popped);
    }

    fn drain(&mut self, mut expired: impl FnMut(MappingKey, Iova)) {
        let mut popped = 0_u64;
        while !self.queue.is_empty() {
            popped += self.pop(|_| false, &mut expired);
        }
        self.counts.forced = self.counts.forced.wrapping_add(popped);
    }

    fn stats(&self) -> CacheStats {
        CacheStats {
            // The published cache cannot tell: a queued mapping may be in use, or queued twice.
            released: self.queue.len().saturating_sub(self.separators),
            bytes: self
                .tree
                .bytes()
                .saturating_add(self.queue.capacity().saturating_mul(size_of::<Element>())),
            ..self.counts
        }
    }
}
