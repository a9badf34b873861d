//! Operations around an error, and lines that fit no limit.

use ringfence_trace::Malformed::NoCpu;
use ringfence_trace::{Chunk, Operations, TraceError, TraceOptions};

#[test]
fn operations_before_an_error_are_delivered() {
    let text = "t-1 [0] ..... 1.0: dma_map_phys: d dir=TO_DEVICE dma_addr=1000 size=9 \
        phys_addr=1000 attrs=\nrubbish\n";
    let mut operations = Operations::new("bad", text.as_bytes(), TraceOptions::default());
    let mut chunk = Chunk::default();
    assert!(matches!(
        operations.next_chunk(&mut chunk),
        Err(TraceError::Malformed {
            line: 2,
            reason: NoCpu,
            ..
        })
    ));
    assert_eq!(chunk.ops.len(), 1);
    assert!(!operations.next_chunk(&mut chunk).expect("ended"));
}

/// Returns the number of operations and all errors of a text, over ten calls.
fn calls(text: &[u8]) -> (usize, Vec<TraceError>) {
    let mut options = TraceOptions::default();
    (options.limits.mapping, options.limits.live) = (1 << 36, 1 << 40);
    options.limits.mapped = Some(1 << 40);
    let mut operations = Operations::new("bad", text, options);
    let mut chunk = Chunk::default();
    let (mut ops, mut errors) = (0, Vec::new());
    for _ in 0..10 {
        let more = operations.next_chunk(&mut chunk);
        ops += chunk.ops.len();
        errors.extend(more.err());
    }
    (ops, errors)
}

#[test]
fn operations_before_an_error_survive_a_full_chunk() {
    let count = Chunk::OPS + 3000;
    let mut text = String::new();
    // Lines without operations come first, so that chunks of operations and of lines end at
    // different lines.
    for _ in 0..10 {
        text += "t-1 [0] ..... 1.0: dma_sync_single_for_cpu: d dir=TO_DEVICE dma_addr=1 size=1 \
            attrs=\n";
    }
    for n in 0..count {
        text += &format!(
            "t-1 [0] ..... 1.0: dma_map_phys: d dir=TO_DEVICE dma_addr={n:x}000 size=1 phys_addr=1 \
            attrs=\n"
        );
    }
    text += "nonsense\n";
    let (ops, errors) = calls(text.as_bytes());
    assert_eq!(ops, count);
    assert!(matches!(errors[..], [TraceError::Malformed { .. }]));
}

#[test]
fn the_first_error_is_the_only_one() {
    // Eight consecutive maps of 64 GiB touch one GiB more than the arena holds.
    let maps = (0..8).map(|n| {
        let at = ((n * 64_u64) << 30) + 0x1000;
        format!(
            "t-1 [0] ..... 1.0: dma_map_phys: d dir=TO_DEVICE dma_addr={at:x} size=68719476736 \
            phys_addr={at:x} attrs=\n"
        )
    });
    let text: String = maps.chain(["nonsense\n".to_owned()]).collect();
    let (_, errors) = calls(text.as_bytes());
    assert!(
        matches!(
            errors[..],
            [TraceError::PhysicalSpaceExhausted { line: 8, .. }]
        ),
        "{errors:?}"
    );
}

#[test]
fn unplaced_lines_are_classified() {
    let line = |rest: &str| format!("t-1 [0] ..... 1.0: {rest}\n");
    let translated =
        line("dma_map_phys: d dir=TO_DEVICE dma_addr=fff000 size=64 phys_addr=1000 attrs=");
    let large = line(
        "dma_alloc: d dir=BIDIRECTIONAL dma_addr=9000 size=1073741825 virt_addr=1 flags=x attrs=",
    );
    let (_, errors) = calls((translated + &large).as_bytes());
    assert!(
        matches!(
            errors[..],
            [TraceError::FreshFramesTooLarge {
                bytes: 1_073_741_825,
                line: 2,
                ..
            }]
        ),
        "{errors:?}"
    );
    let wraps = line(
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={0x1000} sizes={0x1000} \
        phys_addrs={0xffffffffffffffff} attrs=",
    );
    let (_, errors) = calls(wraps.as_bytes());
    assert!(
        matches!(
            errors[..],
            [TraceError::SegmentWraps { start, line: 1, .. }] if start.get() == u64::MAX
        ),
        "{errors:?}"
    );
}
