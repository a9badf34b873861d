//! What a trace is like: how much it maps, how often a page is used again, how ring-like its unmaps are.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::io::Read;

use ringfence_types::{Direction, PageSize, PhysAddr, PhysRange};
use rustc_hash::FxHashSet;
use serde::Serialize;

use crate::error::TraceError;
use crate::op::{Chunk, DeviceIndex, MapClass, Op, OpKind};
use crate::operations::Operations;
use crate::summary::Summary;
use crate::text::{RawChunk, RawEvent, RawKind};

/// Gap in ns that ends a burst of unmaps (the replay's own rule).
const BURST_GAP_NS: u64 = 50_000;

/// What a trace is like.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Info {
    /// Lines read.
    pub lines: u64,
    /// Events, unknown ones included.
    pub events: u64,
    /// Events skipped because they say nothing about DMA mappings.
    pub unknown: u64,
    /// Malformed lines skipped.
    pub malformed: u64,
    /// Events the kernel says it lost.
    pub lost: u64,
    /// From the first to the last event, in ns.
    pub duration_ns: u64,
    /// `dma_map_*` events.
    pub map_events: u64,
    /// `dma_unmap_*` events.
    pub unmap_events: u64,
    /// `dma_alloc*` events.
    pub allocs: u64,
    /// `dma_free*` events, those of nothing aside.
    pub frees: u64,
    /// `dma_sync_*` events.
    pub syncs: u64,
    /// `iommu:map` events.
    pub iommu_map: u64,
    /// `iommu:unmap` events.
    pub iommu_unmap: u64,
    /// Mappings that only `iommu:*` lines show.
    pub iommu_only_maps: u64,
    /// `dma_unmap_*` events whose map the trace does not show.
    pub unmatched_unmaps: u64,
    /// Maps of a key that was alive.
    pub replaced: u64,
    /// Maps whose printed list was cut.
    pub truncated_lists: u64,
    /// Maps whose segment lengths are a guess.
    pub guessed_lengths: u64,
    /// `dma_map_*` mappings alive after the last line; coherent buffers are not counted.
    pub live_at_end: u64,
    /// Most of those alive at once.
    pub max_live: u64,
    /// Pages that the `dma_map_*` lines alone name: the ranges of single maps; of lists, the ranges where the
    /// line has a size for each start, else the pages of the starts.
    pub dma_pages: Pages,
    /// Pages behind `iommu:map` lines, coherent buffers included.
    pub iommu_pages: Pages,
    /// Pages of all streaming mappings' segments.
    pub pages: Pages,
    /// Per device, in order of first appearance.
    pub devices: Vec<DeviceInfo>,
    /// What was written into the trace, with its time in ns.
    pub marks: Vec<(u64, String)>,
}

/// Use of 4 KiB pages, as in Table 5 of the pvIOMMU document.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Pages {
    /// Different pages.
    pub distinct: u64,
    /// Times a page was mapped.
    pub touches: u64,
}

impl Pages {
    /// Mappings per page; 0 without pages.
    pub fn reuse(&self) -> f64 {
        match self.distinct {
            0 => 0.0,
            distinct => self.touches as f64 / distinct as f64,
        }
    }
}

/// One device.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DeviceInfo {
    /// As the trace prints it.
    pub name: String,
    /// Pages of its streaming mappings' segments.
    pub pages: Pages,
    /// Most streaming mappings alive at once.
    pub max_live: u64,
    /// Streaming mappings alive at the end.
    pub live_at_end: u64,
    /// Whether its driver skips unmaps.
    pub skips_unmaps: bool,
    /// Its mappings by direction, those that only `iommu:*` lines show apart.
    pub flows: Vec<Flow>,
}

/// The mappings of one device in one direction.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Flow {
    /// `to-device`, `from-device`, `bidirectional`.
    pub direction: String,
    /// Whether only `iommu:*` lines show them.
    pub iommu_only: bool,
    /// Streaming mappings made.
    pub maps: u64,
    /// Of those, scatterlists.
    pub scatterlists: u64,
    /// Segments in all.
    pub segments: u64,
    /// Unmaps.
    pub unmaps: u64,
    /// Unmaps that ended the oldest live mapping: all of them on a ring.
    pub oldest_first: u64,
    /// Unmaps of the mapping made right after the one unmapped before.
    pub exact_next: u64,
    /// Bytes of a mapping and how many have it, the most frequent first; five at most.
    pub sizes: Vec<(u64, u64)>,
    /// Bursts: consecutive unmaps on one processor, less than 50 us apart, no map between.
    pub bursts: Bursts,
}

