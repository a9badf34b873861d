//! Stores the operations of a trace in memory by columns, so that many replays parse the text once.

use std::io::Read;

use ringfence_types::{Direction, Nanos, PhysAddr, PhysRange};

use crate::devices::{Devices, TraceDevice};
use crate::error::TraceError;
use crate::op::{Chunk, DeviceIndex, MapClass, MapFlags, MappingId, Mark, Op, OpKind, SegmentSpan};
use crate::operations::Operations;
use crate::summary::Summary;

/// Code of an unmap. A kind takes one byte: 0 for an unmap, else 1 + 4 x direction + class.
const UNMAP: u8 = 0;

/// All operations of a trace. It uses about 19 bytes an operation and 12 a segment; a [`Chunk`]
/// uses 32 and 16.
#[derive(Debug, Clone, Default)]
pub struct OpStore {
    /// Nanoseconds since the previous operation; `u32::MAX` refers to `long_gaps`.
    gaps: Vec<u32>,
    /// Gaps of 4 s and more, in order.
    long_gaps: Vec<u64>,
    devices: Vec<u16>,
    cpus: Vec<u16>,
    lines: Vec<u16>,
    kinds: Vec<u8>,
    flags: Vec<u8>,
    ids: Vec<u32>,
    /// Segments per map, in order of the maps; `u16::MAX` refers to `long_counts`.
    counts: Vec<u16>,
    /// Counts that do not fit into `counts`, in order.
    long_counts: Vec<u32>,
    starts: Vec<u64>,
    /// Bytes minus one; `u32::MAX` refers to `long_sizes`.
    sizes: Vec<u32>,
    long_sizes: Vec<u64>,
    /// Marks, each with the index in the whole trace of the operation that follows it.
    marks: Vec<(u64, Mark)>,
    rows: Devices,
    summary: Summary,
}

impl OpStore {
    /// Reads a trace to its end.
    ///
    /// # Errors
    /// As [`Operations::next_chunk`].
    pub fn read<R: Read>(operations: &mut Operations<R>) -> Result<Self, TraceError> {
        let mut store = Self::default();
        let mut chunk = Chunk::default();
        let mut time = 0;
        while operations.next_chunk(&mut chunk)? {
            let before = store.len() as u64;
            for op in &chunk.ops {
                store.push(op, &chunk, &mut time);
            }
            for mark in chunk.marks.drain(..) {
                store.marks.push((before + u64::from(mark.before_op), mark));
            }
        }
        store.rows = operations.devices().clone();
        store.summary = operations.summary().clone();
        Ok(store)
    }

    /// Returns the number of operations.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Returns true if the store has no operations.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// Returns the devices of the trace.
    pub fn devices(&self) -> &Devices {
        &self.rows
    }

    /// Returns the device in row `index`.
    pub fn device(&self, index: DeviceIndex) -> Option<&TraceDevice> {
        self.rows.get(index)
    }

    /// Returns the counts over the trace.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Returns the size of the columns in bytes.
    pub fn bytes(&self) -> usize {
        self.gaps.len() * 4
            + (self.long_gaps.len() + self.starts.len() + self.long_sizes.len()) * 8
            + (self.devices.len() + self.cpus.len() + self.lines.len() + self.counts.len()) * 2
            + (self.kinds.len() + self.flags.len())
            + (self.ids.len() + self.long_counts.len() + self.sizes.len()) * 4
    }

    /// Starts a pass over the operations from the beginning.
    pub fn replay(&self) -> StoreReplay<'_> {
        StoreReplay {
            store: self,
            next: 0,
            time: 0,
            maps: 0,
            segments: 0,
            long_gaps: 0,
            long_counts: 0,
            long_sizes: 0,
            marks: 0,
        }
    }

    fn push(&mut self, op: &Op, chunk: &Chunk, time: &mut u64) {
        let gap = op.time.0.saturating_sub(*time);
        *time = op.time.0;
        match u32::try_from(gap) {
            Ok(gap) if gap != u32::MAX => self.gaps.push(gap),
            _ => {
                self.gaps.push(u32::MAX);
                self.long_gaps.push(gap);
            }
        }
        self.devices.push(op.device.0);
        self.cpus.push(op.cpu);
        self.lines.push(op.lines);
        match op.kind {
            OpKind::Unmap { id } => {
                self.kinds.push(UNMAP);
                self.flags.push(0);
                self.ids.push(id.0);
            }
            OpKind::Map {
                id,
                direction,
                class,
                flags,
                segments,
            } => {
                self.kinds.push(1 + 4 * direction as u8 + class as u8);
                self.flags.push(flags.bits());
                self.ids.push(id.0);
                let segments = chunk.segments_of(segments);
                match u16::try_from(segments.len()) {
                    Ok(count) if count != u16::MAX => self.counts.push(count),
                    _ => {
                        self.counts.push(u16::MAX);
                        self.long_counts.push(segments.len() as u32);
                    }
                }
                for segment in segments {
                    self.starts.push(segment.start().get());
                    let extra = segment.last().get() - segment.start().get();
                    match u32::try_from(extra) {
                        Ok(extra) if extra != u32::MAX => self.sizes.push(extra),
                        _ => {
                            self.sizes.push(u32::MAX);
                            self.long_sizes.push(extra);
                        }
                    }
                }
            }
        }
    }
}

/// A pass over an [`OpStore`].
#[derive(Debug, Clone)]
pub struct StoreReplay<'a> {
    store: &'a OpStore,
    next: usize,
    time: u64,
    maps: usize,
    segments: usize,
    long_gaps: usize,
    long_counts: usize,
    long_sizes: usize,
    marks: usize,
}

