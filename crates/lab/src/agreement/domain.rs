//! One domain: the allocator of the model, and the ranges that it and the kernel have given out.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

use ringfence_iova::{AllocError, AllocRequest, CachedTree, IovaAllocator, LinuxRcache, RcacheCpu};
use ringfence_trace::AddressEvent;
use ringfence_types::{Pfn, PfnRange};

use super::outcome::{Stop, StopReason};
use super::{AgreementOptions, FreeTime, MSI_WINDOW, pages};
use crate::components::RcacheAlloc;
use crate::error::LabError;
use crate::stubs::flushed_without_table;

/// Last page that Linux's first attempt for a PCI device includes (`DMA_BIT_MASK(32)`).
const LAST_32BIT: u64 = 0xf_ffff;
/// Last page of the space: that of a table of four levels.
const LAST_PAGE: u64 = (1 << 36) - 1;

/// Pages of the largest class that Linux caches.
const LARGEST_CACHED: u64 = 32;
/// Bit in [`Domain::queued`] of all ranges that Linux does not cache.
const LARGE: u64 = 2 * LARGEST_CACHED;

/// Result of one allocation.
pub(super) struct Compared {
    /// Steps of the model's search.
    pub(super) steps: u64,
    /// The model's range if it differs from the recorded one; `Some(None)` if the model has none.
    pub(super) differs: Option<Option<PfnRange>>,
}

/// The model's state of one device.
#[derive(Debug)]
pub(super) struct Domain {
    allocator: RcacheAlloc,
    handles: HashMap<u16, RcacheCpu>,
    /// By the recorded first page: the recorded number of pages, and the model's range.
    live: HashMap<u64, (u64, Option<PfnRange>)>,
    /// Number of reserved ranges.
    reserved: u64,
    /// True if the options name the windows of the PCI host bridge.
    windows_known: bool,
    free_time: FreeTime,
    /// With [`FreeTime::AtFlush`]: the bits of the classes of which a range may have come back from
    /// a flush queue.
    queued: u64,
    pub(super) allocations: u64,
    pub(super) compared: u64,
    pub(super) agreeing: u64,
    /// The line from which on the trace does not determine the addresses.
    pub(super) stop: Option<Stop>,
}

impl Domain {
    /// Creates a domain without mappings, in which the MSI window and the ranges of `options` are
    /// reserved.
    pub(super) fn new(options: &AgreementOptions) -> Result<Self, LabError> {
        let reserved = options.reserved.as_slice();
        let mut all = vec![pages(MSI_WINDOW.0, MSI_WINDOW.1)?];
        all.extend_from_slice(reserved);
        let all = merged(&all)?;
        let count = all.len() as u64;
        let tree = CachedTree::with_allocated(pages(1, LAST_PAGE)?, all, None);
        let tree = tree.map_err(|_| LabError::Internal("reserved ranges"))?;
        Ok(Self {
            allocator: LinuxRcache::new(tree, RefCell::new),
            handles: HashMap::new(),
            live: HashMap::new(),
            reserved: count,
            windows_known: !reserved.is_empty(),
            free_time: options.free_time,
            queued: 0,
            allocations: 0,
            compared: 0,
            agreeing: 0,
            stop: None,
        })
    }

