//! The rules of `docs/TRACES.md`, with one small trace each.

use ringfence_trace::{Attribution, Chunk, MapFlags, OpKind, Operations, Summary, TraceOptions};

/// Returns the operations in short form: `map device id class direction [start+bytes ...] flags
/// lines`, `unmap id lines`.
fn run_with(lines: &[&str], options: TraceOptions) -> (Vec<String>, Summary) {
    let mut text = String::new();
    for (number, line) in lines.iter().enumerate() {
        // A line of a case is `CPU LEVEL PID event`, so that the case shows its context.
        let (cpu, rest) = line.split_once(' ').unwrap();
        let (level, rest) = rest.split_once(' ').unwrap();
        let (pid, event) = rest.split_once(' ').unwrap();
        text += &format!("    task-{pid} [{cpu}] ..{level}.. 1.{number:06}: {event}\n");
    }
    let mut operations = Operations::new("case", text.as_bytes(), options);
    let mut chunk = Chunk::default();
    let mut out = Vec::new();
    while operations.next_chunk(&mut chunk).unwrap() {
        for op in &chunk.ops {
            out.push(match op.kind {
                OpKind::Map {
                    id,
                    direction,
                    class,
                    flags,
                    segments,
                } => {
                    let segments: Vec<String> = chunk
                        .segments_of(segments)
                        .iter()
                        .map(|segment| format!("{:x}+{:x}", segment.start().get(), segment.bytes()))
                        .collect();
                    let device = &operations.devices().get(op.device).unwrap().name;
                    let flags = if flags == MapFlags::NONE {
                        String::new()
                    } else {
                        format!(" {flags:?}")
                    };
                    format!(
                        "map {device} {} {class:?} {direction} {}{flags} {}",
                        id.0,
                        segments.join(" "),
                        op.lines
                    )
                }
                OpKind::Unmap { id } => format!("unmap {} {}", id.0, op.lines),
            });
        }
    }
    (out, operations.summary().clone())
}

fn run(lines: &[&str]) -> (Vec<String>, Summary) {
    run_with(lines, TraceOptions::default())
}

const DMA: &str =
    "0 . 1 dma_map_phys: d dir=TO_DEVICE dma_addr=1000 size=100 phys_addr=5000 attrs=";

#[test]
fn an_interrupt_nests_between_the_lines_of_a_call() {
    let (ops, summary) = run(&[
        "0 . 1 map: IOMMU: iova=0xa000 - 0xb000 paddr=0x5000 size=4096",
        "0 h 1 unmap: IOMMU: iova=0xc000 - 0xd000 size=4096 unmapped_size=4096",
        "0 h 1 dma_unmap_phys: d dir=TO_DEVICE dma_addr=c010 size=8 attrs=",
        "0 h 1 map: IOMMU: iova=0xa000 - 0xb000 paddr=0x9000 size=4096",
        "0 h 1 dma_map_phys: e dir=FROM_DEVICE dma_addr=a010 size=8 phys_addr=9010 attrs=",
        "0 . 1 dma_map_phys: d dir=TO_DEVICE dma_addr=a020 size=8 phys_addr=5020 attrs=",
    ]);
    assert_eq!(
        ops,
        [
            "map e 0 Single from-device 9010+8 2",
            "map d 1 Single to-device 5020+8 2",
        ]
    );
    assert_eq!(
        (
            summary.unmatched_unmaps,
            summary.iommu_only_maps,
            summary.setup_maps
        ),
        (1, 0, 0)
    );
}

#[test]
fn ids_are_used_again_and_a_live_key_is_replaced() {
    let unmap = "0 . 1 dma_unmap_phys: d dir=TO_DEVICE dma_addr=1000 size=100 attrs=";
    let (ops, summary) = run(&[DMA, DMA, unmap, unmap, DMA]);
    assert_eq!(
        ops,
        [
            "map d 0 Single to-device 5000+64 1",
            "unmap 0 0",
            "map d 0 Single to-device 5000+64 {replaces} 1",
            "unmap 0 1",
            "map d 0 Single to-device 5000+64 1",
        ]
    );
    assert_eq!(
        (
            summary.replaced,
            summary.unmatched_unmaps,
            summary.live_at_end
        ),
        (1, 1, 1)
    );
}

