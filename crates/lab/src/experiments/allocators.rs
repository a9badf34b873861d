//! What a workload's maps and unmaps do to an allocator alone: searches are counted, not timed.

use std::collections::HashMap;

use ringfence_iova::{AllocRequest, CachedTree, Capacity, Eiovar, RangeStore};
use ringfence_types::{DomainId, Flushed, Invalidation, Pending, Pfn, PfnRange, Unmapped};

use crate::error::LabError;
use crate::meter::FreeInvalidator;
use crate::plan::{Plan, Step};

/// The highest page of a 32-bit device.
pub(super) const TOP: u64 = 0xf_ffff;

/// Unmaps that a deferred mode collects: W of EIOVAR section 6.2.
pub(super) const W: usize = 250;

/// The pages `lo..=hi`.
///
/// # Errors
/// There are none.
pub(super) fn pages(lo: u64, hi: u64) -> Result<PfnRange, LabError> {
    PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).ok_or(LabError::Internal("pages"))
}

/// A range that nothing translates any more: there is no table here that could.
///
/// # Errors
/// None that this invalidator could make.
pub(super) fn flushed(range: PfnRange) -> Result<Flushed, LabError> {
    let unmapped = Unmapped::attest_cleared(DomainId::new(1), range);
    let failed = LabError::Internal("an invalidator that does not fail");
    Pending::submit(&mut FreeInvalidator, Invalidation::Global, unmapped)
        .map_err(|_| LabError::Internal("an invalidator that does not refuse"))?
        .wait(&mut FreeInvalidator)
        .map_err(|_| failed)
}

/// Linux's tree, with EIOVAR's freelists in front if any.
#[derive(Debug)]
pub(super) enum TreeWithFreelists {
    /// The tree alone.
    Tree(CachedTree),
    /// With freelists.
    Lists(Box<Eiovar<CachedTree>>),
}

impl TreeWithFreelists {
    /// The tree alone, or with freelists of a capacity.
    ///
    /// # Errors
    /// None.
    pub(super) fn new(lists: Option<Capacity>) -> Result<Self, LabError> {
        let tree = CachedTree::new(pages(1, TOP)?);
        Ok(match lists {
            None => Self::Tree(tree),
            Some(capacity) => Self::Lists(Box::new(Eiovar::new(tree, capacity))),
        })
    }

    fn alloc(&mut self, pages: u64) -> Result<(PfnRange, u32), LabError> {
        let request = AllocRequest::new(pages, Pfn::new(TOP));
        let found = match self {
            Self::Tree(tree) => tree.alloc(&request),
            Self::Lists(lists) => lists.alloc(&request),
        };
        let found = found.map_err(LabError::Alloc)?;
        Ok((found.range, found.steps))
    }

    fn free(&mut self, range: PfnRange) -> Result<(), LabError> {
        let range = flushed(range)?.into();
        let freed = match self {
            Self::Tree(tree) => tree.free(range),
            Self::Lists(lists) => lists.free(range),
        };
        if freed {
            Ok(())
        } else {
            Err(LabError::Internal("a range that was not allocated"))
        }
    }

    /// Freed ranges that the freelists hold.
    pub(super) fn held(&self) -> usize {
        match self {
            Self::Tree(_) => 0,
            Self::Lists(lists) => lists.cached_ranges(),
        }
    }
}

/// What was counted over some allocations.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Counts {
    /// Allocations.
    pub(super) allocs: u64,
    /// Steps of their searches.
    pub(super) steps: u64,
    /// The longest.
    pub(super) longest: u32,
    /// Allocations that found a freed range in a list.
    pub(super) from_list: u64,
    /// Freed ranges in the lists after each allocation and each deallocation, added up.
    pub(super) held: u64,
    /// Deallocations.
    pub(super) frees: u64,
}

impl Counts {
    /// Steps of an allocation.
    pub(super) fn mean_steps(&self) -> f64 {
        self.steps as f64 / self.allocs.max(1) as f64
    }

    /// Freed ranges that wait in the lists, over all allocations and deallocations: "every
    /// allocation and deallocation contributes to the average" (EIOVAR section 6.1).
    pub(super) fn mean_held(&self) -> f64 {
        self.held as f64 / (self.allocs + self.frees).max(1) as f64
    }

    /// Share of allocations that the lists satisfied.
    pub(super) fn hit_rate(&self) -> f64 {
        self.from_list as f64 / self.allocs.max(1) as f64
    }
}

/// An allocator that is driven by plans.
#[derive(Debug)]
pub(super) struct DrivenAllocator {
    store: TreeWithFreelists,
    /// By slot.
    live: HashMap<u32, PfnRange>,
    waiting: Vec<PfnRange>,
    /// Frees at once: 1 in strict, [`W`] in deferred.
    batch: usize,
    /// Most addresses that were allocated at once.
    most: u64,
    /// What is free and was not, after each free: its largest number, sum, and count.
    unused: (u64, u64, u64),
}

impl DrivenAllocator {
    /// A fresh allocator whose ranges are freed `batch` at a time.
    ///
    /// # Errors
    /// None.
    pub(super) fn new(lists: Option<Capacity>, batch: usize) -> Result<Self, LabError> {
        Ok(Self {
            store: TreeWithFreelists::new(lists)?,
            live: HashMap::new(),
            waiting: Vec::new(),
            batch,
            most: 0,
            unused: (0, 0, 0),
        })
    }

    /// Performs a plan; `each` is told the steps of each allocation.
    ///
    /// # Errors
    /// The space is exhausted.
    pub(super) fn run(
        &mut self,
        plan: &Plan,
        mut each: impl FnMut(u32),
    ) -> Result<Counts, LabError> {
        let mut counts = Counts::default();
        for timed in &plan.steps {
            match timed.step {
                Step::Map {
                    id, first, count, ..
                } => {
                    for piece in plan.segments(first, count) {
                        let pages = piece.pages(ringfence_types::PageSize::Size4K);
                        let before = self.store.held();
                        let (range, steps) = self.store.alloc(pages)?;
                        counts.allocs += 1;
                        counts.steps += u64::from(steps);
                        counts.longest = counts.longest.max(steps);
                        counts.from_list += u64::from(self.store.held() < before);
                        counts.held += self.store.held() as u64;
                        each(steps);
                        self.live.insert(id.0, range);
                        let allocated = (self.live.len() + self.waiting.len()) as u64;
                        self.most = self.most.max(allocated);
                    }
                }
                Step::Unmap { id, .. } => {
                    let range = self.live.remove(&id.0);
                    self.waiting
                        .push(range.ok_or(LabError::Internal("unmap without map"))?);
                    if self.waiting.len() >= self.batch {
                        for range in std::mem::take(&mut self.waiting) {
                            self.store.free(range)?;
                            counts.frees += 1;
                            counts.held += self.store.held() as u64;
                        }
                    }
                    let unused = self.most - (self.live.len() + self.waiting.len()) as u64;
                    self.unused.0 = self.unused.0.max(unused);
                    self.unused.1 += unused;
                    self.unused.2 += 1;
                }
                Step::EndBurst { .. } | Step::Doorbell { .. } | Step::Tick => {}
            }
        }
        Ok(counts)
    }

    /// Most addresses that were allocated at once.
    pub(super) fn most(&self) -> u64 {
        self.most
    }

    /// Addresses that were allocated before and are free: their largest number, and their mean over
    /// all unmaps.
    pub(super) fn unused(&self) -> (u64, f64) {
        let (largest, sum, count) = self.unused;
        (largest, sum as f64 / count.max(1) as f64)
    }
}
