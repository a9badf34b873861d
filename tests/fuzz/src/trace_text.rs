//! The trace parser over any bytes: the input is the text of a trace.

use std::io::Read;

use ringfence_trace::text::{Counts, ListSpan, RawChunk, RawKind, TraceReader};
use ringfence_trace::{Malformed, TraceError, TraceOptions};
use ringfence_types::{IovaRange, PhysRange};

use crate::OutcomeHook;
use crate::pieces::Pieces;

/// Outcomes that the corpus reaches: every kind of event and every reason to refuse a line.
pub const OUTCOMES: &[&str] = &[
    "Map",
    "Unmap",
    "MapSg",
    "UnmapSg",
    "Alloc",
    "Free",
    "Sync",
    "Access",
    "Void",
    "IommuMap",
    "IommuUnmap",
    "Mark",
    "lost",
    "unknown",
    "TooLong",
    "Binary",
    "CutShort",
    "NoCpu",
    "BadCpu",
    "BadTime",
    "NoEvent",
    "BadLost",
    "MissingField",
    "BadNumber",
    "BadDirection",
    "NoDirection",
    "BadList",
    "EmptySize",
    "RangeWraps",
    "SizeTooLarge",
    "RangeMismatch",
];

/// Maximum length of a line; short, so that inputs exceed it.
const MAX_LINE: usize = 1000;

/// Runs one input: strictly, leniently, and in small pieces.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let strict = read(data, &options());
    let lenient = read(data, &options().lenient());
    let pieces = read(Pieces(data), &options().lenient());

    assert_eq!(lenient, pieces, "how the input is cut makes no difference");
    assert!(
        lenient.error.is_none(),
        "a lenient reader refuses no text: {lenient:?}"
    );
    match &strict.error {
        None => assert_eq!(strict, lenient, "nothing to be lenient about"),
        Some((line, _)) => {
            assert!(lenient.counts.malformed > 0);
            assert_eq!(
                *line, strict.counts.lines,
                "the line that ended it is the last one read"
            );
            assert!(
                lenient.events.starts_with(&strict.events),
                "the same up to the error"
            );
        }
    }
    let counts = lenient.counts;
    assert!(
        counts.events + counts.malformed <= counts.lines,
        "{counts:?}"
    );
    assert_eq!(lenient.events.len() as u64, counts.events - counts.unknown);

    for event in &lenient.events {
        reached(event);
    }
    if counts.lost > 0 {
        reached("lost");
    }
    if counts.unknown > 0 {
        reached("unknown");
    }
    if let Some((_, reason)) = strict.error {
        reached(reason);
    }
}

/// Result of a read.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    events: Vec<&'static str>,
    counts: Counts,
    /// Line and reason.
    error: Option<(u64, &'static str)>,
}

fn options() -> TraceOptions {
    let mut options = TraceOptions::default();
    options.limits.line = MAX_LINE;
    options
}

fn read(data: impl Read, options: &TraceOptions) -> Outcome {
    let mut reader = TraceReader::new("input", data, options);
    let mut chunk = RawChunk::default();
    let mut events = Vec::new();
    let error = loop {
        let more = reader.next_chunk(&mut chunk);
        for event in &chunk.events {
            check(&event.kind, &chunk);
            events.push(kind(&event.kind));
        }
        match more {
            Ok(true) => {}
            Ok(false) => break None,
            Err(TraceError::Malformed { line, reason, .. }) => break Some((line, name(reason))),
            Err(other) => panic!("text in memory gives no other error: {other}"),
        }
    };
    assert!(
        !reader
            .next_chunk(&mut chunk)
            .expect("the end stays the end"),
        "the end stays the end"
    );
    Outcome {
        events,
        counts: reader.counts(),
        error,
    }
}

/// Checks the guarantees of an event's type.
fn check(kind: &RawKind, chunk: &RawChunk) {
    let listed = |span: ListSpan| assert_eq!(chunk.list(span).len(), span.count as usize);
    match *kind {
        RawKind::Map {
            iova, size, phys, ..
        }
        | RawKind::IommuMap { iova, phys, size } => {
            assert!(IovaRange::new(iova, size).is_some(), "{kind:?}");
            assert!(PhysRange::new(phys, size).is_some(), "{kind:?}");
        }
        RawKind::Unmap { iova, size, .. }
        | RawKind::Free { iova, size, .. }
        | RawKind::Access { iova, size, .. }
        | RawKind::IommuUnmap { iova, size } => {
            assert!(IovaRange::new(iova, size).is_some(), "{kind:?}");
        }
        RawKind::Alloc {
            iova,
            size,
            phys_addrs,
            ..
        } => {
            assert!(IovaRange::new(iova, size).is_some(), "{kind:?}");
            listed(phys_addrs);
        }
        RawKind::MapSg {
            dma_addrs,
            sizes,
            phys_addrs,
            ..
        } => {
            assert_eq!(dma_addrs.count, sizes.count);
            for span in [dma_addrs, sizes, phys_addrs] {
                listed(span);
            }
        }
        RawKind::UnmapSg { phys_addrs, .. } => {
            assert!(phys_addrs.count > 0);
            listed(phys_addrs);
        }
        RawKind::Mark(index) => assert!((index as usize) < chunk.marks.len()),
        RawKind::Page(_) => panic!("these options keep no event of the page allocator"),
        RawKind::Sync { .. } | RawKind::Void { .. } => {}
    }
}

const fn kind(kind: &RawKind) -> &'static str {
    match kind {
        RawKind::Map { .. } => "Map",
        RawKind::Unmap { .. } => "Unmap",
        RawKind::MapSg { .. } => "MapSg",
        RawKind::UnmapSg { .. } => "UnmapSg",
        RawKind::Alloc { .. } => "Alloc",
        RawKind::Free { .. } => "Free",
        RawKind::Sync { .. } => "Sync",
        RawKind::Access { .. } => "Access",
        RawKind::Void { .. } => "Void",
        RawKind::IommuMap { .. } => "IommuMap",
        RawKind::IommuUnmap { .. } => "IommuUnmap",
        RawKind::Page(_) => "Page",
        RawKind::Mark(_) => "Mark",
    }
}

/// A variant added later has no name here, which the corpus test reports.
const fn name(reason: Malformed) -> &'static str {
    match reason {
        Malformed::TooLong { .. } => "TooLong",
        Malformed::Binary => "Binary",
        Malformed::CutShort => "CutShort",
        Malformed::NoCpu => "NoCpu",
        Malformed::BadCpu => "BadCpu",
        Malformed::BadTime => "BadTime",
        Malformed::NoEvent => "NoEvent",
        Malformed::BadLost => "BadLost",
        Malformed::MissingField(_) => "MissingField",
        Malformed::BadNumber(_) => "BadNumber",
        Malformed::BadDirection => "BadDirection",
        Malformed::NoDirection => "NoDirection",
        Malformed::BadList(_) => "BadList",
        Malformed::EmptySize => "EmptySize",
        Malformed::RangeWraps(_) => "RangeWraps",
        Malformed::SizeTooLarge => "SizeTooLarge",
        Malformed::RangeMismatch => "RangeMismatch",
        _ => "unknown reason",
    }
}
