//! The reverse translation cache as printed: the tree of Figures 7 to 9 and a queue with separators
//! (section 4.5, Fig. 6).
//!
//! Its defects, beside the tree's (errata 11, 16): the key is the guest page alone, so that
//! direction and length of what was mapped are not asked for; whether a mapping is in use is one
//! bit, so that the first of two users releases it; a mapping that is reused and released stands in
//! the queue a second time, so that its first place decides when it expires, and the queue grows
//! with every release.
//!
//! What no figure says is read in its favour. A mapping stands in the tree from its map on, with
//! its bit set. (By step 3 it would be put in when it is released; then two buffers of one page are
//! mapped twice, and Insert, which finds the first at the second's release, marks it as in use for
//! good.) Release clears the bit. The limit is the embedder's; the document has none.

use alloc::collections::VecDeque;

use ringfence_types::{Direction, Iova, PhysAddr};

use super::tree::{Inserted, NodeId, TreeAsPublished};
use super::{Cycles, MappingKey, NotCached, NotInUse, ReverseCache, RtcStats};

/// An element of the queue (Fig. 6).
#[derive(Debug, Clone, Copy)]
enum Element {
    /// A released mapping: its leaf and its guest address. The direction is there for reports
    /// alone.
    Mapping(NodeId, u64, Direction),
    Separator,
}

/// The literal cache.
#[derive(Debug)]
pub struct RtcAsPublished {
    tree: TreeAsPublished,
    queue: VecDeque<Element>,
    separators: usize,
    cycles: Cycles,
    limit: usize,
    counts: RtcStats,
}

impl RtcAsPublished {
    /// An empty cache of at most `limit` mappings.
    pub fn new(cycles: Cycles, limit: usize) -> Self {
        Self {
            tree: TreeAsPublished::new(),
            queue: VecDeque::new(),
            separators: 0,
            cycles,
            limit,
            counts: RtcStats::default(),
        }
    }

    /// The tree.
    pub fn tree(&self) -> &TreeAsPublished {
        &self.tree
    }

    /// Elements of the queue, separators included.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// The leaf that Search finds for the key's first page, and the address in it.
    fn find(&mut self, gpa: u64) -> Option<(NodeId, u64)> {
        let leaf = self.tree.search(gpa)?;
        let giova = self.tree.in_leaf(leaf, gpa)?;
        Some((leaf, giova))
    }

    /// Takes elements off the queue's head until `enough` says so of the number taken, or a
    /// separator ends them. Those in use only leave the queue.
    fn pop(
        &mut self,
        mut enough: impl FnMut(u64) -> bool,
        mut expired: impl FnMut(MappingKey, Iova),
    ) -> u64 {
        let mut gone = 0;
        while !enough(gone) {
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
                gone += 1;
                if let Some(key) = MappingKey::new(PhysAddr::new(gpa), 1, direction) {
                    expired(key, Iova::new(giova));
                }
            }
        }
        self.counts.mappings = self
            .counts
            .mappings
            .saturating_sub(usize::try_from(gone).unwrap_or(usize::MAX));
        gone
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
                // A second Insert marks it as in use, line 13.
                self.tree.insert(gpa, giova.get());
            }
            // The document's code has nothing that would notice.
            Inserted::Wild => {}
        }
        self.counts.inserted = self.counts.inserted.wrapping_add(1);
        self.counts.mappings = self.counts.mappings.saturating_add(1);
        Ok(())
    }

    fn release(&mut self, key: MappingKey) -> Result<(), NotInUse> {
        let gpa = key.first().get();
        let (leaf, _) = self.find(gpa).ok_or(NotInUse(key))?;
        self.tree.set_reusing(leaf, gpa, false);
        if self.queue.try_reserve(1).is_ok() {
            self.queue
                .push_back(Element::Mapping(leaf, gpa, key.direction()));
        }
        Ok(())
    }

    fn tick(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        if self.queue.try_reserve(1).is_ok() {
            self.queue.push_back(Element::Separator);
            self.separators += 1;
        }
        if self.separators > usize::from(self.cycles.get()) {
            let gone = self.pop(|_| false, expired);
            self.counts.expired = self.counts.expired.wrapping_add(gone);
        }
    }

    fn evict(&mut self, mut expired: impl FnMut(MappingKey, Iova)) {
        let wanted = self.limit.div_ceil(16) as u64;
        let (mut gone, mut left) = (0, wanted);
        while left > 0 && !self.queue.is_empty() {
            let now = self.pop(|gone| gone >= left, &mut expired);
            left -= now;
            gone += now;
        }
        self.counts.forced = self.counts.forced.wrapping_add(gone);
    }

    fn drain(&mut self, mut expired: impl FnMut(MappingKey, Iova)) {
        let mut gone = 0_u64;
        while !self.queue.is_empty() {
            gone += self.pop(|_| false, &mut expired);
        }
        self.counts.forced = self.counts.forced.wrapping_add(gone);
    }

    fn stats(&self) -> RtcStats {
        RtcStats {
            // The document's cache does not know: what stands in the queue may be in use, or there
            // twice.
            released: self.queue.len().saturating_sub(self.separators),
            bytes: self
                .tree
                .bytes()
                .saturating_add(self.queue.capacity().saturating_mul(size_of::<Element>())),
            ..self.counts
        }
    }
}
