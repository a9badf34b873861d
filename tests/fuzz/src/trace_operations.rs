//! The pairing of a trace's lines over any bytes: the input is the text of a trace.
//!
//! A short input cannot cause two errors: `TooManyDevices` takes 65536 names and `TooManyMappings`
//! 2^32 mappings. An input of odd length is read with a look-ahead of 4 lines instead of 4096, so
//! that lines exceed their maximum wait.

use std::collections::BTreeMap;
use std::io::Read;

use ringfence_trace::{
    Chunk, DeviceIndex, JudgeOptions, Judgement, MapClass, MapFlags, MappingId, Op, OpKind,
    OpStore, Operations, Summary, TraceError, TraceOptions,
};
use ringfence_types::PhysRange;

use crate::OutcomeHook;
use crate::pieces::Pieces;

/// Outcomes that the corpus reaches: every class and flag, every kind of line without a partner,
/// every error.
pub const OUTCOMES: &[&str] = &[
    "single",
    "sg",
    "coherent",
    "iommu-only",
    "truncated",
    "guessed-lengths",
    "fresh-frames",
    "renamed",
    "replaces",
    "remainder",
    "several lines",
    "own row",
    "mark",
    "unmatched unmap",
    "unmatched free",
    "unmatched iommu unmap",
    "failed map",
    "setup map",
    "cut line",
    "alive at the end",
    "stale exposure",
    "mapped exposure",
    "Malformed",
    "PhysicalSpaceExhausted",
    "FreshFramesTooLarge",
    "SegmentWraps",
];

/// First address after the memory of a replay.
const ARENA_END: u64 = ringfence_trace::ARENA_BYTES;

/// Maximum length of a line; short, so that inputs exceed it.
const MAX_LINE: usize = 1000;

/// Runs one input: strictly, leniently, and in small pieces through a store.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let mut options = TraceOptions::default();
    options.limits.line = MAX_LINE;
    // Without these limits, a few bytes that claim large sizes exhaust the arena first.
    (options.limits.mapping, options.limits.live) = (u64::MAX, u64::MAX);
    options.limits.mapped = Some(u64::MAX);
    if data.len() % 2 == 1 {
        options.look_ahead = 4;
    }
    let strict = read(data, options.clone());
    let lenient = read(data, options.clone().lenient());

    assert_ne!(
        lenient.error,
        Some("Malformed"),
        "a lenient read refuses no text"
    );
    if strict.error.is_none() {
        assert_eq!(strict, lenient, "nothing to be lenient about");
    }
    let mut pieces = Operations::new("input", Pieces(data), options.lenient());
    match OpStore::read(&mut pieces) {
        Ok(store) => {
            let mut ops = Vec::new();
            let mut marks = 0;
            let mut replay = store.replay();
            let mut chunk = Chunk::default();
            while replay.next_chunk(&mut chunk) {
                gather(&chunk, &mut ops);
                marks += chunk.marks.len();
            }
            assert_eq!((ops, marks), (lenient.ops.clone(), lenient.marks), "stored");
            assert_eq!(*store.summary(), lenient.summary);
        }
        Err(error) => assert_eq!(Some(name(&error)), lenient.error),
    }
    for outcome in [&strict, &lenient] {
        report(outcome, reached);
    }
    judge(data, reached);
}

/// Judges the pages of the input. The limit is low, because a line can map many pages.
fn judge(data: &[u8], reached: OutcomeHook<'_>) {
    let mut reading = TraceOptions::default().lenient().with_page_events();
    reading.limits.line = MAX_LINE;
    let mut options = JudgeOptions::default();
    options.pages = 4096;
    let judged = Judgement::read(&mut Operations::new("input", data, reading), &options);
    let Ok(judgement) = judged else {
        return;
    };
    let stale: u64 = judgement.devices.iter().map(|one| one.stale.count).sum();
    let mapped: u64 = judgement.devices.iter().map(|one| one.mapped.count).sum();
    for (name, all, devices) in [
        ("stale exposure", judgement.stale, stale),
        ("mapped exposure", judgement.mapped, mapped),
    ] {
        assert_eq!(devices, all.count, "{name}: the devices' sum");
        if all.count > 0 {
            reached(name);
        }
    }
    let longest = judgement.longest.iter().map(|one| one.reachable_ns);
    let expected = judgement.stale.longest_ns.max(judgement.mapped.longest_ns);
    assert_eq!(
        longest.max().unwrap_or(0),
        expected,
        "the longest is described"
    );
}

/// Result of a read.
#[derive(Debug, PartialEq)]
struct Outcome {
    ops: Vec<(Op, Vec<PhysRange>)>,
    marks: usize,
    summary: Summary,
    own_row: bool,
    error: Option<&'static str>,
}

