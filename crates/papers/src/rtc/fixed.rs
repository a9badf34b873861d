//! The PVIOMMU paper's reverse translation cache, fixed (errata 11, 16). It keeps the radix tree
//! and the queue with separators. The key includes direction and length, a count of users replaces
//! the REUSING bit, and each mapping is queued once.

use alloc::vec::Vec;

use ringfence_pviommu::rtc::{
    CacheStats, Cycles, EvictionBudget, MappingKey, NotCached, NotInUse, Retained, ReverseCache,
};
use ringfence_types::{Iova, PageSize};

use super::tree::{NodeId, Tree, TreeError};

/// A mapping. The paper keeps this data in the leaf; here, the leaf's value is an index to it. A
/// leaf has one value for each page, but mappings of several lengths may begin with the same page.
#[derive(Debug, Clone, Copy)]
struct Record {
    key: MappingKey,
    giova: Iova,
    users: u32,
    /// Cycle of the last release.
    released: u64,
    /// Next mapping with the same page and direction.
    other: Option<u32>,
    /// Next mapping in the same section of the queue.
    next: Option<u32>,
    queued: bool,
    leaf: NodeId,
}

/// First and last mapping between two separators of the queue. Never empty.
#[derive(Debug, Clone, Copy)]
struct Section {
    first: u32,
    last: u32,
}

/// The fixed cache, of mode `rtc`.
///
/// The queue has one section for each of the last C + 1 cycles: a list of mappings, first in, first
/// out. A reused mapping keeps its position. When the cache reaches that position, it moves the
/// mapping to the end of the section of its last release. Each mapping is therefore queued at most
/// once.
#[derive(Debug)]
pub struct Rtc {
    /// One tree for each direction.
    trees: [Tree; 3],
    records: Vec<Record>,
    free: Vec<u32>,
    /// Section `cycle % (C + 1)` holds the mappings released in `cycle`.
    sections: Vec<Option<Section>>,
    cycle: u64,
    cycles: Cycles,
    limit: usize,
    released: usize,
    /// Pages of all mappings.
    pages: u64,
    counts: CacheStats,
}

/// Returns the guest page number, which is the tree's key.
fn page(key: MappingKey) -> u64 {
    key.first().get() >> PageSize::Size4K.shift()
}

impl Rtc {
    /// Creates an empty cache of at most `limit` pages, in use or released.
    pub fn new(cycles: Cycles, limit: usize) -> Self {
        Self {
            trees: Default::default(),
            records: Vec::new(),
            free: Vec::new(),
            sections: alloc::vec![None; usize::from(cycles.get()) + 1],
            cycle: 0,
            cycles,
            limit,
            released: 0,
            pages: 0,
            counts: CacheStats::default(),
        }
    }

    /// Returns the trees, one for each direction, in the order of
    /// [`Direction::ALL`](ringfence_types::Direction::ALL).
    pub fn trees(&self) -> &[Tree; 3] {
        &self.trees
    }

    fn tree(&mut self, key: MappingKey) -> &mut Tree {
        let [to, from, both] = &mut self.trees;
        match key.direction() {
            ringfence_types::Direction::ToDevice => to,
            ringfence_types::Direction::FromDevice => from,
            ringfence_types::Direction::Bidirectional => both,
        }
    }

    fn record(&mut self, at: u32) -> Option<&mut Record> {
        self.records.get_mut(at as usize)
    }

    /// Returns the first record of the page and direction, with its leaf.
    #[inline]
    fn first(&mut self, key: MappingKey) -> Option<(u32, NodeId)> {
        let (value, leaf) = self.tree(key).get(page(key))?;
        Some((u32::try_from(value.checked_sub(1)?).ok()?, leaf))
    }

    #[inline]
    fn find(&mut self, key: MappingKey) -> Option<(u32, &mut Record)> {
        let (mut at, _) = self.first(key)?;
        loop {
            let record = self.records.get(at as usize)?;
            if record.key == key {
                break;
            }
            at = record.other?;
        }
        Some((at, self.record(at)?))
    }

    #[inline]
    fn section(&mut self, cycle: u64) -> Option<&mut Option<Section>> {
        let sections = self.sections.len() as u64;
        let at = usize::try_from(cycle.checked_rem(sections)?).ok()?;
        self.sections.get_mut(at)
    }

    /// Appends a mapping to the section of the cycle of its release.
    #[inline]
    fn enqueue(&mut self, at: u32) {
        let Some(cycle) = self.record(at).map(|record| record.released) else {
            return;
        };
        let Some(section) = self.section(cycle) else {
            return;
        };
        let before = section.map(|section| section.last);
        let first = section.map_or(at, |section| section.first);
        *section = Some(Section { first, last: at });
        if let Some(record) = self.record(at) {
            (record.next, record.queued) = (None, true);
        }
        if let Some(before) = before.and_then(|before| self.record(before)) {
            before.next = Some(at);
        }
    }

    /// Removes a released mapping from the tree and the records, but not from the queue.
    fn remove_record(&mut self, at: u32) -> Option<(MappingKey, Iova)> {
        let Record {
            key,
            giova,
            other,
            leaf,
            ..
        } = *self.record(at)?;
        let (first, _) = self.first(key)?;
        let tree = self.tree(key);
        if first != at {
            // A mapping of the same page with another length precedes it in the list.
            let mut before = first;
            while let Some(record) = self.record(before) {
                if record.other == Some(at) {
                    record.other = other;
                    break;
                }
                before = record.other?;
            }
        } else if let Some(other) = other {
            tree.replace(page(key), u64::from(other) + 1);
        } else {
            tree.remove(leaf, page(key))?;
        }
        self.free.push(at);
        self.released = self.released.saturating_sub(1);
        self.pages = self.pages.saturating_sub(key.pages());
        Some((key, giova))
    }

