//! The recorded addresses: ranges, devices and order.

use std::io::Cursor;

use ringfence_trace::{AddressKind, Chunk, Operations, TraceOptions};

/// Returns the addresses of a text: line, CPU, device, kind, first page and number of pages.
fn addresses(lines: &[&str]) -> Vec<(u64, u16, Option<u16>, AddressKind, u64, u64)> {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let options = TraceOptions::default().with_addresses();
    let mut operations = Operations::new("t", Cursor::new(text.into_bytes()), options);
    let (mut chunk, mut found) = (Chunk::default(), Vec::new());
    while operations.next_chunk(&mut chunk).unwrap() {
        assert!(
            chunk.addresses.len() <= Chunk::OPS + 1,
            "a chunk is bounded"
        );
        found.extend(chunk.addresses.iter().map(|event| {
            let range = event.range;
            let device = event.device.map(|device| device.0);
            let (lo, pages) = (range.lo().get(), range.pages());
            (event.line, event.cpu, device, event.kind, lo, pages)
        }));
    }
    found
}

use AddressKind::{Allocated, Freed};

/// The range of a call is that of its `iommu:*` lines, and its place is that of the first one.
#[test]
fn calls_have_the_place_of_their_iommu_lines() {
    let found = addresses(&[
        // A list of two pieces, with an interrupt in between that maps for another device.
        "t-1 [000] ..... 1.0: map: IOMMU: iova=0xfff0e000 - 0xfff0f000 paddr=0x7000 size=4096",
        "t-1 [000] ..h.. 2.0: map: IOMMU: iova=0xffffe000 - 0xfffff000 paddr=0x5000 size=4096",
        "t-1 [000] ..h.. 3.0: dma_map_phys: 0000:00:04.0 dir=TO_DEVICE dma_addr=ffffe010 size=8 \
         phys_addr=5010 attrs=",
        "t-1 [000] ..... 4.0: map: IOMMU: iova=0xfff0f000 - 0xfff11000 paddr=0x9000 size=8192",
        "t-1 [000] ..... 5.0: dma_map_sg: 0000:00:03.0 dir=TO_DEVICE nents=2/2 ents=1/1 \
         dma_addrs={0xfff0e000} sizes={0x3000} phys_addrs={0x7000,0x9000} attrs=",
        // The iommu:unmap line of a list and of a coherent buffer follows, that of a page precedes.
        "t-1 [001] ..... 6.0: dma_unmap_sg: 0000:00:03.0 dir=TO_DEVICE phys_addrs={0x7000,0x9000} \
         attrs=",
        "t-1 [000] ..... 7.0: unmap: IOMMU: iova=0xffffe000 - 0xfffff000 size=4096 \
         unmapped_size=4096",
        "t-1 [001] ..... 8.0: unmap: IOMMU: iova=0xfff0e000 - 0xfff11000 size=12288 \
         unmapped_size=12288",
        "t-1 [000] ..... 9.0: dma_unmap_phys: 0000:00:04.0 dir=TO_DEVICE dma_addr=ffffe010 size=8 \
         attrs=",
    ]);
    // Devices are numbered in order of appearance: 04.0 is the first.
    assert_eq!(
        found,
        [
            (1, 0, Some(1), Allocated, 0xf_ff0e, 3),
            (2, 0, Some(0), Allocated, 0xf_fffe, 1),
            (7, 0, Some(0), Freed, 0xf_fffe, 1),
            (8, 1, Some(1), Freed, 0xf_ff0e, 3),
        ]
    );
}

/// Lines without a `dma:*` line belong to the only device, if there is one. Identity mappings are
/// no allocations.
#[test]
fn lines_alone_have_a_device_only_if_there_is_one() {
    let alone = [
        "t-1 [000] ..... 1.0: map: IOMMU: iova=0x1000000 - 0x2000000 paddr=0x1000000 size=16777216",
        "t-1 [000] ..... 2.0: map: IOMMU: iova=0xfffff000 - 0x100000000 paddr=0x7000 size=4096",
        "t-1 [000] ..... 3.0: dma_map_phys: 0000:00:03.0 dir=TO_DEVICE dma_addr=fffff000 size=8 \
         phys_addr=7000 attrs=",
        "t-2 [000] ..... 4.0: map: IOMMU: iova=0xffffe000 - 0xfffff000 paddr=0x8000 size=4096",
        "t-2 [000] ..... 5.0: unmap: IOMMU: iova=0xffffe000 - 0xfffff000 size=4096 \
         unmapped_size=4096",
        "t-2 [000] ..... 6.0: map: IOMMU: iova=0xffffd000 - 0xffffe000 paddr=0x9000 size=4096",
    ];
    let one = [
        (2, 0, Some(0), Allocated, 0xf_ffff, 1),
        (4, 0, Some(0), Allocated, 0xf_fffe, 1),
        (5, 0, Some(0), Freed, 0xf_fffe, 1),
    ];
    // The last line still waits at the end: its dma:* line may be cut off.
    assert_eq!(addresses(&alone), one);
    let second = "t-1 [001] ..... 0.0: dma_map_phys: 0000:00:04.0 dir=TO_DEVICE dma_addr=fffff000 \
                  size=8 phys_addr=7000 attrs=";
    let both: Vec<&str> = [second].into_iter().chain(alone).collect();
    let found: Vec<_> = addresses(&both);
    let unknown = one.map(|(line, cpu, device, kind, lo, pages)| {
        let device = device.filter(|_| line == 2).map(|_| 1);
        (line + 1, cpu, device, kind, lo, pages)
    });
    assert_eq!(found, unknown);
}

/// A reader that does not ask for addresses gets none, and the operations are the same.
#[test]
fn addresses_are_empty_by_default() {
    let read = |options: TraceOptions| {
        let sample = ringfence_trace::TraceSource::from_reader("s", ringfence_trace::SAMPLE);
        let mut operations = Operations::new("s", sample.unwrap(), options);
        let (mut chunk, mut ops, mut addresses) = (Chunk::default(), Vec::new(), 0);
        while operations.next_chunk(&mut chunk).unwrap() {
            ops.extend(chunk.ops.iter().copied());
            addresses += chunk.addresses.len();
        }
        (ops, addresses)
    };
    let (ops, none) = read(TraceOptions::default());
    let (same, all) = read(TraceOptions::default().with_addresses());
    assert_eq!(none, 0);
    // One for each map and each unmap.
    assert_eq!(all, ops.len());
    assert!(ops == same);
}