impl Flow {
    /// Share of unmaps that ended the oldest live mapping; 1 without unmaps.
    pub fn ring_likeness(&self) -> f64 {
        match self.unmaps {
            0 => 1.0,
            unmaps => self.oldest_first as f64 / unmaps as f64,
        }
    }
}

/// Lengths of bursts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Bursts {
    /// How many bursts.
    pub count: u64,
    /// Unmaps in all of them.
    pub unmaps: u64,
    /// Median length.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// Longest.
    pub max: u64,
}

impl Bursts {
    /// Mean length; 0 without bursts.
    pub fn mean(&self) -> f64 {
        match self.count {
            0 => 0.0,
            count => self.unmaps as f64 / count as f64,
        }
    }
}

impl Info {
    /// Reads a trace to its end.
    ///
    /// # Errors
    /// As [`Operations::next_chunk`].
    pub fn read<R: Read>(operations: &mut Operations<R>) -> Result<Self, TraceError> {
        let mut lines = LineCounts::default();
        let mut flows = Flows::default();
        let mut chunk = Chunk::default();
        let mut marks = Vec::new();
        while operations.next_chunk_with(&mut chunk, |event, raw| lines.take(event, raw))? {
            for op in &chunk.ops {
                flows.take(op, &chunk);
            }
            marks.extend(chunk.marks.drain(..).map(|mark| (mark.time.0, mark.text)));
        }
        let mut info = lines.into_info(operations.summary());
        info.marks = marks;
        let names = operations.devices().iter();
        let names = names.map(|(_, device)| device.name.clone()).collect();
        flows.finish(&mut info, names, operations.summary());
        Ok(info)
    }
}

/// A set of pages and how often they were named.
#[derive(Debug, Default)]
struct PageSet {
    seen: FxHashSet<u64>,
    touches: u64,
}

impl PageSet {
    fn add(&mut self, range: PhysRange) {
        let shift = PageSize::Size4K.shift();
        let (first, last) = (range.start().get() >> shift, range.last().get() >> shift);
        self.touches = self.touches.saturating_add(last - first + 1);
        self.seen.extend(first..=last);
    }

    fn counts(&self) -> Pages {
        Pages {
            distinct: self.seen.len() as u64,
            touches: self.touches,
        }
    }
}

/// What the lines say, each for itself.
#[derive(Debug, Default)]
struct LineCounts {
    info: Info,
    dma: PageSet,
    iommu: PageSet,
    first: Option<u64>,
    last: u64,
}

impl LineCounts {
    fn take(&mut self, event: &RawEvent, raw: &RawChunk) {
        self.first.get_or_insert(event.time.0);
        self.last = self.last.max(event.time.0);
        let info = &mut self.info;
        match event.kind {
            RawKind::Map { phys, size, .. } => {
                info.map_events += 1;
                self.dma.extend_by(phys.get(), size);
            }
            RawKind::MapSg {
                sizes, phys_addrs, ..
            } => {
                info.map_events += 1;
                let known = sizes.count == phys_addrs.count;
                for (index, &start) in raw.list(phys_addrs).iter().enumerate() {
                    let size = raw.list(sizes).get(index).filter(|_| known);
                    self.dma.extend_by(start, size.copied().unwrap_or(1));
                }
            }
            RawKind::Unmap { .. } | RawKind::UnmapSg { .. } => info.unmap_events += 1,
            RawKind::Alloc { .. } => info.allocs += 1,
            RawKind::Free { .. } => info.frees += 1,
            RawKind::Sync { .. } => info.syncs += 1,
            RawKind::IommuMap { phys, size, .. } => {
                info.iommu_map += 1;
                // Firmware's identity maps can be as large as memory; they are no use of pages.
                if size <= crate::text::MAX_BYTES {
                    self.iommu.extend_by(phys.get(), size);
                }
            }
            RawKind::IommuUnmap { .. } => info.iommu_unmap += 1,
            RawKind::Void { .. } | RawKind::Mark(_) => {}
        }
    }

    fn into_info(mut self, summary: &Summary) -> Info {
        let info = &mut self.info;
        info.duration_ns = self
            .first
            .map_or(0, |first| self.last.saturating_sub(first));
        info.dma_pages = self.dma.counts();
        info.iommu_pages = self.iommu.counts();
        info.lines = summary.lines;
        info.events = summary.events;
        info.unknown = summary.unknown;
        info.malformed = summary.malformed;
        info.lost = summary.lost;
        info.iommu_only_maps = summary.iommu_only_maps;
        info.unmatched_unmaps = summary.unmatched_unmaps;
        info.replaced = summary.replaced;
        info.truncated_lists = summary.truncated_lists;
        info.guessed_lengths = summary.guessed_lengths;
        self.info
    }
}

