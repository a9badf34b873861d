//! Rules that convert resolved lines to operations.

mod device_facts;
mod iommu_only;
mod mappings;

use std::collections::HashMap;

use ringfence_types::{Direction, Nanos, PhysAddr};

use super::fifo::FifoSpan;
use super::live_mappings::{Key, LiveMappings, TooManyMappings, hash_list};
use super::physical::{NoFrames, OutOfGranules, ReplayArena};
use super::scatter::{self, Lengths, Segment};
use super::window::{LineWindow, Lists, Piece};
use crate::limits::{Budget, LimitExceeded, Progress, TraceLimits};
use crate::op::{Chunk, DeviceIndex, MapClass, MapFlags, MappingId, Position};
use crate::options::PageEvents;
use crate::summary::Summary;
use crate::text::{RawEvent, RawKind};

/// Reason why a line cannot become an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResolveError {
    PhysicalSpaceExhausted,
    FreshFramesTooLarge { bytes: u64 },
    SegmentWraps { start: PhysAddr },
    TooManyMappings,
    LimitExceeded(LimitExceeded),
}

impl From<LimitExceeded> for ResolveError {
    fn from(excess: LimitExceeded) -> Self {
        Self::LimitExceeded(excess)
    }
}

impl From<NoFrames> for ResolveError {
    fn from(why: NoFrames) -> Self {
        match why {
            NoFrames::OutOfGranules => Self::PhysicalSpaceExhausted,
            NoFrames::TooLarge { bytes } => Self::FreshFramesTooLarge { bytes },
        }
    }
}

impl From<OutOfGranules> for ResolveError {
    fn from(_: OutOfGranules) -> Self {
        Self::PhysicalSpaceExhausted
    }
}

impl From<TooManyMappings> for ResolveError {
    fn from(_: TooManyMappings) -> Self {
        Self::TooManyMappings
    }
}

/// Kind of a device's DMA addresses, as its maps show.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Addressing {
    #[default]
    Unknown,
    /// DMA addresses are physical addresses.
    Direct,
    /// DMA addresses are translated.
    Translated,
}

/// Time, CPU and line count of an operation.
#[derive(Debug, Clone, Copy)]
struct OpContext {
    time: Nanos,
    cpu: u16,
    lines: u16,
}

/// The fields of a `dma_map_sg` event besides its lists.
#[derive(Debug, Clone, Copy)]
struct SgList {
    device: DeviceIndex,
    direction: Direction,
    /// Number of entries that the driver passed.
    nents: u32,
    /// Number of entries that the layer returned.
    ents: u32,
}

/// A mapping that is about to begin.
#[derive(Debug, Clone, Copy)]
struct PendingMap {
    device: DeviceIndex,
    direction: Direction,
    class: MapClass,
    flags: MapFlags,
}

/// State of the conversion of a trace's lines to operations.
#[derive(Debug, Default)]
pub(super) struct Resolver {
    pub(super) summary: Summary,
    live: LiveMappings,
    arena: ReplayArena,
    addressing: Vec<Addressing>,
    /// By device: true if an event of it was resolved. Events that the reader has only read ahead
    /// do not count.
    seen: Vec<bool>,
    named: usize,
    only_named: Option<DeviceIndex>,
    any_iommu: bool,
    fresh: HashMap<MappingId, (PhysAddr, u64)>,
    segments: Vec<Segment>,
    now: Nanos,
    budget: Budget,
    page_events: PageEvents,
    /// Position of the line that is resolved.
    position: Position,
    /// Progress of the reader.
    pub(super) progress: Progress,
}

impl Resolver {
    pub(super) fn new(limits: TraceLimits, page_events: PageEvents) -> Self {
        Self {
            page_events,
            budget: Budget::new(limits),
            ..Self::default()
        }
    }

    /// Charges a mark.
    pub(super) fn mark(&mut self, text: &str) -> Result<(), ResolveError> {
        Ok(self.budget.mark(text.len(), self.progress)?)
    }

    pub(super) fn live(&self) -> &LiveMappings {
        &self.live
    }

    /// Returns the only device that events named so far; `None` if none or several were named.
    pub(super) fn only_named(&self) -> Option<DeviceIndex> {
        self.only_named
    }

    /// Returns true if any event so far named a device.
    pub(super) fn any_named(&self) -> bool {
        self.named > 0
    }

