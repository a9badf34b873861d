//! The pages that devices can reach: through a live mapping, or through a stale translation.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use ringfence_types::{Direction, Nanos};

use super::StaleWindow;
use super::order::{Item, Step};
use super::report::{Closed, ExposureEnd, VerdictCounts};
use crate::limits::LimitExceeded;
use crate::op::{DeviceIndex, MapClass, Position};
use crate::page::TaskName;

/// Maximum number of live and stale mappings of one page.
const SHARING: usize = 4096;

/// Maximum number of flush queues that are followed. Beyond it, only the time bounds a window.
const QUEUES: usize = 4096;

/// Maximum number of entries that page events visit: a constant, and a number for each page event.
const VISITS: u64 = 64 << 20;
const VISITS_PER_EVENT: u64 = 4096;

/// A block of pages of 4 KiB.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pages {
    pub(super) first: u64,
    pub(super) last: u64,
    /// Order of the block, in pages of the kernel.
    pub(super) order: u8,
}

/// The task that allocated or freed pages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner {
    pub(super) task: TaskName,
    pub(super) pid: u32,
    pub(super) position: Position,
}

/// A mapping that a device can use, or could use until the flush.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) device: DeviceIndex,
    pub(super) direction: Direction,
    pub(super) class: MapClass,
    /// True if the unmap returns after the invalidation: the mapping has no window.
    strict: bool,
    pub(super) map: Position,
    /// Position of the unmap, with the time of the sorted order.
    pub(super) unmap: Option<Position>,
    until: Nanos,
    frames: Vec<(u64, u64)>,
}

impl Mapping {
    pub(super) fn new(
        device: DeviceIndex,
        direction: Direction,
        class: MapClass,
        strict: bool,
        map: Position,
        frames: Vec<(u64, u64)>,
    ) -> Self {
        Self {
            device,
            direction,
            class,
            strict,
            map,
            unmap: None,
            until: Nanos(u64::MAX),
            frames,
        }
    }

    pub(super) fn ranges(&self) -> usize {
        self.frames.len()
    }
}

/// An exposure that has not ended: the new owner of a page that a device reaches.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) allocated: Owner,
    pub(super) freed: Option<Owner>,
    pub(super) order: u8,
    /// True if the mapping was live at the allocation.
    pub(super) mapped: bool,
    /// Time of the allocation in the sorted order.
    pub(super) since: Nanos,
}

/// One page of one mapping.
#[derive(Debug, Default)]
struct Entry {
    freed: Option<Box<Owner>>,
    open: Option<Box<Open>>,
}

/// All pages that devices can reach.
#[derive(Debug)]
pub(super) struct Frames {
    window: StaleWindow,
    limit: usize,
    mappings: HashMap<u64, Mapping>,
    /// By page and number of the mapping.
    entries: BTreeMap<(u64, u64), Entry>,
    /// End of the window and number of each stale mapping.
    expiry: BTreeSet<(Nanos, u64)>,
    queues: HashMap<(DeviceIndex, u16), VecDeque<u64>>,
    now: Nanos,
    visits: u64,
    visits_limit: u64,
}

impl Frames {
    pub(super) fn new(window: StaleWindow, limit: usize) -> Self {
        Self {
            window,
            limit,
            mappings: HashMap::new(),
            entries: BTreeMap::new(),
            expiry: BTreeSet::new(),
            queues: HashMap::new(),
            now: Nanos(0),
            visits: 0,
            visits_limit: VISITS,
        }
    }

    /// Returns the number of live mappings.
    pub(super) fn live(&self) -> u64 {
        let live = self.mappings.values();
        live.filter(|mapping| mapping.unmap.is_none()).count() as u64
    }

