//! Drives an IOVA allocator alone with a workload's maps and unmaps. It counts search steps, and
//! times the calls if it is given a clock.

use std::collections::HashMap;

use ringfence_iova::{AllocRequest, CachedTree, Capacity, Eiovar, RangeStore};
use ringfence_types::{DomainId, Flushed, Invalidation, Pending, Pfn, PfnRange, Unmapped};

use ringfence_lab::LabError;
use ringfence_lab::meter::FreeInvalidator;
use ringfence_lab::plan::{Plan, Step};

/// Highest page frame number that a 32-bit device can address.
pub(super) const TOP: u64 = 0xf_ffff;

/// W of EIOVAR section 6.2: unmaps that a deferred mode batches.
pub(super) const W: usize = 250;

/// The pages `lo..=hi`.
///
/// # Errors
/// `hi` is below `lo`.
pub(super) fn pages(lo: u64, hi: u64) -> Result<PfnRange, LabError> {
    PfnRange::inclusive(Pfn::new(lo), Pfn::new(hi)).ok_or(LabError::Internal("pages"))
}

/// Proves `range` flushed without hardware: no table here maps it.
///
/// # Errors
/// None in practice: [`FreeInvalidator`] never refuses and never fails.
pub(super) fn flushed(range: PfnRange) -> Result<Flushed, LabError> {
    let unmapped = Unmapped::attest_cleared(DomainId::new(1), range);
    let failed = LabError::Internal("an invalidator that does not fail");
    Pending::submit(&mut FreeInvalidator, Invalidation::Global, unmapped)
        .map_err(|_| LabError::Internal("an invalidator that does not refuse"))?
        .wait(&mut FreeInvalidator)
        .map_err(|_| failed)
}

/// Linux's tree, optionally with EIOVAR's freelists in front.
#[derive(Debug)]
pub(super) enum TreeWithFreelists {
    /// The tree alone.
    Tree(CachedTree),
    /// The tree behind freelists.
    Lists(Box<Eiovar<CachedTree>>),
}

impl TreeWithFreelists {
    /// The tree alone, or behind freelists of capacity `lists`.
    ///
    /// # Errors
    /// None in practice: the range is valid.
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

    /// Freed ranges in the freelists.
    pub(super) fn held(&self) -> usize {
        match self {
            Self::Tree(_) => 0,
            Self::Lists(lists) => lists.cached_ranges(),
        }
    }
}

/// Counts over a run's allocations and frees.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Counts {
    pub(super) allocs: u64,
    /// Search steps of all allocations.
    pub(super) steps: u64,
    /// Search steps of the longest allocation.
    pub(super) longest: u32,
    /// Allocations that a freelist satisfied.
    pub(super) from_list: u64,
    /// Sum of the freelists' lengths, sampled after each allocation and each free.
    pub(super) held: u64,
    pub(super) frees: u64,
    /// Ticks of the clock in all allocations, its own reads included.
    pub(super) alloc_ticks: u64,
    /// Ticks of the clock in all frees, its own reads included.
    pub(super) free_ticks: u64,
}

impl Counts {
    /// Mean search steps per allocation.
    pub(super) fn mean_steps(&self) -> f64 {
        self.steps as f64 / self.allocs.max(1) as f64
    }

    /// Mean number of freed ranges in the lists: "every allocation and deallocation contributes to
    /// the average" (EIOVAR section 6.1).
    pub(super) fn mean_held(&self) -> f64 {
        self.held as f64 / (self.allocs + self.frees).max(1) as f64
    }

    /// Share of allocations that a freelist satisfied.
    pub(super) fn hit_rate(&self) -> f64 {
        self.from_list as f64 / self.allocs.max(1) as f64
    }
}

/// An allocator that executes plans.
#[derive(Debug)]
pub(super) struct DrivenAllocator {
    store: TreeWithFreelists,
    /// Live ranges, by mapping slot.
    live: HashMap<u32, PfnRange>,
    waiting: Vec<PfnRange>,
    /// Number of unmaps per batch of frees: 1 in strict, [`W`] in deferred modes.
    batch: usize,
    /// Highest number of ranges allocated at the same time.
    most: u64,
    /// Ranges that were allocated before and are free now, sampled after each unmap: maximum, sum
    /// and number of samples.
    unused: (u64, u64, u64),
}

impl DrivenAllocator {
    /// A new allocator that frees ranges in batches of `batch`.
    ///
    /// # Errors
    /// None in practice; see [`TreeWithFreelists::new`].
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