#[test]
fn a_scatterlist_is_known_by_device_direction_and_list() {
    let map = |device, dir, dma| {
        format!(
            "0 . 1 dma_map_sg: {device} dir={dir} nents=1/1 ents=1/1 dma_addrs={{{dma}}} \
            sizes={{0x10}} phys_addrs={{0x5000}} attrs="
        )
    };
    let unmap = |device, dir| {
        format!("0 . 1 dma_unmap_sg: {device} dir={dir} phys_addrs={{0x5000}} attrs=")
    };
    let lines = [
        map("d", "TO_DEVICE", "0x1000"),
        map("d", "FROM_DEVICE", "0x2000"),
        map("e", "TO_DEVICE", "0x3000"),
        map("d", "TO_DEVICE", "0x4000"),
        unmap("d", "FROM_DEVICE"),
        unmap("e", "TO_DEVICE"),
        unmap("d", "TO_DEVICE"),
        unmap("d", "TO_DEVICE"),
        unmap("d", "BIDIRECTIONAL"),
    ];
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    let (ops, summary) = run(&lines);
    assert_eq!(
        ops[4..],
        ["unmap 1 1", "unmap 2 1", "unmap 0 1", "unmap 3 1"]
    );
    assert_eq!((summary.unmatched_unmaps, summary.replaced), (1, 0));
}

#[test]
fn a_scatterlist_mapped_again_at_its_address_is_replaced() {
    let map = |dma| {
        format!(
            "0 . 1 dma_map_sg: d dir=TO_DEVICE nents=1/1 ents=1/1 dma_addrs={{{dma}}} \
            sizes={{0x10}} phys_addrs={{0x5000}} attrs="
        )
    };
    let unmap = "0 . 1 dma_unmap_sg: d dir=TO_DEVICE phys_addrs={0x5000} attrs=";
    let addresses = ["0x1000", "0x2000", "0x3000"];
    // Mappings of one list at three addresses. Each in turn is mapped again at its address.
    for (again, ended) in [(0, [1, 2, 0]), (1, [0, 2, 1]), (2, [0, 1, 2])] {
        let mut lines: Vec<String> = addresses.map(map).to_vec();
        lines.push(map(addresses[again]));
        lines.extend([unmap; 4].map(str::to_owned));
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let (ops, summary) = run(&lines);
        let mut expected = vec![
            format!("unmap {again} 0"),
            format!("map d {again} Sg to-device 5000+10 {{replaces}} 1"),
        ];
        expected.extend(ended.map(|id| format!("unmap {id} 1")));
        assert_eq!(ops[3..], expected);
        assert_eq!((summary.replaced, summary.unmatched_unmaps), (1, 1));
    }
}

