//! What a trace is like: how much it maps, how often a page is used again, how ring-like its unmaps
//! are.

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

use flows::Flows;
use lines::LineCounts;

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
    /// Pages that the `dma_map_*` lines alone name: the ranges of single maps; of lists, the ranges
    /// where the line has a size for each start, else the pages of the starts.
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
    /// Median length; none without bursts, as the other two.
    pub p50: Option<u64>,
    /// 99th percentile.
    pub p99: Option<u64>,
    /// Longest.
    pub max: Option<u64>,
}

impl Bursts {
    /// Mean length; none without bursts.
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
