//! The operations of a trace as Arrow batches, one for each chunk that is read.

use std::mem;
use std::sync::Arc;

use arrow_array::builder::{
    BooleanBuilder, StringBuilder, UInt8Builder, UInt16Builder, UInt32Builder, UInt64Builder,
};
use arrow_array::{ArrayRef, ListArray, RecordBatch, RecordBatchReader, StructArray, UInt64Array};
use arrow_buffer::OffsetBuffer;
use arrow_schema::{ArrowError, DataType, Field, Fields, Schema, SchemaRef};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use ringfence_trace::{
    Chunk, DeviceIndex, Devices, FlowBurst, FlowBursts, MapClass, MapFlags, Op, OpKind, Operations,
    TraceError, TraceOptions, TraceSource,
};
use ringfence_types::Direction;

use crate::error::{Failure, text};
use crate::signals::Signals;
use crate::source::Source;

/// A table of a trace.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TraceTable {
    /// One row for each map, unmap and mark, with the columns of a Parquet file of operations.
    /// `device` is the name.
    Ops,
    /// One row for each mapping, in the order of the unmaps; mappings without an unmap follow.
    Mappings,
    /// One row for each burst of unmaps, in the order of their ends.
    Bursts,
}

impl TraceTable {
    /// Returns the columns.
    pub(crate) fn schema(self) -> SchemaRef {
        use DataType::{Boolean, UInt8, UInt16, UInt32, UInt64, Utf8};
        let of = |name: &str, data_type| Field::new(name, data_type, false);
        let maybe = |name: &str, data_type| Field::new(name, data_type, true);
        let fields = match self {
            Self::Ops => vec![
                of("time_ns", UInt64),
                of("event", Utf8),
                maybe("device", Utf8),
                maybe("cpu", UInt16),
                maybe("lines", UInt16),
                maybe("mapping", UInt32),
                maybe("direction", Utf8),
                maybe("class", Utf8),
                maybe("flags", UInt8),
                of("segments", DataType::List(segment_field())),
                maybe("text", Utf8),
            ],
            Self::Mappings => vec![
                of("device", Utf8),
                of("direction", Utf8),
                of("class", Utf8),
                of("flags", UInt8),
                of("map_ns", UInt64),
                of("map_cpu", UInt16),
                maybe("unmap_ns", UInt64),
                maybe("unmap_cpu", UInt16),
                of("replaced", Boolean),
                of("bytes", UInt64),
                of("segments", UInt32),
            ],
            Self::Bursts => vec![
                of("device", Utf8),
                of("direction", Utf8),
                of("iommu_only", Boolean),
                of("cpu", UInt16),
                of("first_ns", UInt64),
                of("last_ns", UInt64),
                of("unmaps", UInt64),
            ],
        };
        Arc::new(Schema::new(fields))
    }

    /// Opens the trace for one pass, which `signals` may end.
    pub(crate) fn read(self, source: &Source, signals: Arc<Signals>) -> Result<Reader, Failure> {
        let mut options = TraceOptions::default();
        options.interrupt = signals.interrupt();
        Ok(Reader {
            operations: source.operations(options)?,
            signals,
            schema: self.schema(),
            rows: match self {
                Self::Ops => Rows::Ops,
                Self::Mappings => Rows::Mappings(Mappings::default()),
                Self::Bursts => Rows::Bursts(FlowBursts::default()),
            },
            chunk: Chunk::default(),
            stage: Stage::Reading,
            error: None,
        })
    }
}

fn segment_fields() -> Fields {
    let field = |name| Field::new(name, DataType::UInt64, false);
    Fields::from(vec![field("phys_addr"), field("bytes")])
}

fn segment_field() -> Arc<Field> {
    let element = DataType::Struct(segment_fields());
    Arc::new(Field::new("element", element, false))
}

