//! The result of a judgement.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::Read;

use ringfence_types::{Direction, Nanos};
use serde::Serialize;

use super::StaleWindow;
use super::frames::{Mapping, Open, Owner};
use crate::domain_type::DomainType;
use crate::op::{DeviceIndex, MapClass, Position};
use crate::operations::Operations;

const PAGE: f64 = 4096.0;

/// Pages that the kernel reallocated while a device could reach them.
///
/// An exposure is one page of 4 KiB, reachable through one mapping, from an allocation of the page
/// on.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Judgement {
    /// Exposures after an unmap, within the window.
    pub stale: Exposures,
    /// Exposures that begin while the mapping is live.
    pub mapped: Exposures,
    /// Exposures of either kind that are not counted in these: the page was mapped for the same
    /// device again before they ended, so its new owner is that device's driver.
    pub mapped_again: u64,
    /// Pages freed while a mapping of them was live; each mapping counts.
    pub freed_while_mapped: u64,
    /// Pages freed within the window after an unmap; each mapping counts.
    pub freed_while_stale: u64,
    /// Longest window after an unmap, in ns. The durations are upper bounds, because the flush may
    /// come earlier.
    pub window_ns: u64,
    /// Entries of a flush queue, which end a window earlier; `None` if only the time counts.
    pub queue_entries: Option<u32>,
    /// Events that the kernel reports as lost. If not 0, the counts of exposures after an unmap are
    /// lower bounds, and the others are unreliable.
    pub lost: u64,
    /// Malformed lines that were skipped.
    pub malformed: u64,
    /// Events that were too far out of order to be sorted by time.
    pub late: u64,
    /// Unmaps of mappings older than the trace, which are not judged.
    pub unmatched_unmaps: u64,
    /// Coherent buffers whose physical addresses the trace does not show; not judged.
    pub unknown_buffers: u64,
    /// Scatterlists of whose segments only the first page is judged.
    pub guessed_lengths: u64,
    /// Number of `mm_page_alloc` events.
    pub page_allocs: u64,
    /// Number of `mm_page_free` and `mm_page_free_batched` events.
    pub page_frees: u64,
    /// Mappings live at the end.
    pub live_at_end: u64,
    /// The devices that mapped memory, in order of first appearance.
    pub devices: Vec<DeviceExposures>,
    /// The longest exposures, longest first; those mapped again are not among them.
    pub longest: Vec<PageExposure>,
}

/// A number of exposures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Exposures {
    /// Number of exposures.
    pub count: u64,
    /// Longest duration in ns.
    pub longest_ns: u64,
    /// Sum of 4096 bytes times the duration in seconds.
    pub byte_seconds: f64,
}

/// Exposures to one device.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DeviceExposures {
    /// Name as the trace prints it.
    pub name: String,
    /// True if its DMA addresses are physical addresses. It reaches all memory at all times, and is
    /// not judged.
    pub physical: bool,
    /// Type of its IOMMU domain, if the recording has it. Without it, the device is judged as if
    /// its domain was lazy.
    pub domain: Option<DomainType>,
    /// Number of mappings that were judged.
    pub maps: u64,
    /// Number of unmaps that were judged.
    pub unmaps: u64,
    /// [`Judgement::stale`] of this device.
    pub stale: Exposures,
    /// [`Judgement::mapped`] of this device.
    pub mapped: Exposures,
}

/// One page that a device could reach after its allocation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PageExposure {
    /// Name of the device.
    pub device: String,
    /// Accesses that the mapping permits the device: `read`, `write` or `read-write`.
    pub access: &'static str,
    /// The mapping: `single`, `scatterlist`, `coherent`, or `iommu` if only `iommu:*` lines show
    /// it.
    pub mapping: &'static str,
    /// Physical address of the page.
    pub address: u64,
    /// Line of the map.
    pub map_line: u64,
    /// Line of the unmap; `None` if the trace shows none before the end of the exposure.
    pub unmap_line: Option<u64>,
    /// Time from the unmap to the allocation in ns; `None` if the mapping was live then.
    pub unmap_to_alloc_ns: Option<u64>,
    /// The last free of the page; `None` if the trace shows none since the map.
    pub freed: Option<PageTask>,
    /// The allocation that began the exposure.
    pub allocated: Allocation,
    /// Time from the allocation to the end of the exposure, in ns.
    pub reachable_ns: u64,
    /// End of the exposure.
    pub end: ExposureEnd,
}