    /// Walks the section of `cycle`. Mappings in use leave the queue. Mappings released later move
    /// to their section. The others leave the cache until `budget` rejects one; the rest stay in
    /// this section. Returns the number of mappings that left the cache.
    fn expire(
        &mut self,
        cycle: u64,
        budget: &mut EvictionBudget,
        mut expired: impl FnMut(MappingKey, Iova),
    ) -> u64 {
        let section = self.section(cycle).and_then(Option::take);
        let mut at = section.map(|section| section.first);
        let mut evicted = 0;
        while let Some(this) = at {
            let Some(record) = self.record(this) else {
                break;
            };
            record.queued = false;
            let (users, released, pages) = (record.users, record.released, record.key.pages());
            at = record.next.take();
            if users > 0 {
                continue;
            }
            if released != cycle || !budget.takes(pages) {
                self.enqueue(this);
            } else if let Some((key, giova)) = self.remove_record(this) {
                evicted += 1;
                expired(key, giova);
            }
        }
        evicted
    }

    /// Returns the oldest cycle whose section may hold mappings.
    fn oldest(&self) -> u64 {
        self.cycle.saturating_sub(u64::from(self.cycles.get()))
    }

    fn force(&mut self, mut budget: EvictionBudget, mut expired: impl FnMut(MappingKey, Iova)) {
        for cycle in self.oldest()..=self.cycle {
            let evicted = self.expire(cycle, &mut budget, &mut expired);
            self.counts.forced = self.counts.forced.wrapping_add(evicted);
        }
    }
}

impl ReverseCache for Rtc {
    #[inline]
    fn acquire(&mut self, key: MappingKey) -> Option<Iova> {
        if let Some((_, record)) = self.find(key)
            && let Some(users) = record.users.checked_add(1)
        {
            let (first, giova) = (record.users == 0, record.giova);
            record.users = users;
            self.released = self.released.saturating_sub(usize::from(first));
            self.counts.hits = self.counts.hits.wrapping_add(1);
            return Some(giova);
        }
        self.counts.misses = self.counts.misses.wrapping_add(1);
        None
    }

    fn insert(&mut self, key: MappingKey, giova: Iova) -> Result<(), NotCached> {
        if !giova.is_aligned(PageSize::Size4K.bytes()) {
            return Err(NotCached::Address(giova));
        }
        if self.find(key).is_some() {
            return Err(NotCached::Present);
        }
        let pages = self.pages.saturating_add(key.pages());
        if pages > self.limit as u64 {
            return Err(NotCached::Full);
        }
        let at = match self.free.last() {
            Some(at) => *at,
            None => {
                // Reserve memory for the record and for its later entry in the free list.
                let room = self.records.try_reserve(1).is_ok()
                    && self.free.try_reserve(self.records.len() + 1).is_ok();
                match u32::try_from(self.records.len()) {
                    Ok(at) if room => at,
                    _ => return Err(NotCached::OutOfMemory),
                }
            }
        };
        let value = u64::from(at) + 1;
        let (other, leaf) = match self.first(key) {
            Some((first, leaf)) => {
                self.tree(key).replace(page(key), value);
                (Some(first), leaf)
            }
            None => match self.tree(key).insert(page(key), value) {
                Ok(leaf) => (None, leaf),
                Err(TreeError::Present | TreeError::Zero | TreeError::OutOfMemory) => {
                    return Err(NotCached::OutOfMemory);
                }
            },
        };
        let record = Record {
            key,
            giova,
            users: 1,
            released: 0,
            other,
            next: None,
            queued: false,
            leaf,
        };
        self.free.pop();
        self.pages = pages;
        match self.record(at) {
            Some(slot) => *slot = record,
            None => self.records.push(record),
        }
        self.counts.inserted = self.counts.inserted.wrapping_add(1);
        Ok(())
    }

    #[inline]
    fn release(&mut self, key: MappingKey) -> Result<Retained, NotInUse> {
        let cycle = self.cycle;
        let (at, record) = self.find(key).ok_or(NotInUse(key))?;
        record.users = record.users.checked_sub(1).ok_or(NotInUse(key))?;
        record.released = cycle;
        let (last, queued) = (record.users == 0, record.queued);
        self.released += usize::from(last);
        if last && !queued {
            self.enqueue(at);
        }
        Ok(Retained::Cached)
    }

    fn tick(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        // The next cycle reuses the section of the oldest cycle.
        let evicted = match self.cycle.checked_sub(u64::from(self.cycles.get())) {
            Some(oldest) => self.expire(oldest, &mut EvictionBudget::all(), expired),
            None => 0,
        };
        self.cycle = self.cycle.saturating_add(1);
        self.counts.expired = self.counts.expired.wrapping_add(evicted);
    }

    fn evict(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        self.force(EvictionBudget::of(self.limit), expired);
    }

    fn drain(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        self.force(EvictionBudget::all(), expired);
    }

    fn stats(&self) -> CacheStats {
        let trees: usize = self.trees.iter().map(Tree::bytes).sum();
        CacheStats {
            mappings: self.records.len().saturating_sub(self.free.len()),
            released: self.released,
            pages: self.pages,
            bytes: trees
                .saturating_add(self.records.capacity().saturating_mul(size_of::<Record>()))
                .saturating_add(self.free.capacity().saturating_mul(size_of::<u32>())),
            ..self.counts
        }
    }
}