/// One pass over a trace. It holds one chunk, and what the table keeps of live mappings.
pub(crate) struct Reader {
    operations: Operations<TraceSource>,
    signals: Arc<Signals>,
    schema: SchemaRef,
    rows: Rows,
    chunk: Chunk,
    stage: Stage,
    /// The error that ended the read.
    error: Option<TraceError>,
}

enum Rows {
    Ops,
    Mappings(Mappings),
    Bursts(FlowBursts),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Reading,
    /// The trace is read; mappings from this index on have no row yet.
    Remaining(usize),
    Ended,
}

impl RecordBatchReader for Reader {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }
}

impl Iterator for Reader {
    type Item = Result<RecordBatch, ArrowError>;

    /// Returns the next batch with rows.
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.step() {
                Ok(Some(arrays)) => {
                    if arrays.first().is_some_and(|array| !array.is_empty()) {
                        return Some(RecordBatch::try_new(self.schema(), arrays));
                    }
                }
                Ok(None) => return None,
                Err(error) => {
                    self.stage = Stage::Ended;
                    return Some(Err(ArrowError::ExternalError(self.message(error).into())));
                }
            }
        }
    }
}

impl Reader {
    /// Returns the columns of the next chunk, which may have no row; `None` at the end.
    fn step(&mut self) -> Result<Option<Vec<ArrayRef>>, TraceError> {
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        match self.stage {
            Stage::Reading => {
                match self.operations.next_chunk(&mut self.chunk) {
                    Ok(true) => {}
                    Ok(false) => {
                        self.stage = Stage::Remaining(0);
                        return Ok(Some(Vec::new()));
                    }
                    // The operations before the error come first.
                    Err(error) => {
                        self.stage = Stage::Ended;
                        self.error = Some(error);
                    }
                }
                let devices = self.operations.devices();
                let chunk = &self.chunk;
                Ok(Some(match &mut self.rows {
                    Rows::Ops => ops(chunk, devices),
                    Rows::Mappings(mappings) => mappings.rows(chunk, devices),
                    Rows::Bursts(bursts) => {
                        let ended = chunk.ops.iter().filter_map(|op| bursts.add(op));
                        burst_rows(ended, devices)
                    }
                }))
            }
            Stage::Remaining(from) => {
                let devices = self.operations.devices();
                Ok(Some(match &mut self.rows {
                    Rows::Mappings(mappings) if from < mappings.live.len() => {
                        self.stage = Stage::Remaining(from.saturating_add(Chunk::OPS));
                        mappings.remaining(from, devices)
                    }
                    Rows::Bursts(bursts) => {
                        self.stage = Stage::Ended;
                        burst_rows(mem::take(bursts).finish().into_iter(), devices)
                    }
                    Rows::Ops | Rows::Mappings(_) => {
                        self.stage = Stage::Ended;
                        return Ok(None);
                    }
                }))
            }
            Stage::Ended => Ok(None),
        }
    }

    /// Returns the message of an error: the interface has room for a text only. It names the file
    /// and the line. Ctrl-C, which ends the read, raises its exception after the consumer's own.
    fn message(&self, error: TraceError) -> String {
        match self.signals.take() {
            Some(raised) => Python::attach(|py| {
                // The text comes first: it runs code of the interpreter, which would raise the
                // pending exception here.
                let text = raised.to_string();
                if raised.is_instance_of::<PyKeyboardInterrupt>(py) {
                    interrupt_again(py);
                }
                text
            }),
            None => text(&error),
        }
    }
}

/// Makes the signal of Ctrl-C pending again. An error of this call loses only the exception: the
/// consumer's own error stays.
fn interrupt_again(py: Python<'_>) {
    let _ = py
        .import("_thread")
        .and_then(|module| module.call_method0("interrupt_main"));
}

fn name(devices: &Devices, device: DeviceIndex) -> &str {
    devices.get(device).map_or("", |device| &device.name)
}