fn read(data: impl Read, options: TraceOptions) -> Outcome {
    let mut operations = Operations::new("input", data, options);
    let mut chunk = Chunk::default();
    let mut ops = Vec::new();
    let mut marks = 0;
    let mut live = Live::default();
    let error = loop {
        let more = operations.next_chunk(&mut chunk);
        for op in &chunk.ops {
            assert!(operations.devices().get(op.device).is_some(), "{op:?}");
            live.take(op, &chunk);
        }
        gather(&chunk, &mut ops);
        marks += chunk.marks.len();
        match more {
            Ok(true) => {}
            Ok(false) => break None,
            Err(error) => break Some(name(&error)),
        }
    };
    let ids: Vec<MappingId> = operations.live().collect();
    assert_eq!(ids, live.ids());
    let summary = operations.summary().clone();
    if error.is_none() {
        assert_eq!(summary.live_at_end, ids.len() as u64);
        assert_eq!(
            live.maps,
            summary.maps + summary.iommu_only_maps + summary.remainders
        );
    }
    assert!(summary.live_max >= live.most, "{summary:?}");
    assert!(live.lines <= summary.events, "no line counts twice");
    assert!(summary.events + summary.malformed <= summary.lines);
    assert!(
        !operations
            .next_chunk(&mut chunk)
            .expect("the end stays the end"),
        "the end stays the end"
    );
    Outcome {
        ops,
        marks,
        own_row: operations
            .devices()
            .iter()
            .any(|(_, device)| device.kind == ringfence_trace::DeviceKind::Unattributed),
        summary,
        error,
    }
}

/// Adds the operations of a chunk with their segments instead of spans, which depend on where a
/// chunk begins.
pub(crate) fn gather(chunk: &Chunk, ops: &mut Vec<(Op, Vec<PhysRange>)>) {
    for op in &chunk.ops {
        let mut op = *op;
        let mut segments = Vec::new();
        if let OpKind::Map { segments: span, .. } = &mut op.kind {
            segments = chunk.segments_of(*span).to_vec();
            span.first = 0;
        }
        ops.push((op, segments));
    }
}

/// Checks the guarantees of operations: dense ids, pairs, a clock that never runs backwards,
/// segments within the arena.
#[derive(Default)]
pub(crate) struct Live {
    devices: BTreeMap<MappingId, DeviceIndex>,
    /// Number of ids ever used.
    used: usize,
    time: u64,
    maps: u64,
    lines: u64,
    most: u64,
}

impl Live {
    /// Returns the ids of the live mappings.
    pub(crate) fn ids(&self) -> Vec<MappingId> {
        self.devices.keys().copied().collect()
    }

    pub(crate) fn take(&mut self, op: &Op, chunk: &Chunk) {
        assert!(op.time.0 >= self.time, "{op:?}");
        self.time = op.time.0;
        self.lines += u64::from(op.lines);
        match op.kind {
            OpKind::Unmap { id } => {
                assert_eq!(self.devices.remove(&id), Some(op.device), "{op:?}");
            }
            OpKind::Map { id, segments, .. } => {
                if self.devices.len() == self.used {
                    self.used += 1;
                }
                assert!(id.index() < self.used, "dense: {op:?}");
                assert_eq!(self.devices.insert(id, op.device), None, "{op:?}");
                self.maps += 1;
                self.most = self.most.max(self.devices.len() as u64);
                let list = chunk.segments_of(segments);
                assert!(!list.is_empty() && list.len() == segments.count as usize);
                for segment in list {
                    assert!(segment.last().get() < ARENA_END, "{segment:?}");
                }
            }
        }
    }
}

fn report(outcome: &Outcome, reached: OutcomeHook<'_>) {
    for (op, _) in &outcome.ops {
        if op.lines > 1 {
            reached("several lines");
        }
        let OpKind::Map { class, flags, .. } = op.kind else {
            continue;
        };
        reached(match class {
            MapClass::Single => "single",
            MapClass::Sg => "sg",
            MapClass::Coherent => "coherent",
            MapClass::IommuOnly => "iommu-only",
        });
        for (flag, name) in [
            (MapFlags::TRUNCATED, "truncated"),
            (MapFlags::GUESSED_LENGTHS, "guessed-lengths"),
            (MapFlags::FRESH_FRAMES, "fresh-frames"),
            (MapFlags::RENAMED, "renamed"),
            (MapFlags::REPLACES, "replaces"),
            (MapFlags::REMAINDER, "remainder"),
        ] {
            if flags.contains(flag) {
                reached(name);
            }
        }
    }
    let summary = &outcome.summary;
    for (count, name) in [
        (outcome.marks as u64, "mark"),
        (u64::from(outcome.own_row), "own row"),
        (summary.unmatched_unmaps, "unmatched unmap"),
        (summary.unmatched_frees, "unmatched free"),
        (summary.unmatched_iommu_unmaps, "unmatched iommu unmap"),
        (summary.failed_maps, "failed map"),
        (summary.setup_maps, "setup map"),
        (summary.cut_lines, "cut line"),
        (summary.live_at_end, "alive at the end"),
    ] {
        if count > 0 {
            reached(name);
        }
    }
    if let Some(error) = outcome.error {
        reached(error);
    }
}

/// A variant added later has no name here, which the corpus test reports.
const fn name(error: &TraceError) -> &'static str {
    match error {
        TraceError::Malformed { .. } => "Malformed",
        TraceError::TooManyDevices { .. } => "TooManyDevices",
        TraceError::TooManyMappings { .. } => "TooManyMappings",
        TraceError::PhysicalSpaceExhausted { .. } => "PhysicalSpaceExhausted",
        TraceError::FreshFramesTooLarge { .. } => "FreshFramesTooLarge",
        TraceError::SegmentWraps { .. } => "SegmentWraps",
        _ => "unknown error",
    }
}
