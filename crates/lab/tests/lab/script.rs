//! Helpers for hand-made traces.

use ringfence_lab::Profile;
use ringfence_lab::compare::CompareOptions;
use ringfence_lab::compose::compose;
use ringfence_lab::mapping_cache::CycleParams;
use ringfence_lab::modes::Mode;
use ringfence_lab::plan::{Plan, Planner};
use ringfence_lab::ring::RingSizes;
use ringfence_trace::{
    Chunk, DeviceIndex, MapClass, MapFlags, MappingId, Op, OpKind, Operations, SegmentSpan,
    TraceOptions, TraceSource,
};
use ringfence_types::{Direction, Nanos, PhysAddr, PhysRange};

pub(crate) const RX: Direction = Direction::FromDevice;
pub(crate) const TX: Direction = Direction::ToDevice;

/// Start time of scripts in nanoseconds; any value but 0.
pub(crate) const START: u64 = 7_000_000_000;

/// A buffer of `bytes` bytes at `at`.
pub(crate) fn memory(at: u64, bytes: u64) -> PhysRange {
    PhysRange::new(PhysAddr::new(at), bytes).unwrap()
}

/// A trace under construction. Times are nanoseconds since [`START`].
#[derive(Default)]
pub(crate) struct Script {
    pub(crate) chunk: Chunk,
}

impl Script {
    pub(crate) fn map(
        &mut self,
        time: u64,
        (device, cpu, direction): (u16, u16, Direction),
        id: u32,
        pieces: &[PhysRange],
    ) {
        let first = self.chunk.segments.len() as u32;
        self.chunk.segments.extend_from_slice(pieces);
        let count = pieces.len() as u32;
        let kind = OpKind::Map {
            id: MappingId(id),
            direction,
            class: MapClass::Single,
            flags: MapFlags::NONE,
            segments: SegmentSpan { first, count },
        };
        self.push(time, device, cpu, kind);
    }

    pub(crate) fn unmap(&mut self, time: u64, (device, cpu): (u16, u16), id: u32) {
        self.push(time, device, cpu, OpKind::Unmap { id: MappingId(id) });
    }

    fn push(&mut self, time: u64, device: u16, cpu: u16, kind: OpKind) {
        self.chunk.ops.push(Op {
            time: Nanos(START + time),
            device: DeviceIndex(device),
            cpu,
            lines: 1,
            kind,
        });
    }
}

/// Plans a trace in chunks of `size` operations. Returns the concatenated plan and the planner.
pub(crate) fn planned_in_chunks(chunk: &Chunk, size: usize) -> (Plan, Planner) {
    let mut planner = Planner::new();
    let mut whole = Plan::default();
    let mut plan = Plan::default();
    let mut add = |plan: &Plan| {
        // Segment indices are not adjusted: tests that split a trace do not read segments.
        whole.steps.extend_from_slice(&plan.steps);
        whole.segments.extend_from_slice(&plan.segments);
        whole.maps += plan.maps;
        whole.unmaps += plan.unmaps;
        whole.lines += plan.lines;
    };
    for ops in chunk.ops.chunks(size.max(1)) {
        let part = Chunk {
            ops: ops.to_vec(),
            segments: chunk.segments.clone(),
            ..Chunk::default()
        };
        planner.plan(&part, &mut plan).unwrap();
        add(&plan);
    }
    planner.plan(&Chunk::default(), &mut plan).unwrap();
    planner.finish(&mut plan);
    add(&plan);
    (whole, planner)
}

/// Plans a trace as one chunk.
pub(crate) fn planned(chunk: &Chunk) -> (Plan, Planner) {
    planned_with(chunk, &[])
}

/// Plans a trace as one chunk, with these cache cycles.
pub(crate) fn planned_with(chunk: &Chunk, cycles: &[CycleParams]) -> (Plan, Planner) {
    let mut planner = Planner::new().with_cycles(cycles.iter().copied());
    let mut plan = Plan::default();
    planner.plan(chunk, &mut plan).unwrap();
    planner.finish(&mut plan);
    (plan, planner)
}

/// Options without the meter, and with the hostile pass if `hostile` is set.
pub(crate) fn judged_only(hostile: bool) -> CompareOptions {
    CompareOptions {
        attackers: ringfence_lab::replay::AttackerKind::All,
        limits: Default::default(),
        modes: Vec::new(),
        profile: Profile::r210_2015(),
        prices: None,
        devices: None,
        repetitions: 0,
        attack: hostile,
        early_touches: false,
        cache_cycles: ringfence_lab::mapping_cache::CycleParams::PAPER,
        rings: RingSizes::default(),
        inspected_bytes: ringfence_lab::layer::INSPECTED_BYTES,
        contiguous_frames: false,
    }
}

pub(crate) fn mode(name: &str) -> Mode {
    Mode::find(name).unwrap_or_else(|| compose(name).unwrap())
}

/// A trace with these lines in tracefs format, one per microsecond.
pub(crate) fn trace(lines: &[String]) -> Operations<TraceSource> {
    let mut text = String::new();
    for (number, line) in lines.iter().enumerate() {
        text += &format!("    task-1 [000] ..1.. 1.{number:06}: {line}\n");
    }
    let source =
        TraceSource::from_reader("script", std::io::Cursor::new(text.into_bytes())).unwrap();
    // Some scripts map more than the default limits of a trace.
    let mut options = TraceOptions::default();
    options.limits.mapping = 1 << 36;
    options.limits.mapped = Some(1 << 40);
    Operations::new("script", source, options)
}

/// A line that maps `bytes` bytes of `device` at `at`.
pub(crate) fn map_line(device: &str, at: u64, bytes: u64) -> String {
    format!(
        "dma_map_phys: {device} dir=FROM_DEVICE dma_addr={at:x} size={bytes} phys_addr={at:x} \
        attrs="
    )
}

/// The line that unmaps the mapping of [`map_line`].
pub(crate) fn unmap_line(device: &str, at: u64, bytes: u64) -> String {
    format!("dma_unmap_phys: {device} dir=FROM_DEVICE dma_addr={at:x} size={bytes} attrs=")
}
