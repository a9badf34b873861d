//! Finds pages that the kernel reallocated while a device could still reach them.
//!
//! In lazy mode, Linux removes the entry of the IOMMU's table at the unmap and flushes the IOTLB
//! later. A page that is freed and allocated again before the flush belongs to its new owner, and
//! the device still reaches it. The module combines the `dma:*` and `iommu:*` events of a trace
//! with those of the page allocator, `kmem:mm_page_alloc` and `kmem:mm_page_free`.
//!
//! `order` sorts the events by time, `frames` keeps the pages that devices can reach, and `report`
//! collects the exposures. docs/JUDGE.md lists what a trace does not show.

mod frames;
mod order;
mod report;

use std::collections::HashMap;
use std::io::Read;

use ringfence_types::{Nanos, PhysRange};

pub use report::{
    Allocation, DeviceExposures, ExposureEnd, Exposures, Judgement, PageExposure, PageTask,
};

use crate::domain_type::DomainType;
use crate::error::TraceError;
use crate::limits::LimitExceeded;
use crate::op::{Chunk, DeviceIndex, MapFlags, MappingId, Op, OpKind, PageOp, Position};
use crate::operations::Operations;
use crate::page::PageChange;
use crate::text::{RawChunk, RawEvent, RawKind};

use frames::{Frames, Mapping, Owner, Pages};
use order::{Item, Reorder, Step};
use report::VerdictCounts;

/// Time for which a device reaches a page after its unmap: an upper bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StaleWindow {
    /// Longest time until the flush.
    pub longest: Nanos,
    /// Entries of a CPU's flush queue of one domain: when it is full, the domain is flushed
    /// earlier. `None`: only the time counts.
    pub queue: Option<u32>,
}

impl Default for StaleWindow {
    /// Returns the rule of Linux's flush queue (drivers/iommu/dma-iommu.c): the timer flushes 10 ms
    /// after the first entry, and a CPU's queue has 256 entries, one of which stays empty.
    fn default() -> Self {
        Self {
            longest: Nanos(10_000_000),
            queue: Some(256),
        }
    }
}

/// Options of a judgement.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JudgeOptions {
    /// The window after an unmap.
    pub window: StaleWindow,
    /// Base-2 logarithm of the page size of the recorded kernel, from 12 to 16.
    pub page_shift: u8,
    /// Number of exposures that the judgement describes one by one: the longest.
    pub described: usize,
    /// Maximum number of pages of 4 KiB that devices can reach at once. A page counts once for each
    /// of its mappings.
    pub pages: usize,
}

impl Default for JudgeOptions {
    fn default() -> Self {
        Self {
            window: StaleWindow::default(),
            page_shift: 12,
            described: 1000,
            pages: 4 << 20,
        }
    }
}

impl Judgement {
    /// Reads a trace to its end. `operations` must have been opened with
    /// [`TraceOptions::with_page_events`](crate::TraceOptions::with_page_events).
    ///
    /// # Errors
    /// As [`Operations::next_chunk`]. The trace has no event of the page allocator, or devices can
    /// reach more pages at once than `options` permit.
    pub fn read<R: Read>(
        operations: &mut Operations<R>,
        options: &JudgeOptions,
    ) -> Result<Self, TraceError> {
        let mut reader = Reader::new(options);
        let mut chunk = Chunk::default();
        let mut addressing = Addressing::default();
        loop {
            let tap = &mut |event: &RawEvent, raw: &RawChunk| addressing.add(event, raw);
            if !operations.next_chunk_with(&mut chunk, tap)? {
                break;
            }
            addressing.update(operations);
            let result = reader.chunk(&chunk, &addressing);
            result.map_err(|problem| problem.of(operations.name()))?;
        }
        let end = reader.finish();
        let (frames, mut counts) = end.map_err(|problem| problem.of(operations.name()))?;
        if counts.page_allocs == 0 {
            return Err(TraceError::NoPageEvents {
                file: operations.name().to_owned(),
            });
        }
        for device in addressing.physical() {
            counts.physical(device);
        }
        Ok(counts.into_judgement(operations, options.window, frames.live()))
    }
}

/// A limit that a line exceeds.
#[derive(Debug)]
struct Excess {
    line: u64,
    excess: LimitExceeded,
}

impl Excess {
    fn of(self, file: &str) -> TraceError {
        TraceError::Limit {
            file: file.to_owned(),
            line: self.line,
            excess: self.excess,
        }
    }
}

/// Devices whose DMA addresses the IOMMU translates. A device without translation reaches all
/// memory at all times, also after an unmap.
#[derive(Debug, Default)]
struct Addressing {
    /// By device: true if one of its DMA addresses differs from the physical address.
    translated: HashMap<DeviceIndex, bool>,
    /// By device: the type of its domain, if the recording has it.
    types: Vec<Option<DomainType>>,
}

impl Addressing {
    fn add(&mut self, event: &RawEvent, raw: &RawChunk) {
        let (device, translated) = match event.kind {
            RawKind::Map {
                device, iova, phys, ..
            } => (device, iova.get() != phys.get()),
            RawKind::MapSg {
                device,
                dma_addrs,
                phys_addrs,
                ..
            } => {
                let differ = raw.list(dma_addrs).first() != raw.list(phys_addrs).first();
                (device, differ)
            }
            _ => return,
        };
        *self.translated.entry(device).or_default() |= translated;
    }

    /// Copies the domain types of devices that have appeared since the last call.
    fn update<R: Read>(&mut self, operations: &Operations<R>) {
        let devices = operations.devices().iter().skip(self.types.len());
        let types = devices.map(|(device, _)| operations.domain_type(device));
        self.types.extend(types);
    }