#[test]
fn ranges_without_a_dma_line() {
    let lines = [
        // Before the first device: belongs to no device.
        "0 . 9 map: IOMMU: iova=0x80000 - 0x81000 paddr=0x7000 size=4096",
        "0 . 1 dma_sync_single_for_cpu: d dir=TO_DEVICE dma_addr=0 size=1",
        // An identity map: belongs to no device.
        "0 . 9 map: IOMMU: iova=0xe000 - 0xf000 paddr=0xe000 size=4096",
        // Two pieces of one request. A third is adjacent but cannot belong to the same allocation:
        // 12 KiB from 0x2000 on is not aligned to 16 KiB.
        "0 . 1 map: IOMMU: iova=0x2000 - 0x3000 paddr=0x5000 size=4096",
        "0 . 1 map: IOMMU: iova=0x3000 - 0x4000 paddr=0x9000 size=4096",
        "0 . 1 map: IOMMU: iova=0x4000 - 0x5000 paddr=0xb000 size=4096",
        "0 h 1 unmap: IOMMU: iova=0x2000 - 0x4000 size=8192 unmapped_size=8192",
        "0 . 1 unmap: IOMMU: iova=0x4000 - 0x5000 size=4096 unmapped_size=4096",
        "0 . 1 unmap: IOMMU: iova=0x4000 - 0x5000 size=4096 unmapped_size=4096",
        // A part of a mapping is unmapped.
        "0 . 1 map: IOMMU: iova=0x8000 - 0xc000 paddr=0x10000 size=16384",
        "0 . 2 unmap: IOMMU: iova=0x9000 - 0xa000 size=4096 unmapped_size=4096",
        "0 . 1 tracing_mark_write: end",
        "0 . 2 tracing_mark_write: end",
        "0 . 9 tracing_mark_write: end",
    ];
    let expected = [
        "map d 0 IommuOnly bidirectional 5000+1000 9000+1000 2",
        "map d 1 IommuOnly bidirectional b000+1000 1",
        "unmap 0 1",
        "unmap 1 1",
        "map d 1 IommuOnly bidirectional 10000+4000 1",
        "unmap 1 1",
        "map d 1 IommuOnly bidirectional 10000+1000 {remainder} 0",
        "map d 0 IommuOnly bidirectional 12000+2000 {remainder} 0",
    ];
    let (ops, summary) = run(&lines);
    assert_eq!(ops, expected);
    assert_eq!(
        (
            summary.setup_maps,
            summary.unmatched_iommu_unmaps,
            summary.remainders
        ),
        (2, 1, 2)
    );
    // Lines that still wait at the end of the trace are neither operations nor unmatched.
    let (ops, cut) = run(&[
        lines[1],
        "0 . 1 unmap: IOMMU: iova=0x4000 - 0x5000 size=4096 unmapped_size=4096",
        "1 . 2 map: IOMMU: iova=0x2000 - 0x3000 paddr=0x5000 size=4096",
    ]);
    assert_eq!(ops, [""; 0]);
    assert_eq!(
        (
            cut.cut_lines,
            cut.iommu_only_maps,
            cut.unmatched_iommu_unmaps
        ),
        (2, 0, 0)
    );
    // Alignment alone separates adjacent requests.
    let (ops, _) = run(&[lines[1], lines[3], lines[4], lines[5], lines[11]]);
    assert_eq!(ops, [expected[0], expected[1]]);
    // A line of the task shows that the nested interrupt has ended.
    let (_, ended) = run(&[lines[1], lines[6], lines[11]]);
    assert_eq!((ended.unmatched_iommu_unmaps, ended.cut_lines), (1, 0));
    // A separate row on request.
    let options = || {
        let mut options = TraceOptions::default();
        options.attribution = Attribution::OwnRow;
        options
    };
    let (own, _) = run_with(&lines, options());
    assert_eq!(
        own,
        expected.map(|line| line.replace("map d", "map (iommu only)"))
    );
    // A separate row after a second device has appeared.
    let mut two = vec!["0 . 1 dma_sync_single_for_cpu: e dir=TO_DEVICE dma_addr=0 size=1"];
    two.extend(&lines[1..]);
    assert_eq!(run(&two).0, own);
}

