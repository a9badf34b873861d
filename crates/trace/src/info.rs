//! Statistics of a trace: amount of mappings, reuse of pages, and similarity of unmap order to a
//! ring.

mod bursts;
mod flow;
mod flows;
mod lines;
mod pages;

use std::fmt;
use std::io::Read;

use serde::Serialize;

use crate::error::TraceError;
use crate::op::Chunk;
use crate::operations::Operations;

pub use bursts::{Burst, FlowBurst, FlowBursts};

use flows::Flows;
use lines::LineCounts;

/// Statistics of a trace.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Info {
    /// Lines read, including comments and blank lines.
    pub lines: u64,
    /// Events, unknown ones included.
    pub events: u64,
    /// Events skipped because they are not about DMA mappings.
    pub unknown: u64,
    /// Malformed lines skipped.
    pub malformed: u64,
    /// Events that the kernel reports as lost.
    pub lost: u64,
    /// Time from the first to the last event, in ns.
    pub duration_ns: u64,
    /// Successful `dma_map_*` events.
    pub map_events: u64,
    /// Number of `dma_unmap_*` events.
    pub unmap_events: u64,
    /// Successful `dma_alloc*` events.
    pub allocs: u64,
    /// `dma_free*` events, without frees of a null pointer.
    pub frees: u64,
    /// Number of `dma_sync_*` events.
    pub syncs: u64,
    /// Number of `dma_access` events. A replay does not use them.
    pub accesses: u64,
    /// Number of `iommu:map` events.
    pub iommu_map: u64,
    /// Number of `iommu:unmap` events.
    pub iommu_unmap: u64,
    /// Mappings that only `iommu:*` lines show.
    pub iommu_only_maps: u64,
    /// `dma_unmap_*` events whose map the trace does not show.
    pub unmatched_unmaps: u64,
    /// Maps of a key that was live.
    pub replaced: u64,
    /// Maps whose printed list the kernel truncated.
    pub truncated_lists: u64,
    /// Maps whose segment lengths are a guess.
    pub guessed_lengths: u64,
    /// `dma_map_*` mappings live after the last line; coherent buffers are not counted.
    pub live_at_end: u64,
    /// Maximum number of `dma_map_*` mappings live at once.
    pub max_live: u64,
    /// Pages that the `dma_map_*` lines alone name: the ranges of single maps. For lists, the
    /// ranges if the line has a size for each start, otherwise the pages of the starts.
    pub dma_pages: Pages,
    /// Pages in `iommu:map` lines, coherent buffers included.
    pub iommu_pages: Pages,
    /// Pages of the segments of all streaming mappings.
    pub pages: Pages,
    /// Statistics per device, in order of first appearance.
    pub devices: Vec<DeviceInfo>,
    /// Marks written into the trace, each with its time in ns.
    pub marks: Vec<(u64, String)>,
}

/// Counts by powers of two: bucket n counts what is at least 2^n and less than 2^(n+1).
pub type Histogram = [u64; 12];

/// Returns the bucket of `value` in a [`Histogram`]; 0 belongs to the first bucket.
fn bucket(value: u64) -> usize {
    (value.max(1).ilog2() as usize).min(Histogram::default().len() - 1)
}

/// Use of 4 KiB pages, as in Table 5 of the PVIOMMU paper.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Pages {
    /// Number of different pages.
    pub distinct: u64,
    /// Number of times that a page was mapped.
    pub touches: u64,
    /// Pages that were mapped at least 2^n and fewer than 2^(n+1) times, in bucket n; the last
    /// bucket has no upper end. Mappings of more than 512 pages do not count. Not part of the JSON
    /// form.
    #[serde(skip)]
    pub by_touches: Histogram,
}

impl Pages {
    /// Returns the mappings per page; 0 without pages.
    pub fn reuse(&self) -> f64 {
        match self.distinct {
            0 => 0.0,
            distinct => self.touches as f64 / distinct as f64,
        }
    }
}

/// Statistics of one device.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DeviceInfo {
    /// Name as the trace prints it.
    pub name: String,
    /// Pages of the segments of its streaming mappings.
    pub pages: Pages,
    /// Maximum number of streaming mappings live at once.
    pub max_live: u64,
    /// Streaming mappings live at the end.
    pub live_at_end: u64,
    /// True if its driver skips unmaps.
    pub skips_unmaps: bool,
    /// Its mappings by direction. Mappings that only `iommu:*` lines show have flows of their own.
    pub flows: Vec<Flow>,
}

/// The mappings of one device in one direction.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Flow {
    /// `to-device`, `from-device`, `bidirectional`.
    pub direction: String,
    /// True if only `iommu:*` lines show these mappings.
    pub iommu_only: bool,
    /// Streaming mappings created.
    pub maps: u64,
    /// Scatterlists among them.
    pub scatterlists: u64,
    /// Total number of segments.
    pub segments: u64,
    /// Number of unmaps.
    pub unmaps: u64,
    /// Unmaps of the oldest live mapping; a ring unmaps only in this order.
    pub oldest_first: u64,
    /// Unmaps of the mapping created directly after the previously unmapped one.
    pub exact_next: u64,
    /// Up to five pairs of mapping size in bytes and number of such mappings, most frequent first.
    pub sizes: Vec<(u64, u64)>,
    /// Bursts: consecutive unmaps on one CPU, at most 50 us apart, without a map between them.
    pub bursts: Bursts,
}

impl Flow {
    /// Returns the share of unmaps that removed the oldest live mapping; 1 without unmaps.
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
    /// Number of bursts.
    pub count: u64,
    /// Total number of unmaps in bursts.
    pub unmaps: u64,
    /// Median length; `None` without bursts, like the next two.
    pub p50: Option<u64>,
    /// 99th percentile of the lengths.
    pub p99: Option<u64>,
    /// Length of the longest burst.
    pub max: Option<u64>,
    /// Bursts of at least 2^n and fewer than 2^(n+1) unmaps, in bucket n; the last bucket has
    /// no upper end. Not part of the JSON form.
    #[serde(skip)]
    pub by_length: Histogram,
}

impl Bursts {
    /// Returns the mean length; `None` without bursts.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.unmaps as f64 / self.count as f64)
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
        while operations.next_chunk_with(&mut chunk, &mut |event, raw| lines.add(event, raw))? {
            for op in &chunk.ops {
                flows.add(op, &chunk);
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

impl fmt::Display for Info {
    /// Writes a short text for people; the command line draws tables from the fields.
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
            "{} maps, {} unmaps ({} without a map), {} allocs, {} frees, {} iommu:map, {} \
            iommu:unmap, {} mappings of iommu:* lines alone",
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
                    "  {}{}: {} maps, {} unmaps, {:.2}% oldest first, bursts mean {:.1} p99 {} max \
                    {}, sizes {:?}",
                    flow.direction,
                    if flow.iommu_only { " (iommu only)" } else { "" },
                    flow.maps,
                    flow.unmaps,
                    flow.ring_likeness() * 100.0,
                    flow.bursts.mean().unwrap_or_default(),
                    flow.bursts.p99.unwrap_or_default(),
                    flow.bursts.max.unwrap_or_default(),
                    flow.sizes
                )?;
            }
        }
        Ok(())
    }
}
