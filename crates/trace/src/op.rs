//! The operations that a replay performs, resolved from the events of a trace.

use core::fmt;

use ringfence_types::{Direction, Nanos, PhysRange};

use crate::addresses::AddressEvent;
use crate::page::PageEvent;

/// Row of a device in [`Devices`](crate::Devices): dense, in order of first appearance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DeviceIndex(pub u16);

impl DeviceIndex {
    /// Returns the index into a table with one row per device.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Identifies a mapping from its [`OpKind::Map`] to its [`OpKind::Unmap`].
///
/// Identifiers are dense and small, so a replay can index an array with them. A map takes the
/// identifier freed last, or the next unused one if no identifier is free. An identifier is
/// therefore reused only after the unmap of its previous mapping was emitted. The highest
/// identifier is the maximum number of live mappings minus one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct MappingId(pub u32);

impl MappingId {
    /// Returns the index into a table with one slot per mapping.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The DMA API call that created a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MapClass {
    /// `dma_map_single`, `dma_map_page`, `dma_map_resource`, `dma_map_phys`.
    Single,
    /// `dma_map_sg`: a mapping of a scatterlist.
    Sg,
    /// `dma_alloc_coherent` and its relatives.
    Coherent,
    /// Only `iommu:map` lines, no `dma:*` event: the caller used an interface without DMA
    /// tracepoints.
    IommuOnly,
}

impl MapClass {
    /// All classes, in order of declaration.
    pub const ALL: [Self; 4] = [Self::Single, Self::Sg, Self::Coherent, Self::IommuOnly];

    /// Returns the name, as tables of operations have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Sg => "sg",
            Self::Coherent => "coherent",
            Self::IommuOnly => "iommu-only",
        }
    }
}

/// Properties of a mapping: a set of flags in one byte.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct MapFlags(u8);

impl MapFlags {
    /// The empty set.
    pub const NONE: Self = Self(0);
    /// The kernel truncated the printed scatterlist at 128 entries. Later segments come from
    /// `iommu:map` lines; without such lines they are missing.
    pub const TRUNCATED: Self = Self(1);
    /// The segment lengths are a guess: the list was merged and no `iommu:map` line shows where
    /// (see `docs/TRACES.md`). Their sum is exact.
    pub const GUESSED_LENGTHS: Self = Self(2);
    /// The trace has no physical address; the segments are fresh frames.
    pub const FRESH_FRAMES: Self = Self(4);
    /// At least one segment lay above 64 GiB and was renamed.
    pub const RENAMED: Self = Self(8);
    /// The key was live: this map replaces the old mapping. An [`OpKind::Unmap`] of the old mapping
    /// directly precedes this operation.
    pub const REPLACES: Self = Self(16);
    /// The remainder of an [`MapClass::IommuOnly`] mapping after an unmap of part of its range.
    pub const REMAINDER: Self = Self(32);

    /// Returns the union of both sets.
    #[inline]
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns true if all flags of `other` are set.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the raw byte, for storage.
    #[inline]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Builds the set from its raw byte; `None` if the byte has an unknown flag.
    #[inline]
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if bits & !63 == 0 {
            Some(Self(bits))
        } else {
            None
        }
    }
}

impl fmt::Debug for MapFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Self::TRUNCATED, "truncated"),
            (Self::GUESSED_LENGTHS, "guessed-lengths"),
            (Self::FRESH_FRAMES, "fresh-frames"),
            (Self::RENAMED, "renamed"),
            (Self::REPLACES, "replaces"),
            (Self::REMAINDER, "remainder"),
        ];
        let mut set = f.debug_set();
        for (flag, name) in names {
            if self.contains(flag) {
                set.entry(&format_args!("{name}"));
            }
        }
        set.finish()
    }
}

/// Segments of a map operation: a slice of [`Chunk::segments`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SegmentSpan {
    /// Index of the first segment.
    pub first: u32,
    /// Number of segments; never 0.
    pub count: u32,
}