#[test]
fn coherent_buffers_find_their_memory() {
    let alloc =
        "0 . 1 dma_alloc: d dir=BIDIRECTIONAL dma_addr=a000 size=5000 virt_addr=1 flags= attrs=";
    // From their `iommu:map` lines, exact to the byte.
    let pieces = [
        "0 . 1 map: IOMMU: iova=0xa000 - 0xb000 paddr=0x5000 size=4096",
        "0 . 1 map: IOMMU: iova=0xb000 - 0xc000 paddr=0x9000 size=4096",
        alloc,
        "0 . 1 dma_free: d dir=BIDIRECTIONAL dma_addr=a000 size=5000 virt_addr=1 attrs=",
        "0 . 1 unmap: IOMMU: iova=0xa000 - 0xc000 size=8192 unmapped_size=8192",
    ];
    let (ops, summary) = run(&pieces);
    assert_eq!(
        ops,
        [
            "map d 0 Coherent bidirectional 5000+1000 9000+388 3",
            "unmap 0 2"
        ]
    );
    assert_eq!(
        (
            summary.fresh_frames,
            summary.iommu_only_unmaps,
            summary.unmatched_iommu_unmaps
        ),
        (0, 0, 0)
    );
    // At the DMA address without an IOMMU.
    assert_eq!(
        run(&[alloc]).0,
        ["map d 0 Coherent bidirectional a000+1388 1"]
    );
    // Fresh frames, because the device's addresses are not physical.
    let (ops, summary) = run(&[DMA, alloc]);
    assert_eq!(
        ops[1],
        "map d 1 Coherent bidirectional 7fc0000000+1388 {fresh-frames} 1"
    );
    assert_eq!(summary.fresh_frames, 1);
}

#[test]
fn high_memory_is_renamed() {
    let (ops, summary) = run(&[
        "0 . 1 dma_map_phys: d dir=TO_DEVICE dma_addr=1000 size=16 phys_addr=1900000010 attrs=",
    ]);
    assert_eq!(ops, ["map d 0 Single to-device 1040000010+10 {renamed} 1"]);
    assert_eq!(summary.renamed, 1);
}

/// A field that a kernel adds does not hide the direction of a coherent buffer.
#[test]
fn an_added_field_hides_no_direction() {
    let (ops, summary) = run(&[
        "0 . 1 dma_alloc: d node=0 dir=TO_DEVICE dma_addr=a000 size=4 virt_addr=1 flags= attrs=",
        "0 . 1 dma_free: d node=0 dir=TO_DEVICE dma_addr=a000 size=4 virt_addr=1 attrs=",
    ]);
    assert_eq!(ops, ["map d 0 Coherent to-device a000+4 1", "unmap 0 1"]);
    assert_eq!(summary.unmatched_unmaps, 0);
}

/// The lines of an interrupt separate an `iommu:map` from its `dma:*` line. The window keeps the
/// map for 512 lines of its CPU, more than a nested network poll has, and for `look_ahead` lines.
#[test]
fn a_line_waits_up_to_its_limits() {
    let map = "0 . 1 map: IOMMU: iova=0x1000 - 0x2000 paddr=0x5000 size=4096";
    let own = "0 h 1 dma_sync_single_for_cpu: d dir=TO_DEVICE dma_addr=0 size=1";
    let other = "1 h 1 dma_sync_single_for_cpu: d dir=TO_DEVICE dma_addr=0 size=1";
    let explained = ["map d 0 Single to-device 5000+64 2"].as_slice();
    let unexplained = [
        "map d 0 IommuOnly bidirectional 5000+1000 1",
        "map d 1 Single to-device 5000+64 1",
    ]
    .as_slice();
    for (look_ahead, line, count, expected) in [
        (4096, own, 300, explained),
        (4096, own, 512, explained),
        (4096, own, 513, unexplained),
        (4096, other, 4095, explained),
        (4096, other, 4096, unexplained),
        (8, own, 7, explained),
        (8, own, 8, unexplained),
    ] {
        let mut lines = vec![own, map];
        lines.extend(std::iter::repeat_n(line, count));
        lines.push(DMA);
        let mut options = TraceOptions::default();
        options.look_ahead = look_ahead;
        let (ops, _) = run_with(&lines, options);
        assert_eq!(
            ops, expected,
            "{count} lines, look-ahead {look_ahead}: {line}"
        );
    }
}