/// Returns the columns of [`TraceTable::Ops`].
fn ops(chunk: &Chunk, devices: &Devices) -> Vec<ArrayRef> {
    let mut times = UInt64Builder::new();
    let mut events = StringBuilder::new();
    let mut names = StringBuilder::new();
    let (mut cpus, mut lines) = (UInt16Builder::new(), UInt16Builder::new());
    let mut mappings = UInt32Builder::new();
    let (mut directions, mut classes) = (StringBuilder::new(), StringBuilder::new());
    let mut all_flags = UInt8Builder::new();
    let (mut starts, mut sizes, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
    let mut texts = StringBuilder::new();
    let mut marks = chunk.marks.iter().peekable();
    for index in 0..=chunk.ops.len() {
        while let Some(mark) = marks.next_if(|mark| mark.before_op as usize <= index) {
            times.append_value(mark.time.0);
            events.append_value("mark");
            names.append_null();
            cpus.append_null();
            lines.append_null();
            mappings.append_null();
            directions.append_null();
            classes.append_null();
            all_flags.append_null();
            lengths.push(0);
            texts.append_value(&mark.text);
        }
        let Some(op) = chunk.ops.get(index) else {
            break;
        };
        times.append_value(op.time.0);
        names.append_value(name(devices, op.device));
        cpus.append_value(op.cpu);
        lines.append_value(op.lines);
        texts.append_null();
        match op.kind {
            OpKind::Map {
                id,
                direction,
                class,
                flags,
                segments,
            } => {
                events.append_value("map");
                mappings.append_value(id.0);
                directions.append_value(direction.to_string());
                classes.append_value(class.name());
                all_flags.append_value(flags.bits());
                let segments = chunk.segments_of(segments);
                starts.extend(segments.iter().map(|segment| segment.start().get()));
                sizes.extend(segments.iter().map(|segment| segment.bytes()));
                lengths.push(segments.len());
            }
            OpKind::Unmap { id } => {
                events.append_value("unmap");
                mappings.append_value(id.0);
                directions.append_null();
                classes.append_null();
                all_flags.append_null();
                lengths.push(0);
            }
        }
    }
    let segments: [ArrayRef; 2] = [
        Arc::new(UInt64Array::from(starts)),
        Arc::new(UInt64Array::from(sizes)),
    ];
    let segments = StructArray::new(segment_fields(), segments.to_vec(), None);
    let offsets = OffsetBuffer::from_lengths(lengths);
    vec![
        Arc::new(times.finish()),
        Arc::new(events.finish()),
        Arc::new(names.finish()),
        Arc::new(cpus.finish()),
        Arc::new(lines.finish()),
        Arc::new(mappings.finish()),
        Arc::new(directions.finish()),
        Arc::new(classes.finish()),
        Arc::new(all_flags.finish()),
        Arc::new(ListArray::new(
            segment_field(),
            offsets,
            Arc::new(segments),
            None,
        )),
        Arc::new(texts.finish()),
    ]
}

/// A mapping from its map on.
#[derive(Debug, Clone, Copy)]
struct Mapping {
    device: DeviceIndex,
    direction: Direction,
    class: MapClass,
    flags: MapFlags,
    time_ns: u64,
    cpu: u16,
    bytes: u64,
    segments: u32,
}

/// The live mappings, by identifier.
#[derive(Debug, Default)]
struct Mappings {
    live: Vec<Option<Mapping>>,
}

impl Mappings {
    /// Returns the rows of the mappings that end in `chunk`.
    fn rows(&mut self, chunk: &Chunk, devices: &Devices) -> Vec<ArrayRef> {
        let mut rows = MappingRows::default();
        for op in &chunk.ops {
            match op.kind {
                OpKind::Map {
                    id,
                    direction,
                    class,
                    flags,
                    segments,
                } => {
                    if self.live.len() <= id.index() {
                        self.live.resize(id.index() + 1, None);
                    }
                    let buffer = chunk.segments_of(segments);
                    let bytes = buffer.iter().map(|segment| segment.bytes());
                    self.live[id.index()] = Some(Mapping {
                        device: op.device,
                        direction,
                        class,
                        flags,
                        time_ns: op.time.0,
                        cpu: op.cpu,
                        bytes: bytes.fold(0, u64::saturating_add),
                        segments: segments.count,
                    });
                }
                OpKind::Unmap { id } => {
                    let ended = self.live.get_mut(id.index()).and_then(Option::take);
                    if let Some(mapping) = ended {
                        rows.add(&mapping, Some(op), devices);
                    }
                }
            }
        }
        rows.finish()
    }

    /// Returns the rows of the live mappings among the [`Chunk::OPS`] identifiers from `from` on.
    fn remaining(&self, from: usize, devices: &Devices) -> Vec<ArrayRef> {
        let mut rows = MappingRows::default();
        let live = self.live.iter().skip(from).take(Chunk::OPS);
        for mapping in live.flatten() {
            rows.add(mapping, None, devices);
        }
        rows.finish()
    }
}

/// The columns of [`TraceTable::Mappings`].
#[derive(Default)]
struct MappingRows {
    devices: StringBuilder,
    directions: StringBuilder,
    classes: StringBuilder,
    flags: UInt8Builder,
    map_times: UInt64Builder,
    map_cpus: UInt16Builder,
    unmap_times: UInt64Builder,
    unmap_cpus: UInt16Builder,
    replaced: BooleanBuilder,
    bytes: UInt64Builder,
    segments: UInt32Builder,
}

impl MappingRows {
    fn add(&mut self, mapping: &Mapping, unmap: Option<&Op>, devices: &Devices) {
        self.devices.append_value(name(devices, mapping.device));
        self.directions.append_value(mapping.direction.to_string());
        self.classes.append_value(mapping.class.name());
        self.flags.append_value(mapping.flags.bits());
        self.map_times.append_value(mapping.time_ns);
        self.map_cpus.append_value(mapping.cpu);
        self.unmap_times.append_option(unmap.map(|op| op.time.0));
        self.unmap_cpus.append_option(unmap.map(|op| op.cpu));
        // The reader unmaps a replaced mapping itself: no line of the trace shows this unmap.
        self.replaced
            .append_value(unmap.is_some_and(|op| op.lines == 0));
        self.bytes.append_value(mapping.bytes);
        self.segments.append_value(mapping.segments);
    }

    fn finish(mut self) -> Vec<ArrayRef> {
        vec![
            Arc::new(self.devices.finish()),
            Arc::new(self.directions.finish()),
            Arc::new(self.classes.finish()),
            Arc::new(self.flags.finish()),
            Arc::new(self.map_times.finish()),
            Arc::new(self.map_cpus.finish()),
            Arc::new(self.unmap_times.finish()),
            Arc::new(self.unmap_cpus.finish()),
            Arc::new(self.replaced.finish()),
            Arc::new(self.bytes.finish()),
            Arc::new(self.segments.finish()),
        ]
    }
}

/// Returns the columns of [`TraceTable::Bursts`].
fn burst_rows(bursts: impl Iterator<Item = FlowBurst>, devices: &Devices) -> Vec<ArrayRef> {
    let (mut names, mut directions) = (StringBuilder::new(), StringBuilder::new());
    let mut iommu_only = BooleanBuilder::new();
    let mut cpus = UInt16Builder::new();
    let (mut first, mut last) = (UInt64Builder::new(), UInt64Builder::new());
    let mut unmaps = UInt64Builder::new();
    for flow in bursts {
        names.append_value(name(devices, flow.device));
        directions.append_value(flow.direction.to_string());
        iommu_only.append_value(flow.iommu_only);
        cpus.append_value(flow.burst.cpu);
        first.append_value(flow.burst.first_ns);
        last.append_value(flow.burst.last_ns);
        unmaps.append_value(flow.burst.unmaps);
    }
    vec![
        Arc::new(names.finish()),
        Arc::new(directions.finish()),
        Arc::new(iommu_only.finish()),
        Arc::new(cpus.finish()),
        Arc::new(first.finish()),
        Arc::new(last.finish()),
        Arc::new(unmaps.finish()),
    ]
}
