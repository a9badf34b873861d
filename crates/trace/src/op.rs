//! What a trace says, resolved: the operations a replay performs.

use core::fmt;

use ringfence_types::{Direction, Nanos, PhysRange};

/// Row of a device in [`Devices`](crate::Devices): dense, in order of first appearance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DeviceIndex(pub u16);

impl DeviceIndex {
    /// As an index into a table with a row per device.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Names a mapping from its [`OpKind::Map`] to its [`OpKind::Unmap`].
///
/// Identifiers are dense and small so that a replay can index an array with them: a map takes the
/// identifier freed last, or the next unused one if none is free. So an identifier is given out
/// again only after the unmap that ended its former use was emitted, and the highest one ever seen
/// is the largest number of mappings alive at once, less one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct MappingId(pub u32);

impl MappingId {
    /// As an index into a table with a slot per mapping.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Which call of the DMA API made a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MapClass {
    /// `dma_map_single`, `dma_map_page`, `dma_map_resource`, `dma_map_phys`.
    Single,
    /// `dma_map_sg`.
    Sg,
    /// `dma_alloc_coherent` and its relatives.
    Coherent,
    /// No `dma:*` event, only `iommu:map` lines: the caller used an interface without tracepoints.
    IommuOnly,
}

impl MapClass {
    /// All classes.
    pub const ALL: [Self; 4] = [Self::Single, Self::Sg, Self::Coherent, Self::IommuOnly];
}

/// What is special about a mapping. A set of flags in one byte.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct MapFlags(u8);

impl MapFlags {
    /// Nothing special.
    pub const NONE: Self = Self(0);
    /// The kernel cut the printed scatterlist at 128 entries. Segments past those come from
    /// `iommu:map` lines where there are any; else they are missing.
    pub const TRUNCATED: Self = Self(1);
    /// Segment lengths are a guess: the list was merged and no `iommu:map` line says where (see
    /// `docs/TRACES.md`). Their sum is exact.
    pub const GUESSED_LENGTHS: Self = Self(2);
    /// The trace holds no physical address: the segments are fresh frames.
    pub const FRESH_FRAMES: Self = Self(4);
    /// At least one segment lay above 64 GiB and was renamed.
    pub const RENAMED: Self = Self(8);
    /// The key was live: this map replaces it, and an [`OpKind::Unmap`] of the old mapping stands
    /// just before.
    pub const REPLACES: Self = Self(16);
    /// What an unmap of a part of a range left over of an [`MapClass::IommuOnly`] mapping.
    pub const REMAINDER: Self = Self(32);

    /// Both sets.
    #[inline]
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all flags of `other` are set.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The raw byte, for storage.
    #[inline]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// From the raw byte; `None` if it holds an unknown flag.
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
    /// How many; never 0.
    pub count: u32,
}

/// What happens to a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// A mapping begins.
    Map {
        /// Its name until the unmap.
        id: MappingId,
        /// As recorded; bidirectional for [`MapClass::IommuOnly`], whose lines do not say.
        direction: Direction,
        /// The call that made it.
        class: MapClass,
        /// What is special about it.
        flags: MapFlags,
        /// Its buffer, in order: one segment unless a scatterlist, a coherent buffer of several
        /// pieces, or (rarely) a buffer that renaming tore.
        segments: SegmentSpan,
    },
    /// The mapping `id` ends.
    Unmap {
        /// The name its map gave.
        id: MappingId,
    },
}

/// One operation of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Op {
    /// When, on the trace's own clock; never earlier than the operation before it.
    pub time: Nanos,
    /// Whose DMA.
    pub device: DeviceIndex,
    /// The processor that printed the event.
    pub cpu: u16,
    /// How many lines of the trace this operation stands for, `iommu:*` lines included. 0 where the
    /// replay's rules and not a line made it (the unmap of a replaced mapping).
    pub lines: u16,
    /// What happens.
    pub kind: OpKind,
}

/// A line written into the trace by a person or a script (`tracing_mark_write`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// The mark stands before the operation with this index in [`Chunk::ops`].
    pub before_op: u32,
    /// When.
    pub time: Nanos,
    /// At most [`MARK_BYTES`](crate::MARK_BYTES) bytes of what was written; bytes that are no UTF-8
    /// are replaced, and [`printable`](crate::printable) escapes the rest.
    pub text: String,
}

/// A run of operations. Reused from call to call so that a replay allocates nothing per chunk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunk {
    /// In trace order.
    pub ops: Vec<Op>,
    /// The segments that the maps of this chunk refer to.
    pub segments: Vec<PhysRange>,
    /// Marks between the operations.
    pub marks: Vec<Mark>,
}

impl Chunk {
    /// How many operations [`Operations`](crate::Operations) puts into a chunk, about.
    pub const OPS: usize = 16 * 1024;
    /// About how many segments, at most.
    pub const SEGMENTS: usize = 64 * 1024;
    /// About how many marks, at most: 4 MiB of text.
    pub const MARKS: usize = 4 * 1024;

    /// Whether it holds as much as a reader puts into one.
    pub(crate) fn is_full(&self) -> bool {
        self.ops.len() >= Self::OPS
            || self.segments.len() >= Self::SEGMENTS
            || self.marks.len() >= Self::MARKS
    }

    /// The buffer of a map of this chunk; empty if the span is not of this chunk.
    #[inline]
    pub fn segments_of(&self, span: SegmentSpan) -> &[PhysRange] {
        let first = span.first as usize;
        self.segments
            .get(first..first.saturating_add(span.count as usize))
            .unwrap_or(&[])
    }

    /// Forgets everything, keeps the memory.
    pub fn clear(&mut self) {
        self.ops.clear();
        self.segments.clear();
        self.marks.clear();
    }
}