/// The effect of an operation on a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Creates a mapping.
    Map {
        /// Identifier of the mapping until its unmap.
        id: MappingId,
        /// Direction as recorded; bidirectional for [`MapClass::IommuOnly`], whose lines have no
        /// direction.
        direction: Direction,
        /// The DMA API call that created it.
        class: MapClass,
        /// Properties of the mapping.
        flags: MapFlags,
        /// The buffer, in order. It has one segment, except for a scatterlist, a coherent buffer of
        /// several pieces or, rarely, a buffer that renaming split.
        segments: SegmentSpan,
    },
    /// Removes the mapping `id`.
    Unmap {
        /// Identifier from the map.
        id: MappingId,
    },
}

/// One operation of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Op {
    /// Time on the clock of the trace; never earlier than the previous operation.
    pub time: Nanos,
    /// The device whose DMA mapping changes.
    pub device: DeviceIndex,
    /// The CPU that printed the event.
    pub cpu: u16,
    /// Number of trace lines that this operation represents, `iommu:*` lines included. 0 if the
    /// replay rules generated it (the unmap of a replaced mapping).
    pub lines: u16,
    /// Effect of the operation: a map or an unmap.
    pub kind: OpKind,
}

/// A line that a person or a script wrote into the trace (`tracing_mark_write`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// Index in [`Chunk::ops`] of the operation that follows the mark.
    pub before_op: u32,
    /// Time on the clock of the trace.
    pub time: Nanos,
    /// The text, truncated to [`MARK_BYTES`](crate::MARK_BYTES) bytes. Invalid UTF-8 is replaced,
    /// and [`printable`](crate::printable) escapes control characters.
    pub text: String,
}

/// A run of operations. Callers reuse the chunk, so a replay does not allocate per chunk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunk {
    /// The operations, in trace order.
    pub ops: Vec<Op>,
    /// The segments that the maps of this chunk refer to.
    pub segments: Vec<PhysRange>,
    /// Marks between the operations.
    pub marks: Vec<Mark>,
    /// With [`Addresses::Keep`](crate::Addresses::Keep), the recorded addresses, in order of their
    /// lines. This is the kernel's order of allocations and frees on each CPU, unlike the order of
    /// `ops`, which follows the `dma:*` lines.
    pub addresses: Vec<AddressEvent>,
    /// With [`PageEvents::Keep`](crate::PageEvents::Keep), the events of the page allocator.
    pub page_events: Vec<PageOp>,
    /// With [`PageEvents::Keep`](crate::PageEvents::Keep), one entry for each of `ops`.
    pub positions: Vec<Position>,
}

/// Position of a line in the trace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Position {
    /// Number of the line, from 1.
    pub line: u64,
    /// Time as printed. Unlike [`Op::time`], it can be earlier than that of the previous line.
    pub time: Nanos,
}

/// An event of the page allocator between the operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageOp {
    /// Index in [`Chunk::ops`] of the operation that follows.
    pub before_op: u32,
    /// Position of its line.
    pub position: Position,
    /// PID of the task.
    pub pid: u32,
    /// The pages, and the task that allocated or freed them.
    pub event: PageEvent,
}

impl Chunk {
    /// Approximate number of operations that [`Operations`](crate::Operations) puts into a chunk.
    pub const OPS: usize = 16 * 1024;
    /// Approximate maximum number of segments in a chunk.
    pub const SEGMENTS: usize = 64 * 1024;
    /// Approximate maximum number of marks in a chunk: 4 MiB of text.
    pub const MARKS: usize = 4 * 1024;

    /// Returns true if the chunk is as full as a reader makes it.
    pub(crate) fn is_full(&self) -> bool {
        self.ops.len() >= Self::OPS
            || self.segments.len() >= Self::SEGMENTS
            || self.marks.len() >= Self::MARKS
            || self.addresses.len() >= Self::OPS
            || self.page_events.len() >= Self::OPS
    }

    /// Returns the buffer of a map in this chunk; empty if the span is out of range.
    #[inline]
    pub fn segments_of(&self, span: SegmentSpan) -> &[PhysRange] {
        let first = span.first as usize;
        self.segments
            .get(first..first.saturating_add(span.count as usize))
            .unwrap_or(&[])
    }

    /// Removes all contents and keeps the allocated memory.
    pub fn clear(&mut self) {
        self.ops.clear();
        self.segments.clear();
        self.marks.clear();
        self.addresses.clear();
        self.page_events.clear();
        self.positions.clear();
    }
}