impl StoreReplay<'_> {
    /// Fills `chunk` with the next [`Chunk::OPS`] operations. Returns false at the end, with
    /// `chunk` empty.
    pub fn next_chunk(&mut self, chunk: &mut Chunk) -> bool {
        chunk.clear();
        let first = self.next as u64;
        while chunk.ops.len() < Chunk::OPS {
            let Some(op) = self.op(chunk) else { break };
            chunk.ops.push(op);
        }
        while let Some((at, mark)) = self.store.marks.get(self.marks)
            && (*at < self.next as u64 || self.next == self.store.len())
        {
            self.marks += 1;
            chunk.marks.push(Mark {
                before_op: u32::try_from(at.saturating_sub(first)).unwrap_or(u32::MAX),
                ..mark.clone()
            });
        }
        !chunk.ops.is_empty() || !chunk.marks.is_empty()
    }

    fn op(&mut self, chunk: &mut Chunk) -> Option<Op> {
        let (store, index) = (self.store, self.next);
        let kind = *store.kinds.get(index)?;
        let gap = match *store.gaps.get(index)? {
            u32::MAX => next_value(&store.long_gaps, &mut self.long_gaps)?,
            gap => u64::from(gap),
        };
        let id = MappingId(*store.ids.get(index)?);
        let op_kind = match kind.checked_sub(1) {
            None => OpKind::Unmap { id },
            Some(both) => {
                let count = match next_value(&store.counts, &mut self.maps)? {
                    u16::MAX => next_value(&store.long_counts, &mut self.long_counts)?,
                    count => u32::from(count),
                };
                let before = u32::try_from(chunk.segments.len()).ok()?;
                for _ in 0..count {
                    let start = *store.starts.get(self.segments)?;
                    let extra = match next_value(&store.sizes, &mut self.segments)? {
                        u32::MAX => next_value(&store.long_sizes, &mut self.long_sizes)?,
                        extra => u64::from(extra),
                    };
                    let last = PhysAddr::new(start.checked_add(extra)?);
                    chunk
                        .segments
                        .push(PhysRange::inclusive(PhysAddr::new(start), last)?);
                }
                OpKind::Map {
                    id,
                    direction: *Direction::ALL.get(usize::from(both / 4))?,
                    class: *MapClass::ALL.get(usize::from(both % 4))?,
                    flags: MapFlags::from_bits(*store.flags.get(index)?)?,
                    segments: SegmentSpan {
                        first: before,
                        count,
                    },
                }
            }
        };
        self.next += 1;
        self.time += gap;
        Some(Op {
            time: Nanos(self.time),
            device: DeviceIndex(*store.devices.get(index)?),
            cpu: *store.cpus.get(index)?,
            lines: *store.lines.get(index)?,
            kind: op_kind,
        })
    }
}

fn next_value<T: Copy>(column: &[T], next: &mut usize) -> Option<T> {
    let value = *column.get(*next)?;
    *next += 1;
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SAMPLE, TraceOptions, TraceSource};

    /// Operations with their segments. The `first` of a span depends on where its chunk begins.
    type Plain = (Op, Vec<PhysRange>);

    fn plain(chunk: &Chunk, all: &mut Vec<Plain>) {
        for op in &chunk.ops {
            let mut op = *op;
            let mut segments = Vec::new();
            if let OpKind::Map { segments: span, .. } = &mut op.kind {
                segments = chunk.segments_of(*span).to_vec();
                span.first = 0;
            }
            all.push((op, segments));
        }
    }

    #[test]
    fn stored_operations_round_trip() {
        let open = |text: &'static [u8]| {
            let source = TraceSource::from_reader("s", text).unwrap();
            let mut options = TraceOptions::default();
            options.limits.mapping = 8 << 30;
            Operations::new("s", source, options)
        };
        // The sample, and a trace with a 5 s gap, a 5 GiB mapping and a mark at the end.
        let odd = b"t-1 [0] ..... 1.0: dma_map_phys: d dir=TO_DEVICE dma_addr=0 size=5368709120 \
            phys_addr=0 attrs=\n\
                    t-1 [0] ..... 6.5: dma_unmap_phys: d dir=TO_DEVICE dma_addr=0 size=5368709120 \
                    attrs=\n\
                    t-1 [0] ..... 7.0: tracing_mark_write: end\n";
        for text in [SAMPLE, odd] {
            let store = OpStore::read(&mut open(text)).unwrap();
            let (mut direct, mut stored) = (Vec::new(), Vec::new());
            let (mut direct_marks, mut stored_marks) = (Vec::new(), Vec::new());
            let mut chunk = Chunk::default();
            let mut operations = open(text);
            while operations.next_chunk(&mut chunk).unwrap() {
                let before = direct.len() as u32;
                plain(&chunk, &mut direct);
                direct_marks.extend(
                    chunk
                        .marks
                        .drain(..)
                        .map(|mark| (mark.before_op + before, mark.text)),
                );
            }
            let mut replay = store.replay();
            while replay.next_chunk(&mut chunk) {
                let before = stored.len() as u32;
                plain(&chunk, &mut stored);
                stored_marks.extend(
                    chunk
                        .marks
                        .drain(..)
                        .map(|mark| (mark.before_op + before, mark.text)),
                );
            }
            assert!(!direct.is_empty());
            assert_eq!(direct, stored);
            assert_eq!(direct_marks, stored_marks);
            assert_eq!(store.len(), stored.len());
            assert_eq!(store.summary(), operations.summary());
        }
    }
}
