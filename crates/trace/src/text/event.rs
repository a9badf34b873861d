//! Raw events: what one line says, before lines are put together.

use ringfence_types::{Direction, Iova, Nanos, PhysAddr};

use crate::op::DeviceIndex;

/// What a processor was doing when it printed a line. A line and the lines that belong to it come
/// from the same context of the same processor; an interrupt between them is another context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Context {
    /// Process.
    pub pid: u32,
    /// Third character of the flags: `h` and `H` in a hard interrupt, `s` in a soft one, `.` in a
    /// task; 0 where the format (`perf script`) does not print it.
    pub level: u8,
}

/// A list of a raw event: a slice of [`RawChunk::words`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ListSpan {
    /// Index of the first entry.
    pub first: u32,
    /// How many entries; can be 0.
    pub count: u32,
}

/// One event of the trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawEvent {
    /// When.
    pub time: Nanos,
    /// Line, from 1.
    pub line: u64,
    /// Processor.
    pub cpu: u16,
    /// What the processor was doing.
    pub context: Context,
    /// What the line says.
    pub kind: RawKind,
}

/// What a line says. Ranges are never empty and never wrap, unless said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RawKind {
    /// `dma_map_phys`, `dma_map_page`, `dma_map_resource`.
    Map {
        /// Whose.
        device: DeviceIndex,
        /// As printed.
        direction: Direction,
        /// `dma_addr`.
        iova: Iova,
        /// Bytes; at most 64 GiB.
        size: u64,
        /// `phys_addr`.
        phys: PhysAddr,
    },
    /// `dma_unmap_phys`, `dma_unmap_page`, `dma_unmap_resource`.
    Unmap {
        /// Whose.
        device: DeviceIndex,
        /// As printed.
        direction: Direction,
        /// `dma_addr`.
        iova: Iova,
        /// Bytes.
        size: u64,
    },
    /// `dma_map_sg`.
    MapSg {
        /// Whose.
        device: DeviceIndex,
        /// As printed.
        direction: Direction,
        /// Segments the caller passed; more than `phys_addrs` holds if the list was cut.
        nents: u32,
        /// DMA segments after merging; more than `dma_addrs` holds if the list was cut.
        ents: u32,
        /// Start of each DMA segment.
        dma_addrs: ListSpan,
        /// Bytes of each DMA segment. Each segment is a range of at least one byte.
        sizes: ListSpan,
        /// Start of each segment passed.
        phys_addrs: ListSpan,
    },
    /// `dma_unmap_sg`.
    UnmapSg {
        /// Whose.
        device: DeviceIndex,
        /// As printed.
        direction: Direction,
        /// Start of each segment passed to the map; never cut.
        phys_addrs: ListSpan,
    },
    /// `dma_alloc`, `dma_alloc_pages`, `dma_alloc_sgt`.
    Alloc {
        /// Whose.
        device: DeviceIndex,
        /// As printed; bidirectional where the kernel prints none.
        direction: Direction,
        /// `dma_addr`.
        iova: Iova,
        /// Bytes; at most 64 GiB.
        size: u64,
        /// Start of each piece, for `dma_alloc_sgt`; else empty.
        phys_addrs: ListSpan,
    },
    /// `dma_free`, `dma_free_pages`, `dma_free_sgt`.
    Free {
        /// Whose.
        device: DeviceIndex,
        /// As printed; bidirectional where the kernel prints none.
        direction: Direction,
        /// `dma_addr`.
        iova: Iova,
        /// Bytes.
        size: u64,
    },
    /// `dma_sync_*`.
    Sync {
        /// Whose.
        device: DeviceIndex,
    },
    /// A map or allocation that failed, or a free of nothing.
    Void {
        /// Whose.
        device: DeviceIndex,
    },
    /// `iommu:map`.
    IommuMap {
        /// First byte.
        iova: Iova,
        /// Where it leads.
        phys: PhysAddr,
        /// Bytes.
        size: u64,
    },
    /// `iommu:unmap`.
    IommuUnmap {
        /// First byte.
        iova: Iova,
        /// Bytes.
        size: u64,
    },
    /// `tracing_mark_write`: an index into [`RawChunk::marks`].
    Mark(u32),
}

/// A run of raw events. Reused from call to call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawChunk {
    /// In the order of the lines.
    pub events: Vec<RawEvent>,
    /// The entries of all lists.
    pub words: Vec<u64>,
    /// The texts of all marks.
    pub marks: Vec<String>,
}

impl RawChunk {
    /// About how many events [`TraceReader`](super::TraceReader) puts into a chunk.
    pub const EVENTS: usize = 4096;
    /// About how many list entries, at most.
    pub const WORDS: usize = 64 * 1024;
    /// How many marks, at most: 1 MiB of text.
    pub const MARKS: usize = 1024;

    /// The entries of a list of this chunk; none if the span is not of this chunk.
    #[inline]
    pub fn list(&self, span: ListSpan) -> &[u64] {
        let first = span.first as usize;
        self.words
            .get(first..first.saturating_add(span.count as usize))
            .unwrap_or(&[])
    }

    /// Forgets everything, keeps the memory.
    pub fn clear(&mut self) {
        self.events.clear();
        self.words.clear();
        self.marks.clear();
    }
}
