//! Raw events: the contents of single lines, before lines are combined.

use ringfence_types::{Direction, Iova, Nanos, PhysAddr};

use crate::op::DeviceIndex;
use crate::page::PageEvent;

/// The context of a CPU when it printed a line. A line and the lines that belong to it come from
/// the same context of the same CPU. An interrupt between them has another context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ExecutionContext {
    /// PID of the task.
    pub pid: u32,
    /// Third character of the flags: `h` and `H` in a hard interrupt, `s` in a softirq, `.` in a
    /// task. 0 if the format (`perf script`) does not print it.
    pub level: u8,
}

/// A list of a raw event: a slice of [`RawChunk::words`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ListSpan {
    /// Index of the first entry.
    pub first: u32,
    /// Number of entries; can be 0.
    pub count: u32,
}

/// One event of the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawEvent {
    /// Time on the clock of the trace.
    pub time: Nanos,
    /// Line number, from 1.
    pub line: u64,
    /// The CPU that printed the line.
    pub cpu: u16,
    /// Context of the CPU at that line.
    pub context: ExecutionContext,
    /// Contents of the line.
    pub kind: RawKind,
}

/// Contents of a line. Ranges are never empty and never wrap, unless a field says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RawKind {
    /// `dma_map_phys`, `dma_map_page`, `dma_map_resource`.
    Map {
        /// Device that may access the memory.
        device: DeviceIndex,
        /// Direction as printed.
        direction: Direction,
        /// Field `dma_addr`: the first address of the mapping.
        iova: Iova,
        /// Size in bytes; at most 64 GiB.
        size: u64,
        /// Field `phys_addr`: the physical address of the first byte.
        phys: PhysAddr,
    },
    /// `dma_unmap_phys`, `dma_unmap_page`, `dma_unmap_resource`.
    Unmap {
        /// Device of the mapping.
        device: DeviceIndex,
        /// Direction as printed.
        direction: Direction,
        /// Field `dma_addr`: the first address of the mapping.
        iova: Iova,
        /// Size in bytes.
        size: u64,
    },
    /// `dma_map_sg`: a map of a scatterlist.
    MapSg {
        /// Device that may access the memory.
        device: DeviceIndex,
        /// Direction as printed.
        direction: Direction,
        /// Number of segments that the caller passed. Greater than the length of `phys_addrs` if
        /// the kernel truncated the list.
        nents: u32,
        /// Number of DMA segments after merging. Greater than the length of `dma_addrs` if the
        /// kernel truncated the list.
        ents: u32,
        /// Start of each DMA segment.
        dma_addrs: ListSpan,
        /// Size of each DMA segment in bytes; at least one byte, and the segment does not wrap.
        sizes: ListSpan,
        /// Start of each segment that the caller passed.
        phys_addrs: ListSpan,
    },
    /// `dma_unmap_sg`: an unmap of a scatterlist.
    UnmapSg {
        /// Device of the mapping.
        device: DeviceIndex,
        /// Direction as printed.
        direction: Direction,
        /// Start of each segment passed to the map; never truncated.
        phys_addrs: ListSpan,
    },
    /// `dma_alloc`, `dma_alloc_pages`, `dma_alloc_sgt`.
    Alloc {
        /// Device that may access the memory.
        device: DeviceIndex,
        /// Direction as printed; bidirectional if the kernel prints none.
        direction: Direction,
        /// Field `dma_addr`: the first address of the buffer.
        iova: Iova,
        /// Size in bytes; at most 64 GiB.
        size: u64,
        /// Start of each piece for `dma_alloc_sgt`, otherwise empty.
        phys_addrs: ListSpan,
    },
    /// `dma_free`, `dma_free_pages`, `dma_free_sgt`.
    Free {
        /// Device of the buffer.
        device: DeviceIndex,
        /// Direction as printed; bidirectional if the kernel prints none.
        direction: Direction,
        /// Field `dma_addr`: the first address of the buffer.
        iova: Iova,
        /// Size in bytes.
        size: u64,
    },
    /// `dma_sync_*`, which changes no mapping.
    Sync {
        /// Device of the mapping.
        device: DeviceIndex,
    },
    /// `dma_access`: a DMA of the device. Only records of an emulated IOMMU have these lines.
    Access {
        /// Device that accessed memory.
        device: DeviceIndex,
        /// `ToDevice` for a read of the device, `FromDevice` for a write.
        direction: Direction,
        /// First address of the access.
        iova: Iova,
        /// Size in bytes; at most 64 GiB.
        size: u64,
    },
    /// A map or allocation that failed, or a free of a null pointer.
    Void {
        /// Device that the event names.
        device: DeviceIndex,
    },
    /// `iommu:map`: the IOMMU driver mapped a range.
    IommuMap {
        /// First address of the range.
        iova: Iova,
        /// Physical address of the first byte.
        phys: PhysAddr,
        /// Size in bytes.
        size: u64,
    },
    /// `iommu:unmap`: the IOMMU driver unmapped a range.
    IommuUnmap {
        /// First address of the range.
        iova: Iova,
        /// Size in bytes.
        size: u64,
    },
    /// An event of the page allocator; only with [`PageEvents::Keep`](crate::PageEvents::Keep).
    Page(PageEvent),
    /// `tracing_mark_write`: an index into [`RawChunk::marks`].
    Mark(u32),
}

impl RawKind {
    /// Returns the device that the line names; `None` for a mark and an `iommu:*` line.
    #[inline]
    pub(crate) fn device(&self) -> Option<DeviceIndex> {
        match *self {
            Self::Map { device, .. }
            | Self::Unmap { device, .. }
            | Self::MapSg { device, .. }
            | Self::UnmapSg { device, .. }
            | Self::Alloc { device, .. }
            | Self::Free { device, .. }
            | Self::Sync { device }
            | Self::Access { device, .. }
            | Self::Void { device } => Some(device),
            Self::IommuMap { .. } | Self::IommuUnmap { .. } | Self::Page(_) | Self::Mark(_) => None,
        }
    }
}

/// A run of raw events. Callers reuse the chunk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawChunk {
    /// The events, in the order of the lines.
    pub events: Vec<RawEvent>,
    /// The entries of all lists.
    pub words: Vec<u64>,
    /// The texts of all marks.
    pub marks: Vec<String>,
}

impl RawChunk {
    /// Approximate number of events that [`TraceReader`](super::TraceReader) puts into a chunk.
    pub const EVENTS: usize = 4096;
    /// Approximate maximum number of list entries.
    pub const WORDS: usize = 64 * 1024;
    /// Maximum number of marks: 1 MiB of text.
    pub const MARKS: usize = 1024;

    /// Returns the entries of a list in this chunk; empty if the span is out of range.
    #[inline]
    pub fn list(&self, span: ListSpan) -> &[u64] {
        let first = span.first as usize;
        self.words
            .get(first..first.saturating_add(span.count as usize))
            .unwrap_or(&[])
    }

    /// Removes all contents and keeps the allocated memory.
    pub fn clear(&mut self) {
        self.events.clear();
        self.words.clear();
        self.marks.clear();
    }
}
