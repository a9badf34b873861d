//! Lines of DMAs, which a record of an emulated IOMMU has between those of maps and unmaps.

use std::io::Read;

use ringfence_trace::{Anonymise, Chunk, Info, Op, Operations, TraceOptions, TraceSource};
use ringfence_types::PhysRange;

/// Every third line is a DMA. The second device maps nothing.
const LINES: [&str; 9] = [
    "dma_map_phys: 0000:00:04.0 dir=FROM_DEVICE dma_addr=fff000 size=4096 phys_addr=5000 attrs=",
    "dma_map_phys: 0000:00:04.0 dir=TO_DEVICE dma_addr=ffe000 size=4096 phys_addr=6000 attrs=",
    "dma_access: 0000:00:04.0 dir=TO_DEVICE dma_addr=ffe010 size=16",
    "dma_unmap_phys: 0000:00:04.0 dir=TO_DEVICE dma_addr=ffe000 size=4096 attrs=",
    "dma_alloc: 0000:00:04.0 dir=BIDIRECTIONAL dma_addr=ff9000 size=4096 \
    virt_addr=0000000000000001 flags=GFP_KERNEL attrs=",
    "dma_access: 0000:00:04.0 dir=FROM_DEVICE dma_addr=fff000 size=512",
    "dma_unmap_phys: 0000:00:04.0 dir=FROM_DEVICE dma_addr=fff000 size=4096 attrs=",
    "dma_map_phys: 0000:00:04.0 dir=TO_DEVICE dma_addr=ffe000 size=4096 phys_addr=7000 attrs=",
    "dma_access: 0000:00:05.0 dir=TO_DEVICE dma_addr=ffe000 size=1",
];

fn text(keep: impl Fn(&str) -> bool) -> String {
    let lines = LINES.iter().filter(|line| keep(line)).enumerate();
    lines
        .map(|(at, line)| format!("  ringfence-0 [000] ..... 1.{at:06}: {line}\n"))
        .collect()
}

fn operations(reader: impl Read) -> (Vec<Op>, Vec<PhysRange>) {
    let mut operations = Operations::new("t", reader, TraceOptions::default());
    let (mut ops, mut segments) = (Vec::new(), Vec::new());
    let mut chunk = Chunk::default();
    while operations.next_chunk(&mut chunk).unwrap() {
        ops.append(&mut chunk.ops);
        segments.append(&mut chunk.segments);
    }
    (ops, segments)
}

fn info(reader: impl Read) -> Info {
    Info::read(&mut Operations::new("t", reader, TraceOptions::default())).unwrap()
}

#[test]
fn accesses_are_counted_and_change_no_operation() {
    let (with, without) = (text(|_| true), text(|line| !line.starts_with("dma_access")));
    let timeless = |(ops, segments): (Vec<Op>, Vec<PhysRange>)| {
        let ops: Vec<_> = ops
            .iter()
            .map(|op| (op.device, op.lines, op.kind))
            .collect();
        (ops, segments)
    };
    assert_eq!(
        timeless(operations(with.as_bytes())),
        timeless(operations(without.as_bytes()))
    );
    assert_eq!(info(without.as_bytes()).accesses, 0);
    let packed = zstd::encode_all(with.as_bytes(), 3).unwrap();
    let packed = TraceSource::from_reader("t", std::io::Cursor::new(packed)).unwrap();
    for info in [info(with.as_bytes()), info(packed)] {
        assert_eq!((info.accesses, info.events, info.unknown), (3, 9, 0));
    }
}

#[test]
fn anonymised_accesses_keep_their_mappings() {
    let text = text(|_| true);
    let (anonymise, mut out) = (
        Anonymise {
            seed: 1,
            from_zero: true,
        },
        Vec::new(),
    );
    anonymise
        .run(
            "t",
            text.as_bytes(),
            text.as_bytes(),
            &TraceOptions::default(),
            &mut out,
        )
        .unwrap();
    let out = String::from_utf8(out).unwrap();
    assert!(
        !out.contains("00:04.0") && !out.contains("00:05.0"),
        "{out}"
    );
    let of = |event: &str| {
        let line = out.lines().find(|line| line.contains(event)).unwrap();
        line.split_once(event).unwrap().1.to_owned()
    };
    // The names of both devices are replaced, and an IOVA that is no physical address stays.
    let device = of("dma_map_phys: ");
    let device = device.split_once(' ').unwrap().0;
    assert_eq!(
        of("dma_access: "),
        format!("{device} dir=TO_DEVICE dma_addr=ffe010 size=16")
    );
}

/// An access that no map explains names a physical address if the device bypasses the IOMMU, or if
/// its maps precede the trace.
#[test]
fn anonymised_accesses_outside_all_mappings_are_renamed() {
    const FRAME: &str = "23b7654";
    let lines = [
        "dma_access: 0000:00:03.0 dir=FROM_DEVICE dma_addr=23b7654c80 size=64",
        "dma_alloc: 0000:00:06.0 dir=BIDIRECTIONAL dma_addr=23b7654000 size=4096 \
        virt_addr=0000000000000001 flags=GFP_KERNEL attrs=",
        "dma_map_phys: 0000:00:04.0 dir=FROM_DEVICE dma_addr=fff000 size=4096 \
        phys_addr=23b7654000 attrs=",
        "dma_access: 0000:00:04.0 dir=FROM_DEVICE dma_addr=23b7654010 size=64",
        "dma_access: 0000:00:04.0 dir=FROM_DEVICE dma_addr=fff020 size=64",
    ];
    let lines = lines.iter().enumerate();
    let text: String = lines
        .map(|(at, line)| format!("  ringfence-0 [000] ..... 1.{at:06}: {line}\n"))
        .collect();
    let mut out = Vec::new();
    let options = TraceOptions::default();
    Anonymise::default()
        .run("t", text.as_bytes(), text.as_bytes(), &options, &mut out)
        .unwrap();
    let out = String::from_utf8(out).unwrap();
    assert!(!out.contains(FRAME), "{out}");
    let after = |key: &str, line: &str| {
        let rest = line.split_once(key).unwrap().1;
        u64::from_str_radix(rest.split(' ').next().unwrap(), 16).unwrap()
    };
    let line = |number: usize| out.lines().nth(number + 2).unwrap();
    let frame = after(" phys_addr=", line(2));
    // The page that a map names has one new address everywhere.
    assert_eq!(after(" dma_addr=", line(0)), frame + 0xc80);
    assert_eq!(after(" dma_addr=", line(1)), frame);
    assert_eq!(after(" dma_addr=", line(3)), frame + 0x10);
    // An address inside a mapping of a translated device stays.
    assert_eq!(after(" dma_addr=", line(4)), 0xfff020);
}
