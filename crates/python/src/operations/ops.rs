//! The table of operations and marks, [`TraceTable::Ops`](super::TraceTable::Ops).

use std::sync::Arc;

use arrow_array::builder::{
    StringBuilder, UInt8Builder, UInt16Builder, UInt32Builder, UInt64Builder,
};
use arrow_array::{ArrayRef, ListArray, StructArray, UInt64Array};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{DataType, Field, Fields};
use ringfence_trace::{Chunk, Devices, Mark, Op, OpKind};
use ringfence_types::PhysRange;

use super::{device_name, nullable, required};

/// Returns the schema of the columns.
pub(super) fn fields() -> Vec<Field> {
    use DataType::{UInt8, UInt16, UInt32, UInt64, Utf8};
    vec![
        required("time_ns", UInt64),
        required("event", Utf8),
        nullable("device", Utf8),
        nullable("cpu", UInt16),
        nullable("lines", UInt16),
        nullable("mapping", UInt32),
        nullable("direction", Utf8),
        nullable("class", Utf8),
        nullable("flags", UInt8),
        required("segments", DataType::List(segment_field())),
        nullable("text", Utf8),
    ]
}

fn segment_field() -> Arc<Field> {
    Arc::new(required("element", DataType::Struct(segment_fields())))
}

fn segment_fields() -> Fields {
    Fields::from(vec![
        required("phys_addr", DataType::UInt64),
        required("bytes", DataType::UInt64),
    ])
}

/// Returns the columns of the operations and marks of `chunk`.
pub(super) fn rows(chunk: &Chunk, devices: &Devices) -> Vec<ArrayRef> {
    let mut rows = OpRows::default();
    let mut marks = chunk.marks.iter().peekable();
    for index in 0..=chunk.ops.len() {
        while let Some(mark) = marks.next_if(|mark| mark.before_op as usize <= index) {
            rows.mark(mark);
        }
        if let Some(op) = chunk.ops.get(index) {
            rows.op(op, chunk, devices);
        }
    }
    rows.finish()
}

/// The columns of the table.
#[derive(Default)]
struct OpRows {
    times: UInt64Builder,
    events: StringBuilder,
    devices: StringBuilder,
    cpus: UInt16Builder,
    lines: UInt16Builder,
    mappings: UInt32Builder,
    directions: StringBuilder,
    classes: StringBuilder,
    flags: UInt8Builder,
    segments: SegmentLists,
    texts: StringBuilder,
}

impl OpRows {
    fn mark(&mut self, mark: &Mark) {
        self.times.append_value(mark.time.0);
        self.events.append_value("mark");
        self.devices.append_null();
        self.cpus.append_null();
        self.lines.append_null();
        self.mappings.append_null();
        self.no_buffer();
        self.texts.append_value(&mark.text);
    }

    fn op(&mut self, op: &Op, chunk: &Chunk, devices: &Devices) {
        self.times.append_value(op.time.0);
        self.devices.append_value(device_name(devices, op.device));
        self.cpus.append_value(op.cpu);
        self.lines.append_value(op.lines);
        match op.kind {
            OpKind::Map {
                id,
                direction,
                class,
                flags,
                segments,
            } => {
                self.events.append_value("map");
                self.mappings.append_value(id.0);
                self.directions.append_value(direction.to_string());
                self.classes.append_value(class.name());
                self.flags.append_value(flags.bits());
                self.segments.add(chunk.segments_of(segments));
            }
            OpKind::Unmap { id } => {
                self.events.append_value("unmap");
                self.mappings.append_value(id.0);
                self.no_buffer();
            }
        }
        self.texts.append_null();
    }

    /// Adds the columns of the buffer to a row that is not a map.
    fn no_buffer(&mut self) {
        self.directions.append_null();
        self.classes.append_null();
        self.flags.append_null();
        self.segments.add(&[]);
    }

    fn finish(mut self) -> Vec<ArrayRef> {
        vec![
            Arc::new(self.times.finish()),
            Arc::new(self.events.finish()),
            Arc::new(self.devices.finish()),
            Arc::new(self.cpus.finish()),
            Arc::new(self.lines.finish()),
            Arc::new(self.mappings.finish()),
            Arc::new(self.directions.finish()),
            Arc::new(self.classes.finish()),
            Arc::new(self.flags.finish()),
            Arc::new(self.segments.finish()),
            Arc::new(self.texts.finish()),
        ]
    }
}

/// The column of segments: one list for each row, empty for a row that is not a map.
#[derive(Default)]
struct SegmentLists {
    starts: Vec<u64>,
    sizes: Vec<u64>,
    /// Number of segments of each row.
    lengths: Vec<usize>,
}

impl SegmentLists {
    fn add(&mut self, segments: &[PhysRange]) {
        let starts = segments.iter().map(|segment| segment.start().get());
        self.starts.extend(starts);
        let sizes = segments.iter().map(|segment| segment.bytes());
        self.sizes.extend(sizes);
        self.lengths.push(segments.len());
    }

    fn finish(self) -> ListArray {
        let columns: [ArrayRef; 2] = [
            Arc::new(UInt64Array::from(self.starts)),
            Arc::new(UInt64Array::from(self.sizes)),
        ];
        let segments = StructArray::new(segment_fields(), columns.to_vec(), None);
        let offsets = OffsetBuffer::from_lengths(self.lengths);
        ListArray::new(segment_field(), offsets, Arc::new(segments), None)
    }
}