/// An allocation of a block of pages.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Allocation {
    /// The block has 2^`order` pages of the kernel.
    pub order: u8,
    /// The task and the line.
    #[serde(flatten)]
    pub by: PageTask,
}

/// A task that allocated or freed pages. In an interrupt, it is the task that was interrupted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PageTask {
    /// Name of the task.
    pub task: String,
    /// PID of the task.
    pub pid: u32,
    /// Line of the event.
    pub line: u64,
    /// Time on the clock of the trace.
    pub time_ns: u64,
}

/// End of an exposure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExposureEnd {
    /// The window ended: at the latest then, the IOTLB was flushed.
    Flush,
    /// The new owner freed the page.
    Freed,
    /// The page was allocated again; the trace lacks the free.
    AllocatedAgain,
    /// The page was mapped for the same device again.
    MappedAgain,
    /// The trace ended while the mapping was live.
    TraceEnd,
}

impl Judgement {
    /// Returns true if a device could reach a reallocated page.
    pub fn found(&self) -> bool {
        self.stale.count + self.mapped.count > 0
    }

    /// Returns true if no event is missing that the judgement depends on: none was lost, skipped or
    /// out of order.
    pub fn is_complete(&self) -> bool {
        self.lost == 0 && self.malformed == 0 && self.late == 0
    }
}

/// An exposure that has ended.
#[derive(Debug)]
pub(super) struct Closed {
    frame: u64,
    device: DeviceIndex,
    direction: Direction,
    class: MapClass,
    map: Position,
    unmap: Option<Position>,
    open: Open,
    nanos: u64,
    end: ExposureEnd,
}

impl Closed {
    pub(super) fn new(
        frame: u64,
        mapping: &Mapping,
        open: Open,
        at: Nanos,
        end: ExposureEnd,
    ) -> Self {
        Self {
            frame,
            device: mapping.device,
            direction: mapping.direction,
            class: mapping.class,
            map: mapping.map,
            unmap: mapping.unmap,
            nanos: at.0.saturating_sub(open.since.0),
            open,
            end,
        }
    }

    fn describe(&self, name: String) -> PageExposure {
        let unmap = self.unmap.filter(|_| !self.open.mapped);
        PageExposure {
            device: name,
            access: match self.direction {
                Direction::ToDevice => "read",
                Direction::FromDevice => "write",
                Direction::Bidirectional => "read-write",
            },
            mapping: match self.class {
                MapClass::Single => "single",
                MapClass::Sg => "scatterlist",
                MapClass::Coherent => "coherent",
                MapClass::IommuOnly => "iommu",
            },
            address: self.frame << 12,
            map_line: self.map.line,
            unmap_line: self.unmap.map(|unmap| unmap.line),
            unmap_to_alloc_ns: unmap.map(|unmap| self.open.since.0.saturating_sub(unmap.time.0)),
            freed: self.open.freed.as_ref().map(PageTask::of),
            allocated: Allocation {
                order: self.open.order,
                by: PageTask::of(&self.open.allocated),
            },
            reachable_ns: self.nanos,
            end: self.end,
        }
    }
}

impl PageTask {
    fn of(owner: &Owner) -> Self {
        Self {
            task: owner.task.to_string(),
            pid: owner.pid,
            line: owner.position.line,
            time_ns: owner.position.time.0,
        }
    }
}

impl Exposures {
    fn add(&mut self, nanos: u64) {
        self.count += 1;
        self.longest_ns = self.longest_ns.max(nanos);
        self.byte_seconds += PAGE * nanos as f64 / 1e9;
    }
}

