//! Lines of text: the error of each prefix and payload.

use ringfence_trace::Malformed::{self, *};
use ringfence_trace::text::{RawChunk, TraceReader};
use ringfence_trace::{Chunk, Operations, TraceError, TraceOptions};

use super::payloads::PAYLOADS;

fn first_problem(text: &[u8]) -> Option<(u64, Malformed)> {
    let mut reader = TraceReader::new("bad", text, &TraceOptions::default());
    let mut chunk = RawChunk::default();
    loop {
        match reader.next_chunk(&mut chunk) {
            Ok(true) => {}
            Ok(false) => return None,
            Err(TraceError::Malformed { file, line, reason }) => {
                assert_eq!(file, "bad");
                return Some((line, reason));
            }
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn every_malformed_payload_has_its_reason() {
    for &(payload, expected) in PAYLOADS {
        let text = format!("# header\n   bash-1026    [000] ...1.   272.232283: {payload}\n");
        let found = first_problem(text.as_bytes());
        assert_eq!(found, expected.map(|reason| (2, reason)), "{payload}");
        // The same payload after perf's prefix.
        let text = format!("\n         bash  1026 [000]   272.232283: {payload}\n");
        assert_eq!(
            first_problem(text.as_bytes()),
            expected.map(|reason| (2, reason)),
            "{payload}"
        );
    }
}

#[test]
fn every_malformed_prefix_has_its_reason() {
    let cases: [(&str, Malformed); 12] = [
        ("nonsense", NoCpu),
        ("bash-1 000 .... 1.0: e: p", NoCpu),
        ("bash [000] .... 1.0: e: p", NoCpu),
        ("bash-1 [x] .... 1.0: e: p", BadCpu),
        ("bash-1 [70000] .... 1.0: e: p", BadCpu),
        ("bash-1 [0 .... 1.0: e: p", BadCpu),
        ("bash-1 [0] .... soon: e: p", BadTime),
        ("bash-1 [0] .... 12: e: p", BadTime),
        ("bash-1 [0] .... 1.0000000001: e: p", BadTime),
        ("bash-1 [0] .... 99999999999999999999.0: e: p", BadTime),
        ("bash-1 [0] ....", BadTime),
        ("CPU:1 [LOST ? EVENTS]", BadLost),
    ];
    for (line, reason) in cases {
        let text = format!("{line}\n");
        assert_eq!(first_problem(text.as_bytes()), Some((1, reason)), "{line}");
    }
    let sound = "t-1 [0] .... 1.0: e: p\n";
    assert_eq!(first_problem(format!("{sound}{sound}").as_bytes()), None);
    assert_eq!(
        first_problem(format!("{sound}t-1 [0] .... 1.0: e:").as_bytes()),
        Some((2, CutShort))
    );
    assert_eq!(
        first_problem(format!("{sound}t-1 [0]\0 .... 1.0: e: p\n").as_bytes()),
        Some((2, Binary))
    );
    assert_eq!(first_problem(b"\x7fELF\0\0\0\x01\x02"), Some((1, Binary)));
    let long = format!("{sound}{}\n", "x".repeat((1 << 20) + 1));
    assert_eq!(
        first_problem(long.as_bytes()),
        Some((2, TooLong { limit: 1 << 20 }))
    );
}

#[test]
fn lenient_counts_errors_of_strict() {
    let mut text = String::new();
    let mut bad = 0;
    for &(payload, expected) in PAYLOADS {
        text += &format!("   bash-1026    [000] ...1.   272.232283: {payload}\n");
        bad += u64::from(expected.is_some());
    }
    let mut operations = Operations::new("bad", text.as_bytes(), TraceOptions::default().lenient());
    let mut chunk = Chunk::default();
    while operations.next_chunk(&mut chunk).expect("lenient") {}
    assert_eq!(operations.summary().malformed, bad);
    assert_eq!(operations.summary().events + bad, PAYLOADS.len() as u64);
    assert_eq!(operations.summary().lines, PAYLOADS.len() as u64);
}