impl PageSet {
    fn extend_by(&mut self, start: u64, size: u64) {
        if let Some(range) = PhysRange::new(PhysAddr::new(start), size) {
            self.add(range);
        }
    }
}

/// The key of a flow; ordered so that reports are.
type FlowKey = (DeviceIndex, Direction, bool);

/// One flow under way.
#[derive(Debug, Default)]
struct FlowState {
    flow: Flow,
    /// Mappings since `base`, oldest first: whether they are alive.
    alive: VecDeque<bool>,
    base: u64,
    last_ended: Option<u64>,
    sizes: HashMap<u64, u64>,
    /// By processor: time of the last unmap and length so far.
    open: HashMap<u16, (u64, u64)>,
    bursts: BTreeMap<u64, u64>,
}

impl FlowState {
    fn close_burst(&mut self, cpu: u16) {
        if let Some((_, length)) = self.open.remove(&cpu) {
            *self.bursts.entry(length).or_default() += 1;
        }
    }

    fn unmap(&mut self, serial: u64, cpu: u16, now: u64) {
        self.flow.unmaps += 1;
        let index = serial.wrapping_sub(self.base) as usize;
        if index == 0 {
            self.flow.oldest_first += 1;
        }
        if let Some(alive) = self.alive.get_mut(index) {
            *alive = false;
        }
        while self.alive.front() == Some(&false) {
            self.alive.pop_front();
            self.base += 1;
        }
        if self.last_ended.is_some_and(|last| last + 1 == serial) {
            self.flow.exact_next += 1;
        }
        self.last_ended = Some(serial);
        let length = match self.open.get(&cpu) {
            Some(&(last, length)) if now.saturating_sub(last) <= BURST_GAP_NS => length + 1,
            _ => {
                self.close_burst(cpu);
                1
            }
        };
        self.open.insert(cpu, (now, length));
    }

    fn finish(mut self) -> Flow {
        let cpus: Vec<u16> = self.open.keys().copied().collect();
        for cpu in cpus {
            self.close_burst(cpu);
        }
        let mut sizes: Vec<(u64, u64)> = self.sizes.into_iter().collect();
        sizes.sort_by_key(|&(size, count)| (std::cmp::Reverse(count), size));
        sizes.truncate(5);
        self.flow.sizes = sizes;
        let count: u64 = self.bursts.values().sum();
        let at = |percent: u64| {
            let mut left = (count * percent).div_ceil(100);
            let mut lengths = self.bursts.iter();
            let found = lengths.find(|&(_, &bursts)| {
                left = left.saturating_sub(bursts);
                left == 0
            });
            found.map_or(0, |(&length, _)| length)
        };
        self.flow.bursts = Bursts {
            count,
            unmaps: self
                .bursts
                .iter()
                .map(|(length, bursts)| length * bursts)
                .sum(),
            p50: at(50),
            p99: at(99),
            max: self.bursts.keys().next_back().copied().unwrap_or(0),
        };
        self.flow
    }
}

/// A live mapping: its flow and its number there.
type Alive = Option<(FlowKey, u64)>;

/// What the operations say.
#[derive(Debug, Default)]
struct Flows {
    flows: BTreeMap<FlowKey, FlowState>,
    live: Vec<Alive>,
    /// By device: pages, live, most live.
    devices: BTreeMap<DeviceIndex, (PageSet, u64, u64)>,
    pages: PageSet,
    dma_live: u64,
    dma_max: u64,
}

