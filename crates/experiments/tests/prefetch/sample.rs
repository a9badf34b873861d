//! The bundled trace against a count over its operations.

use std::collections::HashMap;

use ringfence_experiments::prefetch::{Predictor, of_trace, summarise};
use ringfence_trace::{Chunk, MapClass, OpKind, Operations, SAMPLE, TraceOptions, TraceSource};
use ringfence_types::PhysRange;

use super::of;

/// Compares the bundled trace with a count over its operations, which another parser path produces
/// and which have no IOVAs.
#[test]
fn every_page_of_every_unmap_of_the_sample_is_accessed_once() {
    let mut operations = Operations::new("sample", sample(), TraceOptions::default());
    let mut chunk = Chunk::default();
    let mut live: HashMap<u32, Option<u64>> = HashMap::new();
    let (mut expected, mut buffers) = (0, 0);
    while operations.next_chunk(&mut chunk).unwrap() {
        for op in &chunk.ops {
            match op.kind {
                OpKind::Map {
                    id,
                    class,
                    segments,
                    ..
                } => {
                    let streaming = matches!(class, MapClass::Single | MapClass::Sg);
                    let pages = |range: &PhysRange| {
                        (range.last().get() >> 12) - (range.start().get() >> 12) + 1
                    };
                    let pages = chunk.segments_of(segments).iter().map(pages).sum();
                    live.insert(id.0, streaming.then_some(pages));
                }
                OpKind::Unmap { id } => {
                    if let Some(pages) = live.remove(&id.0).flatten() {
                        expected += pages;
                        buffers += 1;
                    }
                }
            }
        }
    }
    assert!(expected > 1000, "{expected}");
    let rows = of_trace("sample", sample()).unwrap();
    for row in &rows {
        match row.predictor {
            Predictor::Riotlb | Predictor::RiotlbUninvalidated => {
                assert_eq!(row.misses, buffers, "{row:?}")
            }
            _ => assert_eq!(row.misses, expected, "{row:?}"),
        }
        assert!(row.predicted <= row.misses);
        assert_eq!(row.first_misses, buffers, "{row:?}");
        assert!(row.first_predicted <= row.predicted);
        assert!(row.rejected <= row.verification_walks);
    }
    let [summary] = &summarise(&rows)[..] else {
        panic!("one device")
    };
    let best = |predictor| {
        of(&rows, predictor)
            .map(|row| row.first_hit_rate)
            .fold(0.0, f64::max)
    };
    assert_eq!(
        summary.markov_above.max(summary.markov_below),
        best(Predictor::MarkovModified)
    );
    assert_eq!(summary.riotlb, best(Predictor::Riotlb));
    assert_eq!(summary.first_misses, buffers);
}

/// The bundled sample.
fn sample() -> TraceSource {
    TraceSource::from_reader("sample", SAMPLE).unwrap()
}