    fn domain_type(&self, device: DeviceIndex) -> Option<DomainType> {
        self.types.get(device.index()).copied().flatten()
    }

    fn is_physical(&self, device: DeviceIndex) -> bool {
        self.translated.get(&device) == Some(&false)
            || self.domain_type(device) == Some(DomainType::Identity)
    }

    fn physical(&self) -> impl Iterator<Item = DeviceIndex> {
        let devices = self.translated.iter();
        devices.filter_map(|(device, translated)| (!translated).then_some(*device))
    }
}

/// State while the trace is read.
struct Reader {
    /// By identifier: number of the live mapping in this trace, and the time of its map.
    live: HashMap<MappingId, (u64, Nanos)>,
    maps: u64,
    order: Reorder,
    frames: Frames,
    counts: VerdictCounts,
    /// Shift from the kernel's pages to pages of 4 KiB.
    page_shift: u8,
}

impl Reader {
    fn new(options: &JudgeOptions) -> Self {
        Self {
            live: HashMap::new(),
            maps: 0,
            order: Reorder::default(),
            frames: Frames::new(options.window, options.pages),
            counts: VerdictCounts::new(options.described),
            page_shift: options.page_shift.saturating_sub(12).min(4),
        }
    }

    /// Adds the operations and page events of a chunk, in the order of their lines.
    fn chunk(&mut self, chunk: &Chunk, addressing: &Addressing) -> Result<(), Excess> {
        let mut pages = chunk.page_events.iter().peekable();
        let positions = chunk.positions.iter().copied();
        for ((index, op), position) in (0u32..).zip(&chunk.ops).zip(positions) {
            while let Some(page) = pages.next_if(|page| page.before_op <= index) {
                self.page(page)?;
            }
            self.operation(op, position, chunk, addressing)?;
        }
        for page in pages {
            self.page(page)?;
        }
        Ok(())
    }

    fn operation(
        &mut self,
        op: &Op,
        position: Position,
        chunk: &Chunk,
        addressing: &Addressing,
    ) -> Result<(), Excess> {
        let (time, step) = match op.kind {
            OpKind::Map {
                id,
                direction,
                class,
                flags,
                segments,
            } => {
                if addressing.is_physical(op.device) || flags.contains(MapFlags::FRESH_FRAMES) {
                    self.live.remove(&id);
                    return Ok(());
                }
                let guessed = flags.contains(MapFlags::GUESSED_LENGTHS);
                let mapping = Mapping::new(
                    op.device,
                    direction,
                    class,
                    addressing.domain_type(op.device) == Some(DomainType::Strict),
                    position,
                    frames_of(chunk.segments_of(segments), guessed),
                );
                self.maps += 1;
                self.live.insert(id, (self.maps, position.time));
                (position.time, Step::Map(self.maps, Box::new(mapping)))
            }
            OpKind::Unmap { id } => {
                let Some((number, mapped)) = self.live.remove(&id) else {
                    return Ok(());
                };
                // With clocks that disagree, an unmap can seem to precede its map.
                let time = position.time.max(mapped);
                (time, Step::Unmap(number, op.cpu))
            }
        };
        self.push(time, position.line, step)
    }

    fn page(&mut self, page: &PageOp) -> Result<(), Excess> {
        let event = page.event;
        let first = event.pfn.0 << self.page_shift;
        let pages = Pages {
            first,
            last: first + ((1 << (event.order + self.page_shift)) - 1),
            order: event.order,
        };
        let owner = Owner {
            task: event.task,
            pid: page.pid,
            position: page.position,
        };
        let step = match event.change {
            PageChange::Allocated => {
                self.counts.page_allocs += 1;
                Step::Allocate(pages, owner)
            }
            PageChange::Freed => {
                self.counts.page_frees += 1;
                Step::Free(pages, owner)
            }
        };
        self.push(page.position.time, page.position.line, step)
    }

    fn push(&mut self, time: Nanos, line: u64, step: Step) -> Result<(), Excess> {
        self.order.push(Item::new(time, line, step));
        while let Some(item) = self.order.pop_full() {
            self.apply(item)?;
        }
        Ok(())
    }

    fn apply(&mut self, item: Item) -> Result<(), Excess> {
        let line = item.line;
        let applied = self.frames.apply(item, &mut self.counts);
        applied.map_err(|excess| Excess { line, excess })
    }

    fn finish(mut self) -> Result<(Frames, VerdictCounts), Excess> {
        while let Some(item) = self.order.pop() {
            self.apply(item)?;
        }
        self.counts.late = self.order.late();
        self.frames.finish(&mut self.counts);
        Ok((self.frames, self.counts))
    }
}

/// Returns the frames of 4 KiB of a mapping's segments, as first and last. A guessed length counts
/// as one byte: only the start of the segment is certain.
fn frames_of(segments: &[PhysRange], guessed: bool) -> Vec<(u64, u64)> {
    let frames = segments.iter().map(|segment| {
        let first = segment.start().get() >> 12;
        match guessed {
            true => (first, first),
            false => (first, segment.last().get() >> 12),
        }
    });
    let mut frames: Vec<(u64, u64)> = frames.collect();
    frames.sort_unstable();
    // Segments within one page, and adjacent segments, become one range.
    frames.dedup_by(|next, kept| {
        let joined = next.0 <= kept.1.saturating_add(1);
        if joined {
            kept.1 = kept.1.max(next.1);
        }
        joined
    });
    frames
}