/// Counts while the trace is read.
#[derive(Debug)]
pub(super) struct VerdictCounts {
    described: usize,
    stale: Exposures,
    mapped: Exposures,
    mapped_again: u64,
    freed_while_mapped: u64,
    freed_while_stale: u64,
    pub(super) page_allocs: u64,
    pub(super) page_frees: u64,
    pub(super) late: u64,
    devices: BTreeMap<DeviceIndex, DeviceExposures>,
    /// The longest, by duration; of equal ones, the first.
    longest: BTreeMap<(u64, Reverse<u64>), Closed>,
    closed: u64,
}

impl VerdictCounts {
    pub(super) fn new(described: usize) -> Self {
        Self {
            described,
            stale: Exposures::default(),
            mapped: Exposures::default(),
            mapped_again: 0,
            freed_while_mapped: 0,
            freed_while_stale: 0,
            page_allocs: 0,
            page_frees: 0,
            late: 0,
            devices: BTreeMap::new(),
            longest: BTreeMap::new(),
            closed: 0,
        }
    }

    pub(super) fn map(&mut self, device: DeviceIndex) {
        self.devices.entry(device).or_default().maps += 1;
    }

    /// Notes that the device's DMA addresses are physical addresses.
    pub(super) fn physical(&mut self, device: DeviceIndex) {
        self.devices.entry(device).or_default().physical = true;
    }

    pub(super) fn unmap(&mut self, device: DeviceIndex) {
        self.devices.entry(device).or_default().unmaps += 1;
    }

    /// Counts the free of a page of `mapping`.
    pub(super) fn freed(&mut self, mapping: &Mapping) {
        match mapping.unmap {
            None => self.freed_while_mapped += 1,
            Some(_) => self.freed_while_stale += 1,
        }
    }

    /// Counts an exposure that has ended.
    pub(super) fn close(&mut self, closed: Closed) {
        if closed.end == ExposureEnd::MappedAgain {
            self.mapped_again += 1;
            return;
        }
        let device = self.devices.entry(closed.device).or_default();
        let (all, own) = match closed.open.mapped {
            true => (&mut self.mapped, &mut device.mapped),
            false => (&mut self.stale, &mut device.stale),
        };
        all.add(closed.nanos);
        own.add(closed.nanos);
        self.closed += 1;
        let key = (closed.nanos, Reverse(self.closed));
        self.longest.insert(key, closed);
        if self.longest.len() > self.described {
            self.longest.pop_first();
        }
    }

    pub(super) fn into_judgement<R: Read>(
        self,
        operations: &Operations<R>,
        window: StaleWindow,
        live_at_end: u64,
    ) -> Judgement {
        let name = |device: DeviceIndex| {
            let row = operations.devices().get(device);
            row.map_or_else(String::new, |row| row.name.clone())
        };
        let summary = operations.summary();
        let longest = self.longest.values().rev();
        Judgement {
            longest: longest
                .map(|closed| closed.describe(name(closed.device)))
                .collect(),
            devices: self
                .devices
                .into_iter()
                .map(|(device, exposures)| DeviceExposures {
                    name: name(device),
                    domain: operations.domain_type(device),
                    ..exposures
                })
                .collect(),
            stale: self.stale,
            mapped: self.mapped,
            mapped_again: self.mapped_again,
            freed_while_mapped: self.freed_while_mapped,
            freed_while_stale: self.freed_while_stale,
            window_ns: window.longest.0,
            queue_entries: window.queue,
            lost: summary.lost,
            malformed: summary.malformed,
            late: self.late,
            unmatched_unmaps: summary
                .unmatched_unmaps
                .saturating_add(summary.unmatched_frees)
                .saturating_add(summary.unmatched_iommu_unmaps),
            unknown_buffers: summary.fresh_frames,
            guessed_lengths: summary.guessed_lengths,
            page_allocs: self.page_allocs,
            page_frees: self.page_frees,
            live_at_end,
        }
    }
}