    /// Repeats an allocation of the kernel. `cpus` is the number of CPUs that the trace shows.
    pub(super) fn allocate(
        &mut self,
        event: &AddressEvent,
        cpus: usize,
    ) -> Result<Compared, LabError> {
        self.allocations += 1;
        let mut result = Compared {
            steps: 0,
            differs: None,
        };
        if self.stop.is_some() {
            return Ok(result);
        }
        // Otherwise the model's earlier range would stay allocated, and no limit would count it.
        if self.live.contains_key(&event.range.lo().get()) {
            return Ok(self.stop_at(event, StopReason::MissingUnmap, result));
        }
        // A range of a cached class returns to a cache of its class, and a larger one to the tree.
        let uncertain = bit_of_class(event.range) | LARGE;
        if self.queued & uncertain != 0 {
            return Ok(self.stop_at(event, StopReason::LazyFlush, result));
        }
        if self.allocator.fullest_depot() > cpus {
            return Ok(self.stop_at(event, StopReason::DepotTimer, result));
        }
        let recorded = event.range;
        let handle = self.handles.entry(event.cpu).or_default();
        let request = AllocRequest::new(recorded.pages(), Pfn::new(LAST_32BIT));
        let model = match self.allocator.alloc(handle, &request) {
            Ok(found) => {
                result.steps = u64::from(found.steps);
                Some(found.range)
            }
            Err(AllocError::Exhausted { .. }) => {
                // Two searches of the whole tree, which has at most these ranges.
                let ranges = self.compared.saturating_add(self.reserved);
                result.steps = ranges.saturating_mul(2);
                None
            }
            Err(other) => return Err(LabError::Alloc(other)),
        };
        // Linux allocates above 4 GiB when no range below is free: the model must agree with that.
        let is_above = recorded.hi().get() > LAST_32BIT;
        if is_above && model.is_none() {
            return Ok(self.stop_at(event, StopReason::Above4GiB, result));
        }
        let below = |range: PfnRange| range.lo().get() < MSI_WINDOW.0;
        let depends_on_windows = (is_above || below(recorded)) && model.is_none_or(below);
        if !self.windows_known && depends_on_windows {
            return Ok(self.stop_at(event, StopReason::PciWindows, result));
        }
        self.live
            .insert(recorded.lo().get(), (recorded.pages(), model));
        self.compared += 1;
        if model == Some(recorded) {
            self.agreeing += 1;
        } else {
            result.differs = Some(model);
        }
        Ok(result)
    }

    /// Returns the number of live ranges.
    pub(super) fn live_ranges(&self) -> usize {
        self.live.len()
    }

    /// Returns true if the kernel may have given out exactly `range` in this domain. A domain that
    /// is no longer compared may hold any range.
    pub(super) fn may_hold(&self, range: PfnRange) -> bool {
        self.stop.is_some() || self.holds(range)
    }

    fn holds(&self, range: PfnRange) -> bool {
        let found = self.live.get(&range.lo().get());
        found.is_some_and(|(pages, _)| *pages == range.pages())
    }

    /// Repeats a free of the kernel. Returns false if the range was not allocated in the trace.
    pub(super) fn free(&mut self, event: &AddressEvent) -> Result<bool, LabError> {
        if self.stop.is_some() {
            return Ok(true);
        }
        if !self.holds(event.range) {
            return Ok(false);
        }
        let freed = self.live.remove(&event.range.lo().get());
        if self.free_time == FreeTime::AtFlush {
            self.queued |= bit_of_class(event.range);
            return Ok(true);
        }
        if let Some((_, Some(model))) = freed {
            let handle = self.handles.entry(event.cpu).or_default();
            self.allocator.free(handle, flushed_without_table(model)?);
        }
        Ok(true)
    }

    /// Ends the comparison of this domain before the allocation of `event`.
    fn stop_at(&mut self, event: &AddressEvent, reason: StopReason, result: Compared) -> Compared {
        self.stop = Some(Stop {
            line: event.line,
            reason,
        });
        self.live = HashMap::new();
        self.handles = HashMap::new();
        result
    }
}

/// Returns the bit of a range's class in [`Domain::queued`].
fn bit_of_class(range: PfnRange) -> u64 {
    match range.pages().checked_next_power_of_two() {
        Some(pages) if pages <= LARGEST_CACHED => pages,
        _ => LARGE,
    }
}

/// Joins overlapping and adjacent ranges, and drops parts outside the space.
fn merged(ranges: &[PfnRange]) -> Result<Vec<PfnRange>, LabError> {
    let mut runs: BTreeMap<u64, u64> = BTreeMap::new();
    let mut sorted: Vec<(u64, u64)> = ranges
        .iter()
        .map(|range| (range.lo().get().max(1), range.hi().get().min(LAST_PAGE)))
        .filter(|(lo, hi)| lo <= hi)
        .collect();
    sorted.sort_unstable();
    for (lo, hi) in sorted {
        match runs.last_entry() {
            Some(mut last) if *last.get() >= lo.saturating_sub(1) => {
                let end = (*last.get()).max(hi);
                last.insert(end);
            }
            _ => {
                runs.insert(lo, hi);
            }
        }
    }
    runs.into_iter().map(|(lo, hi)| pages(lo, hi)).collect()
}