impl Flows {
    fn take(&mut self, op: &Op, chunk: &Chunk) {
        match op.kind {
            OpKind::Map {
                id,
                direction,
                class,
                segments,
                ..
            } => {
                if class == MapClass::Coherent {
                    return;
                }
                let iommu_only = class == MapClass::IommuOnly;
                let key = (op.device, direction, iommu_only);
                let state = self.flows.entry(key).or_default();
                state.close_burst(op.cpu);
                let serial = state.base + state.alive.len() as u64;
                state.alive.push_back(true);
                state.flow.maps += 1;
                state.flow.scatterlists += u64::from(class == MapClass::Sg);
                let device = self.devices.entry(op.device).or_default();
                let mut bytes = 0u64;
                for &segment in chunk.segments_of(segments) {
                    state.flow.segments += 1;
                    bytes = bytes.saturating_add(segment.bytes());
                    device.0.add(segment);
                    self.pages.add(segment);
                }
                *state.sizes.entry(bytes).or_default() += 1;
                device.1 += 1;
                device.2 = device.2.max(device.1);
                if !iommu_only {
                    self.dma_live += 1;
                    self.dma_max = self.dma_max.max(self.dma_live);
                }
                if self.live.len() <= id.index() {
                    self.live.resize(id.index() + 1, None);
                }
                if let Some(slot) = self.live.get_mut(id.index()) {
                    *slot = Some((key, serial));
                }
            }
            OpKind::Unmap { id } => {
                let Some((key, serial)) = self.live.get_mut(id.index()).and_then(Option::take)
                else {
                    return;
                };
                if !key.2 {
                    self.dma_live -= 1;
                }
                if let Some(device) = self.devices.get_mut(&key.0) {
                    device.1 -= 1;
                }
                let Some(state) = self.flows.get_mut(&key) else {
                    return;
                };
                if op.lines > 0 {
                    state.unmap(serial, op.cpu, op.time.0);
                    return;
                }
                // Replaced: no driver's unmap, so it says nothing about order or bursts.
                let index = serial.wrapping_sub(state.base) as usize;
                if let Some(alive) = state.alive.get_mut(index) {
                    *alive = false;
                }
                while state.alive.front() == Some(&false) {
                    state.alive.pop_front();
                    state.base += 1;
                }
            }
        }
    }

    fn finish(self, info: &mut Info, names: Vec<String>, summary: &Summary) {
        info.pages = self.pages.counts();
        info.max_live = self.dma_max;
        info.live_at_end = self.dma_live;
        info.devices = names
            .into_iter()
            .map(|name| DeviceInfo {
                name,
                ..DeviceInfo::default()
            })
            .collect();
        for (index, device) in info.devices.iter_mut().enumerate() {
            let counts = summary.devices.get(index);
            device.skips_unmaps = counts.is_some_and(|counts| counts.skips_unmaps());
        }
        for (index, (pages, live, most)) in self.devices {
            if let Some(device) = info.devices.get_mut(index.index()) {
                device.pages = pages.counts();
                device.live_at_end = live;
                device.max_live = most;
            }
        }
        for ((device, direction, iommu_only), state) in self.flows {
            if let Some(device) = info.devices.get_mut(device.index()) {
                let mut flow = state.finish();
                flow.direction = direction.to_string();
                flow.iommu_only = iommu_only;
                device.flows.push(flow);
            }
        }
    }
}

impl fmt::Display for Info {
    /// A short text for people; the command line draws tables from the fields.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} events in {} lines over {:.3} s; {} unknown, {} malformed, {} lost",
            self.events,
            self.lines,
            self.duration_ns as f64 / 1e9,
            self.unknown,
            self.malformed,
            self.lost
        )?;
        writeln!(
            f,
            "{} maps, {} unmaps ({} without a map), {} allocs, {} frees, {} iommu:map, {} iommu:unmap, \
             {} mappings of iommu:* lines alone",
            self.map_events,
            self.unmap_events,
            self.unmatched_unmaps,
            self.allocs,
            self.frees,
            self.iommu_map,
            self.iommu_unmap,
            self.iommu_only_maps
        )?;
        writeln!(
            f,
            "{} pages mapped {:.1} times each; {} mappings alive at most, {} at the end",
            self.pages.distinct,
            self.pages.reuse(),
            self.max_live,
            self.live_at_end
        )?;
        for device in &self.devices {
            writeln!(
                f,
                "{}: {} pages, reuse {:.1}, {} alive at most{}",
                device.name,
                device.pages.distinct,
                device.pages.reuse(),
                device.max_live,
                if device.skips_unmaps {
                    ", the driver skips unmaps"
                } else {
                    ""
                }
            )?;
            for flow in &device.flows {
                writeln!(
                    f,
                    "  {}{}: {} maps, {} unmaps, {:.2}% oldest first, bursts mean {:.1} p99 {} max {}, sizes {:?}",
                    flow.direction,
                    if flow.iommu_only { " (iommu only)" } else { "" },
                    flow.maps,
                    flow.unmaps,
                    flow.ring_likeness() * 100.0,
                    flow.bursts.mean(),
                    flow.bursts.p99,
                    flow.bursts.max,
                    flow.sizes
                )?;
            }
        }
        Ok(())
    }
}