    /// Executes a plan. Calls `each` with the search steps of every allocation.
    ///
    /// # Errors
    /// The IOVA space is exhausted, or the plan unmaps a mapping that it did not map.
    pub(super) fn run(&mut self, plan: &Plan, each: impl FnMut(u32)) -> Result<Counts, LabError> {
        self.run_with_clock(plan, each, || 0)
    }

    /// Like [`run`](Self::run), and reads the clock `now` before and after each call.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub(super) fn run_with_clock(
        &mut self,
        plan: &Plan,
        mut each: impl FnMut(u32),
        now: impl Fn() -> u64,
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
                        let begin = now();
                        let (range, steps) = self.store.alloc(pages)?;
                        counts.alloc_ticks += now().wrapping_sub(begin);
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
                            let begin = now();
                            self.store.free(range)?;
                            counts.free_ticks += now().wrapping_sub(begin);
                            counts.frees += 1;
                            counts.held += self.store.held() as u64;
                        }
                    }
                    let unused = self.most - (self.live.len() + self.waiting.len()) as u64;
                    self.unused.0 = self.unused.0.max(unused);
                    self.unused.1 += unused;
                    self.unused.2 += 1;
                }
                Step::EndBurst { .. }
                | Step::Doorbell { .. }
                | Step::EndDescriptor { .. }
                | Step::Tick => {}
            }
        }
        Ok(counts)
    }

    /// Highest number of ranges allocated at the same time, including those waiting in a batch.
    pub(super) fn most(&self) -> u64 {
        self.most
    }

    /// Ranges that were allocated before and are free now: maximum and mean over all unmaps.
    pub(super) fn unused(&self) -> (u64, f64) {
        let (largest, sum, count) = self.unused;
        (largest, sum as f64 / count.max(1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use ringfence_lab::plan::TimedStep;
    use ringfence_trace::{DeviceIndex, MappingId};
    use ringfence_types::{Direction, Nanos, PhysAddr, PhysRange};

    use super::*;

    /// A plan of maps (`true`) and unmaps of one page each, by slot.
    fn plan(steps: &[(bool, u32)]) -> Plan {
        let (device, cpu, direction) = (DeviceIndex(0), 0, Direction::FromDevice);
        let mut plan = Plan::default();
        for &(maps, slot) in steps {
            let id = MappingId(slot);
            let step = if maps {
                let first = plan.segments.len() as u32;
                let page = PhysAddr::new(u64::from(slot) << 12);
                plan.segments.push(PhysRange::new(page, 4096).unwrap());
                Step::Map {
                    id,
                    device,
                    cpu,
                    direction,
                    first,
                    count: 1,
                }
            } else {
                Step::Unmap {
                    id,
                    device,
                    cpu,
                    direction,
                }
            };
            let time = Nanos(0);
            plan.steps.push(TimedStep { time, step });
        }
        plan
    }

    /// Three maps, two unmaps, a map, an unmap, two maps: counted by hand with lists and without,
    /// and with frees at once and in batches of two.
    #[test]
    fn a_plan_has_the_counts_of_a_hand() {
        let by_hand = plan(&[
            (true, 0),
            (true, 1),
            (true, 2),
            (false, 0),
            (false, 1),
            (true, 3),
            (false, 2),
            (true, 4),
            (true, 5),
        ]);
        let lists = Some(Capacity::Unbounded);
        for (lists, batch, most, unused, from_list, (held, calls)) in [
            // After the unmaps 1, 2 and 2 addresses are free. The lists have 0, 0, 0, 1, 2, 1, 2,
            // 1 and 0 of them after the calls.
            (lists, 1, 3, (2, 5.0 / 3.0), 3, (7.0, 9.0)),
            (None, 1, 3, (2, 5.0 / 3.0), 0, (0.0, 9.0)),
            // Slots 0 and 1 are freed together, and 2 waits: 0, 2 and 1 are free after the unmaps,
            // and four addresses are in use at the end. The lists have 0, 0, 0, 1, 2, 1, 0 and 0.
            (lists, 2, 4, (2, 1.0), 2, (4.0, 8.0)),
            (None, 2, 4, (2, 1.0), 0, (0.0, 8.0)),
        ] {
            let mut driven = DrivenAllocator::new(lists, batch).unwrap();
            let mut seen = 0;
            let counts = driven.run(&by_hand, |_| seen += 1).unwrap();
            let case = format!("lists {lists:?}, batch {batch}: {counts:?}");
            assert_eq!((counts.allocs, seen), (6, 6), "{case}");
            assert_eq!(driven.most(), most, "{case}");
            assert_eq!(driven.unused(), unused, "{case}");
            assert_eq!(counts.from_list, from_list, "{case}");
            assert_eq!(counts.mean_held(), held / calls, "{case}");
        }
    }
}