    /// Resolves a `dma:*` event with the lines that belong to it.
    pub(super) fn event(
        &mut self,
        event: &RawEvent,
        lists: Lists,
        pieces: FifoSpan,
        lines: u16,
        window: &LineWindow,
        chunk: &mut Chunk,
    ) -> Result<(), ResolveError> {
        let at = self.at(event, lines);
        let pieces = window.pieces(pieces);
        self.any_iommu |= !pieces.is_empty();
        if let Some(device) = event.kind.device() {
            self.note_event(device);
        }
        match event.kind {
            RawKind::Map {
                device,
                direction,
                iova,
                size,
                phys,
            } => {
                let direct = iova.get() == phys.get() && pieces.is_empty();
                self.note_addressing(device, direct);
                self.segments.clear();
                self.segments.push((phys.get(), size));
                let map = PendingMap {
                    device,
                    direction,
                    class: MapClass::Single,
                    flags: MapFlags::NONE,
                };
                let iova = iova.get();
                return self.begin(map, Key::Single { device, iova }, iova, at, chunk);
            }
            RawKind::MapSg {
                device,
                direction,
                nents,
                ents,
                ..
            } => {
                let list = SgList {
                    device,
                    direction,
                    nents,
                    ents,
                };
                return self.map_sg(list, lists, pieces, window, at, chunk);
            }
            RawKind::Alloc {
                device,
                direction,
                iova,
                size,
                ..
            } => {
                let phys_addrs = window.list(lists.phys_addrs);
                let iova = iova.get();
                let flags = self.coherent_segments(device, iova, size, phys_addrs, pieces)?;
                let map = PendingMap {
                    device,
                    direction,
                    class: MapClass::Coherent,
                    flags,
                };
                return self.begin(map, Key::Coherent { device, iova }, iova, at, chunk);
            }
            RawKind::Unmap { device, iova, .. } => {
                let iova = iova.get();
                if !self.end(Key::Single { device, iova }, at, chunk) {
                    self.summary.unmatched_unmaps += 1;
                }
            }
            RawKind::UnmapSg {
                device, direction, ..
            } => {
                let starts = window.list(lists.phys_addrs);
                let total = u32::try_from(starts.len()).unwrap_or(u32::MAX);
                let list = hash_list(direction, total, starts);
                if !self.end(Key::Sg { device, list }, at, chunk) {
                    self.summary.unmatched_unmaps += 1;
                }
            }
            RawKind::Free { device, iova, .. } => {
                let iova = iova.get();
                if !self.end(Key::Coherent { device, iova }, at, chunk) {
                    self.summary.unmatched_frees += 1;
                }
            }
            RawKind::Sync { .. } => self.summary.syncs += 1,
            RawKind::Void { .. } => self.summary.failed_maps += 1,
            // A replay derives the accesses from the mappings.
            RawKind::Access { .. }
            | RawKind::IommuMap { .. }
            | RawKind::IommuUnmap { .. }
            | RawKind::Page(_)
            | RawKind::Mark(_) => {}
        }
        Ok(())
    }

    fn map_sg(
        &mut self,
        SgList {
            device,
            direction,
            nents,
            ents,
        }: SgList,
        lists: Lists,
        pieces: &[Piece],
        window: &LineWindow,
        at: OpContext,
        chunk: &mut Chunk,
    ) -> Result<(), ResolveError> {
        let starts = window.list(lists.dma_addrs);
        let phys_addrs = window.list(lists.phys_addrs);
        let Some(&iova) = starts.first() else {
            return Ok(());
        };
        let direct = Some(&iova) == phys_addrs.first() && pieces.is_empty();
        self.note_addressing(device, direct);
        self.segments.clear();
        let dma = (starts, window.list(lists.sizes));
        let lengths = scatter::segments(dma, phys_addrs, pieces, &mut self.segments);
        let mut flags = MapFlags::NONE;
        if lengths == Lengths::Guessed {
            flags = flags.with(MapFlags::GUESSED_LENGTHS);
            self.summary.guessed_lengths += 1;
        }
        if nents as usize > phys_addrs.len() || ents as usize > starts.len() {
            flags = flags.with(MapFlags::TRUNCATED);
            self.summary.truncated_lists += 1;
        }
        let map = PendingMap {
            device,
            direction,
            class: MapClass::Sg,
            flags,
        };
        let list = hash_list(direction, nents, phys_addrs);
        self.begin(map, Key::Sg { device, list }, iova, at, chunk)
    }

    /// Finds the segments of a coherent buffer. They come from its `iommu:map` lines, or else from
    /// its printed starts. Otherwise, if the device's addresses are physical, the segment is at its
    /// DMA address. Otherwise the buffer gets fresh frames.
    fn coherent_segments(
        &mut self,
        device: DeviceIndex,
        iova: u64,
        size: u64,
        phys_addrs: &[u64],
        pieces: &[Piece],
    ) -> Result<MapFlags, ResolveError> {
        self.segments.clear();
        if !pieces.is_empty() || !phys_addrs.is_empty() {
            let dma: (&[u64], &[u64]) = (&[iova], &[size]);
            let covered = scatter::segments(dma, phys_addrs, pieces, &mut self.segments);
            if covered == Lengths::Exact && !self.segments.is_empty() {
                return Ok(MapFlags::NONE);
            }
            if !phys_addrs.is_empty() {
                self.summary.guessed_lengths += 1;
                return Ok(MapFlags::GUESSED_LENGTHS);
            }
            self.segments.clear();
        }
        let direct = match self.addressing(device) {
            Addressing::Direct => true,
            Addressing::Translated => false,
            Addressing::Unknown => !self.any_iommu,
        };
        if direct {
            self.segments.push((iova, size));
            return Ok(MapFlags::NONE);
        }
        let frames = self.arena.fresh(size)?;
        self.segments.push((frames.start().get(), size));
        self.summary.fresh_frames += 1;
        Ok(MapFlags::FRESH_FRAMES)
    }

    /// Counts the live mappings at the end of the trace.
    pub(super) fn finish(&mut self) {
        self.summary.live_at_end = self.live.count();
        for device in &mut self.summary.devices {
            device.live_at_end = 0;
        }
        for (_, mapping) in self.live.iter() {
            if mapping.class != MapClass::Coherent
                && let Some(device) = self.summary.devices.get_mut(mapping.device.index())
            {
                device.live_at_end += 1;
            }
        }
    }

    /// Keeps time from running backwards when the lines of two CPUs were merged out of order.
    fn at(&mut self, event: &RawEvent, lines: u16) -> OpContext {
        self.now = self.now.max(event.time);
        self.position = Position {
            line: event.line,
            time: event.time,
        };
        OpContext {
            time: self.now,
            cpu: event.cpu,
            lines,
        }
    }

    /// Advances the time to that of `event`, unless an earlier line was later. Returns the time.
    pub(super) fn advance_to(&mut self, event: &RawEvent) -> Nanos {
        self.at(event, 0).time
    }
}