    /// Applies the next event. Times must not decrease.
    pub(super) fn apply(
        &mut self,
        item: Item,
        counts: &mut VerdictCounts,
    ) -> Result<(), LimitExceeded> {
        self.now = item.time;
        self.expire(counts);
        match item.step {
            Step::Map(number, mapping) => self.map(number, *mapping, counts)?,
            Step::Unmap(number, cpu) => self.unmap(number, cpu, item.line, counts),
            Step::Allocate(pages, owner) => self.allocate(pages, owner, counts)?,
            Step::Free(pages, owner) => self.free(pages, owner, counts)?,
        }
        Ok(())
    }

    /// Ends all windows and exposures at the end of the trace. A window lasts to its end, which the
    /// trace may not show.
    pub(super) fn finish(&mut self, counts: &mut VerdictCounts) {
        while let Some((until, number)) = self.expiry.pop_first() {
            self.end(number, until, ExposureEnd::Flush, counts);
        }
        let mut live: Vec<u64> = self.mappings.keys().copied().collect();
        live.sort_unstable();
        for number in live {
            self.close_all(number, self.now, ExposureEnd::TraceEnd, counts);
        }
    }

    fn map(
        &mut self,
        number: u64,
        mapping: Mapping,
        counts: &mut VerdictCounts,
    ) -> Result<(), LimitExceeded> {
        counts.map(mapping.device);
        for frame in all(&mapping.frames) {
            self.remap(frame, &mapping, counts)?;
            if self.entries.len() >= self.limit {
                let limit = self.limit;
                return Err(LimitExceeded::Pages { limit });
            }
            self.entries.insert((frame, number), Entry::default());
        }
        self.mappings.insert(number, mapping);
        Ok(())
    }

    /// Ends the exposures of a page that is mapped for the same device again. A stale translation
    /// of it ends if the new mapping permits the same accesses: the new one lasts longer.
    fn remap(
        &mut self,
        frame: u64,
        new: &Mapping,
        counts: &mut VerdictCounts,
    ) -> Result<(), LimitExceeded> {
        let mut superseded = Vec::new();
        let mut count = 0;
        for (&key, entry) in self.entries.range_mut((frame, 0)..=(frame, u64::MAX)) {
            count += 1;
            let Some(old) = self.mappings.get(&key.1) else {
                continue;
            };
            if old.device != new.device {
                continue;
            }
            if let Some(open) = entry.open.take() {
                let closed = Closed::new(frame, old, *open, self.now, ExposureEnd::MappedAgain);
                counts.close(closed);
            }
            let covered = new
                .direction
                .permissions()
                .contains(old.direction.permissions());
            if old.unmap.is_some() && covered {
                superseded.push(key);
            }
        }
        for key in &superseded {
            self.entries.remove(key);
        }
        match count > SHARING {
            true => Err(LimitExceeded::Sharing { limit: SHARING }),
            false => Ok(()),
        }
    }

    fn unmap(&mut self, number: u64, cpu: u16, line: u64, counts: &mut VerdictCounts) {
        let Some(mapping) = self.mappings.get_mut(&number) else {
            return;
        };
        let (now, device) = (self.now, mapping.device);
        counts.unmap(device);
        mapping.unmap = Some(Position { line, time: now });
        let window = match mapping.strict {
            true => 0,
            false => self.window.longest.0,
        };
        mapping.until = Nanos(now.0.saturating_add(window));
        let (until, class) = (mapping.until, mapping.class);
        if until == now {
            return self.end(number, now, ExposureEnd::Flush, counts);
        }
        self.expiry.insert((until, number));
        // A part of an `iommu:*` mapping can be unmapped without an entry in the queue.
        if class != MapClass::IommuOnly {
            self.queue(number, device, cpu, counts);
        }
    }

    /// Adds a stale mapping to the flush queue of its device and CPU. Whenever the queue is full,
    /// the domain is flushed. The queue may have been emptied by the timer, but that flushes the
    /// domain too. So a mapping is flushed at the latest when the queue has taken as many others as
    /// it has room for.
    fn queue(&mut self, number: u64, device: DeviceIndex, cpu: u16, counts: &mut VerdictCounts) {
        let Some(entries) = self.window.queue else {
            return;
        };
        let followed = self.queues.len() < QUEUES || self.queues.contains_key(&(device, cpu));
        if !followed {
            return;
        }
        let queue = self.queues.entry((device, cpu)).or_default();
        queue.push_back(number);
        // One entry of the ring stays empty.
        let flushed = match queue.len() >= entries as usize {
            true => queue.pop_front(),
            false => None,
        };
        if let Some(flushed) = flushed {
            self.end(flushed, self.now, ExposureEnd::Flush, counts);
        }
    }

