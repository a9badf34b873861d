//! Malformed input: checks the exact error for each kind of damage.

use ringfence_trace::Malformed::{self, *};
use ringfence_trace::text::{RawChunk, TraceReader};
use ringfence_trace::{Chunk, Field, Operations, TraceError, TraceOptions, TraceSource};

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

/// Payloads after a valid prefix.
const PAYLOADS: &[(&str, Option<Malformed>)] = &[
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=ff018000 size=18552 phys_addr=119798000 attrs=",
        None,
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=1 size=1 new_field=7 phys_addr=1 attrs=X|Y",
        None,
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=ffffffffffffffff size=5 phys_addr=1 attrs=",
        None,
    ),
    (
        "dma_map_phys:  dir=TO_DEVICE dma_addr=1 size=1 phys_addr=1 attrs=",
        Some(MissingField(Field::Device)),
    ),
    ("dma_map_phys:", Some(MissingField(Field::Device))),
    ("dma_map_phys: d", Some(MissingField(Field::Dir))),
    (
        "dma_map_phys: d dir=SIDEWAYS dma_addr=1 size=1 phys_addr=1 attrs=",
        Some(BadDirection),
    ),
    (
        "dma_map_phys: d dir=NONE dma_addr=1 size=1 phys_addr=1 attrs=",
        Some(NoDirection),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE size=1 phys_addr=1 attrs=",
        Some(MissingField(Field::DmaAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=xyz size=1 phys_addr=1 attrs=",
        Some(BadNumber(Field::DmaAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=12345678123456781 size=1 phys_addr=1 attrs=",
        Some(BadNumber(Field::DmaAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=1 size=0x10 phys_addr=1 attrs=",
        Some(BadNumber(Field::Size)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=1 size=-1 phys_addr=1 attrs=",
        Some(BadNumber(Field::Size)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=1 size=18446744073709551616 phys_addr=1 attrs=",
        Some(BadNumber(Field::Size)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=1 size=0 phys_addr=1 attrs=",
        Some(EmptySize),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=0 size=18446744073709551615 phys_addr=0 attrs=",
        Some(SizeTooLarge),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=fffffffffffffff0 size=32 phys_addr=0 attrs=",
        Some(RangeWraps(Field::DmaAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=0 size=32 phys_addr=fffffffffffffff0 attrs=",
        Some(RangeWraps(Field::PhysAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=0 size=32 attrs=",
        Some(MissingField(Field::PhysAddr)),
    ),
    (
        "dma_map_phys: d dir=TO_DEVICE dma_addr=0 size=32 phys_addr=0",
        Some(MissingField(Field::Attrs)),
    ),
    (
        "dma_access: d dir=FROM_DEVICE dma_addr=ff018840 size=18552",
        None,
    ),
    (
        "dma_access:  dir=FROM_DEVICE dma_addr=1 size=1",
        Some(MissingField(Field::Device)),
    ),
    (
        "dma_access: d dma_addr=1 size=1",
        Some(MissingField(Field::Dir)),
    ),
    (
        "dma_access: d dir=NONE dma_addr=1 size=1",
        Some(NoDirection),
    ),
    (
        "dma_access: d dir=TO_DEVICE size=1",
        Some(MissingField(Field::DmaAddr)),
    ),
    (
        "dma_access: d dir=TO_DEVICE dma_addr=1",
        Some(MissingField(Field::Size)),
    ),
    (
        "dma_access: d dir=TO_DEVICE dma_addr=g size=1",
        Some(BadNumber(Field::DmaAddr)),
    ),
    (
        "dma_access: d dir=TO_DEVICE dma_addr=1 size=0",
        Some(EmptySize),
    ),
    (
        "dma_access: d dir=TO_DEVICE dma_addr=0 size=68719476737",
        Some(SizeTooLarge),
    ),
    (
        "dma_access: d dir=TO_DEVICE dma_addr=fffffffffffffff0 size=32",
        Some(RangeWraps(Field::DmaAddr)),
    ),
    (
        "dma_unmap_phys: d dir=TO_DEVICE dma_addr=1 size=0 attrs=",
        Some(EmptySize),
    ),
    (
        "dma_unmap_page: d dir=TO_DEVICE dma_addr=1 size=18446744073709551615 attrs=",
        Some(SizeTooLarge),
    ),
    (
        "dma_unmap_page: d dir=TO_DEVICE dma_addr=1 size=4",
        Some(MissingField(Field::Attrs)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=2/2 ents=1/1 dma_addrs={0x1000} sizes={0x2000} \
        phys_addrs={0x1000,0x5000} attrs=",
        None,
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE ents=1/1 dma_addrs={0x1} sizes={0x2} phys_addrs={0x1} attrs=",
        Some(MissingField(Field::Nents)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1 ents=1/1 dma_addrs={0x1} sizes={0x2} phys_addrs={0x1} \
        attrs=",
        Some(BadNumber(Field::Nents)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=2/1 ents=1/1 dma_addrs={0x1} sizes={0x2} \
        phys_addrs={0x1,0x2} attrs=",
        Some(BadNumber(Field::Nents)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=x/1 dma_addrs={0x1} sizes={0x2} \
        phys_addrs={0x1} attrs=",
        Some(BadNumber(Field::Ents)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=2/2 dma_addrs={0x1} sizes={0x2,0x2} \
        phys_addrs={0x1} attrs=",
        Some(BadList(Field::DmaAddrs)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={0x1} sizes={} phys_addrs={0x1} \
        attrs=",
        Some(BadList(Field::Sizes)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={0x1} sizes={0x0} \
        phys_addrs={0x1} attrs=",
        Some(EmptySize),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={0x1} sizes={0xffffffffff} \
        phys_addrs={0x1} attrs=",
        Some(SizeTooLarge),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={0xffffffffffffffff} sizes={0x2} \
        phys_addrs={0x1} attrs=",
        Some(RangeWraps(Field::DmaAddrs)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=2/2 ents=1/1 dma_addrs={0x1} sizes={0x2} \
        phys_addrs={0x1 attrs=",
        Some(BadList(Field::PhysAddrs)),
    ),
    (
        "dma_map_sg: d dir=TO_DEVICE nents=0/0 ents=0/0 dma_addrs={} sizes={} phys_addrs={} attrs=",
        Some(BadList(Field::DmaAddrs)),
    ),
    (
        "dma_unmap_sg: d dir=TO_DEVICE phys_addrs={0x1,} attrs=",
        Some(BadList(Field::PhysAddrs)),
    ),
    (
        "dma_unmap_sg: d dir=TO_DEVICE phys_addrs={} attrs=",
        Some(BadList(Field::PhysAddrs)),
    ),
    (
        "dma_unmap_sg: d dir=TO_DEVICE phys_addrs={0x1}x attrs=",
        Some(BadList(Field::PhysAddrs)),
    ),
    (
        "dma_unmap_sg: d dir=TO_DEVICE attrs=",
        Some(MissingField(Field::PhysAddrs)),
    ),
    (
        "dma_alloc: d dir=BIDIRECTIONAL dma_addr=1000 size=4 virt_addr=(____ptrval____) flags=X \
        attrs=",
        None,
    ),
    (
        "dma_alloc: d dma_addr=1000 size=4 virt_addr=00000000330fd266 flags=X attrs=",
        None,
    ),
    (
        "dma_alloc: d dir=BIDIRECTIONAL dma_addr=0 size=0 virt_addr=0000000000000000 flags=X \
        attrs=",
        None,
    ),
    (
        "dma_alloc: d dir=BIDIRECTIONAL dma_addr=1000 size=0 virt_addr=00000000330fd266 flags=X \
        attrs=",
        Some(EmptySize),
    ),
    (
        "dma_alloc: d dir=BIDIRECTIONAL dma_addr=1000 size=4 flags=X attrs=",
        Some(MissingField(Field::VirtAddr)),
    ),
    (
        "dma_alloc_sgt: d dir=TO_DEVICE dma_addr=1000 size=8192 phys_addrs={0x1000,0x5000} flags=X \
        attrs=",
        None,
    ),
    (
        "dma_free: d dir=BIDIRECTIONAL dma_addr=0 size=0 virt_addr=0000000000000000 attrs=",
        None,
    ),
    (
        "dma_free: d dir=BIDIRECTIONAL dma_addr=1 size=0 virt_addr=0000000000000005 attrs=",
        Some(EmptySize),
    ),
    (
        "dma_free_sgt: d dir=TO_DEVICE dma_addr=1000 size=8192 phys_addrs={0x1000,0x5000}",
        None,
    ),
    (
        "map: IOMMU: iova=0x00000000bff7c000 - 0x00000000bff80000 paddr=0x0000000127834000 \
        size=16384",
        None,
    ),
    (
        "map: IOMMU: iova=0x00000000bff7c000 paddr=0x0000000127834000 size=16384",
        None,
    ),
    (
        "map: IOMMU: iova=0xfffffffffffff000 - 0x0000000000000000 paddr=0x0 size=4096",
        None,
    ),
    ("iommu:map: something else", Some(MissingField(Field::Iova))),
    ("other:map: something else", None),
    ("map: something else", None),
    (
        "map: IOMMU: paddr=0x1 size=1",
        Some(MissingField(Field::Iova)),
    ),
    (
        "map: IOMMU: iova=12 paddr=0x1 size=1",
        Some(BadNumber(Field::Iova)),
    ),
    (
        "map: IOMMU: iova=0x12 - 13 paddr=0x1 size=1",
        Some(BadNumber(Field::Iova)),
    ),
    (
        "map: IOMMU: iova=0x1 - 0x3 paddr=0x1 size=1",
        Some(RangeMismatch),
    ),
    (
        "map: IOMMU: iova=0x1 - 0x1 paddr=0x1 size=0",
        Some(EmptySize),
    ),
    (
        "map: IOMMU: iova=0xfffffffffffffff0 - 0x10 paddr=0x1 size=32",
        Some(RangeWraps(Field::Iova)),
    ),
    (
        "map: IOMMU: iova=0x0 - 0x20 paddr=0xfffffffffffffff0 size=32",
        Some(RangeWraps(Field::Paddr)),
    ),
    (
        "map: IOMMU: iova=0x1 - 0x2 size=1",
        Some(MissingField(Field::Paddr)),
    ),
    (
        "unmap: IOMMU: iova=0x1 - 0x2 size=1",
        Some(MissingField(Field::UnmappedSize)),
    ),
    ("sched_switch: prev_comm=a ==> next_comm=b", None),
    ("function_name <-caller", None),
    (": payload", Some(NoEvent)),
    ("dma_ma", Some(NoEvent)),
    ("", Some(NoEvent)),
];

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

#[test]
fn a_cut_or_damaged_zstd_stream_is_an_error() {
    let sample = ringfence_trace::SAMPLE;
    let read = |bytes: &[u8]| -> Result<u64, TraceError> {
        let source = TraceSource::from_reader("z", std::io::Cursor::new(bytes.to_vec()))?;
        let mut operations = Operations::new("z", source, TraceOptions::default());
        let mut chunk = Chunk::default();
        while operations.next_chunk(&mut chunk)? {}
        Ok(operations.summary().events)
    };
    assert!(read(sample).expect("sound") > 10_000);
    for length in [5, 100, sample.len() / 2, sample.len() - 1] {
        let cut = read(&sample[..length]);
        assert!(
            matches!(cut, Err(TraceError::Compression { .. })),
            "{length}: {cut:?}"
        );
    }
    let mut damaged = sample.to_vec();
    for byte in &mut damaged[5000..5100] {
        *byte ^= 0x55;
    }
    assert!(read(&damaged).is_err());
    assert_eq!(read(b"").expect("empty"), 0);
}

#[test]
fn missing_file_is_reported() {
    let missing = Operations::open("no/such/trace".as_ref(), TraceOptions::default());
    assert!(matches!(missing, Err(TraceError::Io { line: 0, .. })));
}

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
