//! The table of mappings, [`TraceTable::Mappings`](super::TraceTable::Mappings).

use std::sync::Arc;

use arrow_array::ArrayRef;
use arrow_array::builder::{
    BooleanBuilder, StringBuilder, UInt8Builder, UInt16Builder, UInt32Builder, UInt64Builder,
};
use arrow_schema::{DataType, Field};
use ringfence_trace::{Chunk, DeviceIndex, Devices, MapClass, MapFlags, Op, OpKind};
use ringfence_types::Direction;

use super::{device_name, nullable, required};

/// Returns the schema of the columns.
pub(super) fn fields() -> Vec<Field> {
    use DataType::{Boolean, UInt8, UInt16, UInt32, UInt64, Utf8};
    vec![
        required("device", Utf8),
        required("direction", Utf8),
        required("class", Utf8),
        required("flags", UInt8),
        required("map_ns", UInt64),
        required("map_cpu", UInt16),
        nullable("unmap_ns", UInt64),
        nullable("unmap_cpu", UInt16),
        required("replaced", Boolean),
        required("bytes", UInt64),
        required("segments", UInt32),
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
pub(super) struct Mappings {
    live: Vec<Option<Mapping>>,
}

impl Mappings {
    /// Returns the rows of the mappings that end in `chunk`.
    pub(super) fn rows(&mut self, chunk: &Chunk, devices: &Devices) -> Vec<ArrayRef> {
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

    /// Returns the number of identifiers, those of ended mappings included.
    pub(super) fn identifiers(&self) -> usize {
        self.live.len()
    }

    /// Returns the rows of the live mappings among the [`Chunk::OPS`] identifiers from `from` on.
    pub(super) fn remaining(&self, from: usize, devices: &Devices) -> Vec<ArrayRef> {
        let mut rows = MappingRows::default();
        let live = self.live.iter().skip(from).take(Chunk::OPS);
        for mapping in live.flatten() {
            rows.add(mapping, None, devices);
        }
        rows.finish()
    }
}

/// The columns of the table.
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
        let device = device_name(devices, mapping.device);
        self.devices.append_value(device);
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