    fn allocate(
        &mut self,
        pages: Pages,
        owner: Owner,
        counts: &mut VerdictCounts,
    ) -> Result<(), LimitExceeded> {
        self.visits_limit = self.visits_limit.saturating_add(VISITS_PER_EVENT);
        let range = (pages.first, 0)..=(pages.last, u64::MAX);
        for (&(frame, number), entry) in self.entries.range_mut(range) {
            self.visits += 1;
            let Some(mapping) = self.mappings.get(&number) else {
                continue;
            };
            // The trace lacks the free of the earlier owner.
            if let Some(open) = entry.open.take() {
                let end = ExposureEnd::AllocatedAgain;
                counts.close(Closed::new(frame, mapping, *open, self.now, end));
            }
            entry.open = Some(Box::new(Open {
                allocated: owner,
                freed: entry.freed.take().map(|freed| *freed),
                order: pages.order,
                mapped: mapping.unmap.is_none(),
                since: self.now,
            }));
        }
        self.check_visits()
    }

    fn free(
        &mut self,
        pages: Pages,
        owner: Owner,
        counts: &mut VerdictCounts,
    ) -> Result<(), LimitExceeded> {
        self.visits_limit = self.visits_limit.saturating_add(VISITS_PER_EVENT);
        let range = (pages.first, 0)..=(pages.last, u64::MAX);
        for (&(frame, number), entry) in self.entries.range_mut(range) {
            self.visits += 1;
            let Some(mapping) = self.mappings.get(&number) else {
                continue;
            };
            if let Some(open) = entry.open.take() {
                let end = ExposureEnd::Freed;
                counts.close(Closed::new(frame, mapping, *open, self.now, end));
            }
            // Linux prints some frees twice, as mm_page_free_batched too.
            if entry.freed.is_none() {
                counts.freed(mapping);
                entry.freed = Some(Box::new(owner));
            }
        }
        self.check_visits()
    }

    fn check_visits(&self) -> Result<(), LimitExceeded> {
        let limit = self.visits_limit;
        match self.visits > limit {
            true => Err(LimitExceeded::Visits { limit }),
            false => Ok(()),
        }
    }

    /// Ends the windows that end by now.
    fn expire(&mut self, counts: &mut VerdictCounts) {
        while let Some(&(until, number)) = self.expiry.first()
            && until <= self.now
        {
            self.end(number, until, ExposureEnd::Flush, counts);
        }
    }

    /// Ends the window of a stale mapping, if it has not ended.
    fn end(&mut self, number: u64, at: Nanos, end: ExposureEnd, counts: &mut VerdictCounts) {
        self.close_all(number, at, end, counts);
        if let Some(mapping) = self.mappings.remove(&number) {
            self.expiry.remove(&(mapping.until, number));
            for frame in all(&mapping.frames) {
                self.entries.remove(&(frame, number));
            }
        }
    }

    /// Closes the exposures of all pages of a mapping.
    fn close_all(&mut self, number: u64, at: Nanos, end: ExposureEnd, counts: &mut VerdictCounts) {
        let Some(mapping) = self.mappings.get(&number) else {
            return;
        };
        for frame in all(&mapping.frames) {
            let entry = self.entries.get_mut(&(frame, number));
            if let Some(open) = entry.and_then(|entry| entry.open.take()) {
                counts.close(Closed::new(frame, mapping, *open, at, end));
            }
        }
    }
}

fn all(ranges: &[(u64, u64)]) -> impl Iterator<Item = u64> {
    ranges.iter().flat_map(|&(first, last)| first..=last)
}
