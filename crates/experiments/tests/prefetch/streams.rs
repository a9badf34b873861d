//! Streams of traces without DMAs.

use ringfence_experiments::prefetch::{BufferEvent, recorded};

use super::lines::{DISK, NIC, line, map, unmap};

#[test]
fn a_trace_gives_the_addresses_that_it_prints() {
    use BufferEvent::{EndBurst, Map, Unmap, Use};
    let text = [
        line(0, 0, &map(NIC, "FROM_DEVICE", 0xff00_0840, 100)),
        line(0, 1, &map(NIC, "FROM_DEVICE", 0xff00_2ff0, 0x1011)),
        line(0, 2, &map(NIC, "TO_DEVICE", 0xff00_5000, 1)),
        line(
            0,
            3,
            "dma_alloc: 0000:00:03.0 dir=BIDIRECTIONAL dma_addr=ff009000 size=4096 \
            virt_addr=0000000000000001 flags=GFP_KERNEL",
        ),
        line(0, 4, &unmap(NIC, "FROM_DEVICE", 0xff00_0840, 100)),
        line(0, 5, &unmap(NIC, "FROM_DEVICE", 0xff00_2ff0, 0x1011)),
        // This map is on another ring, so the burst stays open. The next map ends it.
        line(0, 6, &map(NIC, "TO_DEVICE", 0xff00_6000, 1)),
        line(0, 7, &map(NIC, "FROM_DEVICE", 0xff00_0840, 100)),
        // An unmap on another CPU, and one after the burst's 50 us.
        line(1, 8, &unmap(NIC, "FROM_DEVICE", 0xff00_0840, 100)),
        line(0, 58, &unmap(NIC, "TO_DEVICE", 0xff00_5000, 1)),
        // The unmap of an unmapped address has no effect. A replaced mapping counts as unused.
        line(0, 59, &unmap(NIC, "TO_DEVICE", 0xff00_5000, 1)),
        line(0, 60, &map(NIC, "TO_DEVICE", 0xff00_6000, 1)),
    ]
    .concat();
    let streams = recorded::streams("t", text.as_bytes()).unwrap();
    let [stream] = &streams[..] else {
        panic!("{streams:?}")
    };
    assert_eq!(stream.name, "t 0000:00:03.0");
    assert_eq!(
        (stream.rings(), stream.ring_entries(), stream.live_pages()),
        (2, 4, 5)
    );
    let pages = |buffer| -> Vec<(u64, u64)> {
        let ranges = stream.pages(buffer).iter();
        ranges
            .map(|range| (range.lo().get(), range.hi().get()))
            .collect()
    };
    assert_eq!(pages(0), [(0xff000, 0xff000)]);
    assert_eq!(pages(1), [(0xff002, 0xff004)]);
    assert_eq!(pages(2), [(0xff005, 0xff005)]);
    assert_eq!(
        [0, 1, 2, 3, 4].map(|buffer| stream.ring_position(buffer)),
        [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
    );
    let expected = [
        Map(0),
        Map(1),
        Map(2),
        Use(0),
        Unmap(0),
        Use(1),
        Unmap(1),
        Map(3),
        EndBurst(0),
        Map(4),
        Use(4),
        Unmap(4),
        EndBurst(0),
        Use(2),
        Unmap(2),
        // The replaced mapping, then the burst that the new one ends.
        Unmap(3),
        EndBurst(1),
        Map(5),
    ];
    assert_eq!(stream.events(), expected);
}

#[test]
fn scatterlists_are_matched_per_device() {
    use BufferEvent::{EndBurst, Map, Unmap, Use};
    let list = |addrs: &str, starts: &str| {
        format!(
            "dma_map_sg: {DISK} dir=TO_DEVICE nents=2/2 ents=2/2 dma_addrs={{{addrs}}} \
            sizes={{0x1000,0x2000}} phys_addrs={{{starts}}}"
        )
    };
    let end = |starts: &str| format!("dma_unmap_sg: {DISK} dir=TO_DEVICE phys_addrs={{{starts}}}");
    let text = [
        line(0, 0, &list("0xff000000,0xff010000", "0x1000,0x8000")),
        line(0, 1, &map(NIC, "TO_DEVICE", 0xff00_0000, 1)),
        line(0, 2, &list("0xff020000,0xff030000", "0x1000,0x9000")),
        line(0, 3, &end("0x1000,0x9000")),
        line(0, 4, &end("0x1000,0xa000")),
        line(0, 5, &end("0x1000,0x8000")),
    ]
    .concat();
    let streams = recorded::streams("t", text.as_bytes()).unwrap();
    let [disk, nic] = &streams[..] else {
        panic!("{streams:?}")
    };
    assert_eq!(
        (disk.name.as_str(), nic.name.as_str()),
        ("t 0000:00:1f.2", "t 0000:00:03.0")
    );
    assert_eq!(nic.events(), [Map(0)]);
    assert_eq!(
        disk.events(),
        [
            Map(0),
            Map(1),
            Use(1),
            Unmap(1),
            Use(0),
            Unmap(0),
            EndBurst(0)
        ]
    );
    let pages: Vec<u64> = disk.pages(0).iter().map(|range| range.lo().get()).collect();
    assert_eq!(pages, [0xff000, 0xff010]);
    assert_eq!((disk.live_pages(), disk.ring_entries()), (6, 2));
}
