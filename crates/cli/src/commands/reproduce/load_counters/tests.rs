use super::*;

const COUNTED: &str = "[    3.505141] dma_count: loading out-of-tree module taints kernel.\r
[    3.506198] dma_count: 0000:00:04.0: 120320 for 256 maps and unmaps\r
[    3.606198] dma_count: 0000:00:04.0: 85504 for 256 maps and unmaps\r
[    3.706198] dma_count: 0000:00:04.0: 5 for 0 maps and unmaps\r
";
const READ: &str = "100 reads of 4096 bytes\r
operations: 200\r
waited: 96 of them, 11036 ns of work the median, 11030 the cheapest, 18484 the dearest\r
at once: 4 of them, 9000 ns of work the median, 9000 the cheapest, 9001 the dearest\r
";
const SENT: &str = "operations: 400\r\nsent: 200 of them, 900000 ns of work together\r\n";

/// The module's counters of two devices with three rings.
fn debugfs(disk: u32, net: u32) -> String {
    let line = |address: &str, name: &str, value: u32| {
        format!("/sys/kernel/debug/riommu/0000:00:03.0/0000:00:{address}/{name}:{value}\r\n")
    };
    [
        line("04.0", "read/unmaps", disk),
        line("04.0", "write/unmaps", 2 * disk),
        line("04.0", "both/unmaps", 1),
        line("04.0", "write/maps", 7),
        line("05.0", "read/unmaps", net),
        line("05.0", "read/invalidations", 9),
    ]
    .concat()
}

fn metric(name: &str, device: &str, value: u32) -> String {
    format!("ringfence_{name}_total{{device=\"{device}\"}} {value}\n")
}

/// Counters whose differences between two checkpoints all differ.
fn metrics(iommu: &str, step: u32) -> String {
    [
        metric("messages", "blk", 3),
        metric("messages", iommu, 10 + 600 * step),
        metric("doorbells", iommu, 1000 * step),
        metric("doorbells", "blk", 5 + 200 * step),
        metric("doorbells", "net", 6 + 100 * step),
        metric("unmaps", iommu, 7 + 800 * step),
        metric("unit_invalidations", "blk", 77 * step),
    ]
    .concat()
}

#[test]
fn counts_are_differences_of_the_loads_own_checkpoints() {
    let ring =
        |step: u32| metrics("riommu", step) + &metric("unit_invalidations", "riommu", 60 * step);
    let checkpoints = [
        (COUNTED.to_owned() + &debugfs(100, 1), ring(0)),
        (READ.to_owned() + &debugfs(200, 2), ring(1)),
        (debugfs(300, 50), ring(1)),
        (SENT.to_owned() + &debugfs(300, 450), ring(3)),
    ];
    let loads = [Load::Read4K, Load::Stream];
    let found = counts(&loads, Machine::Ringfence, &checkpoints).unwrap();
    let read = LoadCounts {
        instructions: 11036.0,
        spread: 0.0,
        exits: 3.0,
        device_exits: Some(1.0),
        invalidations: 0.3,
        unmaps: Some(1.5),
    };
    let stream = LoadCounts {
        instructions: 4500.0,
        spread: 0.0,
        exits: 3.0,
        device_exits: Some(0.5),
        invalidations: 0.3,
        unmaps: Some(1.0),
    };
    assert_eq!(found.loads, [(Load::Read4K, read), (Load::Stream, stream)]);
    // The smaller mean, and not the one of no pairs.
    assert_eq!(found.map_unmap, 334.0);
    assert_eq!((found.uncopied, found.exposure), (None, None));
}

/// The instructions are the median of several rounds; the other counts are those of all.
#[test]
fn rounds_have_a_median_and_a_spread() {
    let round =
        |work: u32| format!("operations: 100\r\nsent: 50 of them, {work} ns of work together\r\n");
    let rounds = [round(600_000), round(450_000), round(500_000)].concat();
    let checkpoints = [
        (COUNTED.to_owned(), metrics("iommu", 0)),
        (rounds, metrics("iommu", 1)),
    ];
    let found = counts(&[Load::Stream], Machine::Ringfence, &checkpoints).unwrap();
    let [(_, stream)] = found.loads[..] else {
        panic!()
    };
    assert_eq!((stream.instructions, stream.spread), (10_000.0, 3000.0));
    assert_eq!((stream.exits, stream.device_exits), (2.0, Some(1.0 / 3.0)));
}

/// A pool has one file of counters for each device, and a separate count without the copy.
#[test]
fn counters_of_a_pool_are_parsed() {
    let pool = |unmaps: u32| {
        format!(
            "/sys/kernel/debug/pooldma/0000:00:04.0:unmaps 3\r\n\
             /sys/kernel/debug/pooldma/0000:00:06.0:maps 4\r\n\
             /sys/kernel/debug/pooldma/0000:00:06.0:unmaps {unmaps}\r\n"
        )
    };
    // Neither mean is taken for the other, whichever is smaller.
    for each in [200, 400] {
        let (copied, copy) = ((each + 4096) * 256, 4096 * 256);
        let uncopied = format!(
            "{UNCOPIED}\r\n[1] dma_count: x: {copied} for 256 maps and unmaps\r\n\
             [2] dma_count: x: {copy} for 256 copies\r\n\
             [3] dma_count: x: {} for 256 copies\r\n",
            copy + 256
        );
        let checkpoints = [
            (COUNTED.to_owned() + &uncopied + &pool(50), String::new()),
            (READ.to_owned() + &pool(250), String::new()),
        ];
        let found = counts(&[Load::Read4K], Machine::Qemu, &checkpoints).unwrap();
        let expected = (334.0, Some(each.into()));
        assert_eq!((found.map_unmap, found.uncopied), expected);
        assert_eq!(found.loads[0].1.unmaps, Some(1.0));
    }
}

/// The loads of an NVMe disk are counted at the address of the disk, and its doorbells are `blk`.
#[test]
fn nvme_loads_are_counted_at_their_disk() {
    let checkpoints = [
        (COUNTED.to_owned() + &debugfs(100, 1), metrics("riommu", 0)),
        (READ.to_owned() + &debugfs(200, 2), metrics("riommu", 1)),
    ];
    for load in [Load::NvmeRead4K, Load::NvmeRead128K] {
        let found = counts(&[load], Machine::Ringfence, &checkpoints).unwrap();
        let [(_, read)] = found.loads[..] else {
            panic!()
        };
        assert_eq!((read.device_exits, read.unmaps), (Some(1.0), Some(1.5)));
    }
}

/// The guest of the second bus adds its loads, and nothing else.
#[test]
fn loads_of_all_guests_have_the_other_counts_of_the_first() {
    let guest = |load, map_unmap: u32| {
        let counted = format!("[1] dma_count: x: {map_unmap} for 1 maps and unmaps\r\n");
        let checkpoints = [
            (counted, metrics("iommu", 0)),
            (READ.to_owned(), metrics("iommu", 1)),
        ];
        counts(&[load], Machine::Ringfence, &checkpoints).unwrap()
    };
    let (first, second) = (guest(Load::Read4K, 334), guest(Load::NvmeRead4K, 400));
    let both = merged(vec![first.clone(), second.clone()]).unwrap();
    assert_eq!(both.loads, [first.loads.clone(), second.loads].concat());
    assert_eq!((both.map_unmap, both.exposure), (334.0, first.exposure));
    assert_eq!(merged(Vec::new()), None);
}

/// Unmap requests stand for the invalidations of a para-virtual IOMMU.
#[test]
fn requests_of_a_para_virtual_iommu_are_its_invalidations() {
    for iommu in ["iommu", "pviommu"] {
        let checkpoints = [
            (COUNTED.to_owned(), metrics(iommu, 0)),
            (READ.to_owned(), metrics(iommu, 1)),
        ];
        let found = counts(&[Load::Read4K], Machine::Ringfence, &checkpoints).unwrap();
        let [(_, read)] = found.loads[..] else {
            panic!()
        };
        assert_eq!((read.exits, read.invalidations), (3.0, 4.0), "{iommu}");
        assert_eq!(read.unmaps, None);
    }
}

#[test]
fn trace_of_qemu_is_counted() {
    let log = "vtd_inv_qi_tail write tail 12\n\
               vtd_inv_desc_iotlb_pages invalidate domain 0x2 addr 0x1000 mask 0x0\n\
               vtd_inv_desc_iotlb_domain iotlb invalidate domain 0x2\n\
               vtd_inv_desc_wait_sw invalidate completion\n\
               vtd_inv_qi_tail write tail 14\nvtd_inv_qi_tail write tail 16\n";
    let text = trace_counters(log);
    assert_eq!(
        counter(&text, "qemu_invalidations", "intel-iommu"),
        Some(2.0)
    );
    assert_eq!(counter(&text, "qemu_tail_writes", "intel-iommu"), Some(3.0));
    let twice = log.repeat(200);
    let blk = metric("doorbells", "blk", 8);
    let checkpoints = [
        (COUNTED.to_owned(), blk.clone() + &trace_counters(log)),
        (READ.to_owned(), blk + &trace_counters(&twice)),
    ];
    let found = counts(&[Load::Read4K], Machine::Qemu, &checkpoints).unwrap();
    let [(_, read)] = found.loads[..] else {
        panic!()
    };
    assert_eq!((read.exits, read.invalidations), (2.985, 1.99));
    // The counted disk is QEMU's own, and its doorbells are not those of this program's disk.
    assert_eq!(read.device_exits, None);
}

#[test]
fn incomplete_guests_are_not_counted() {
    let begin = (COUNTED.to_owned(), metrics("iommu", 0));
    let end = (READ.to_owned(), metrics("iommu", 1));
    let of = |checkpoints: &[Checkpoint]| counts(&[Load::Read4K], Machine::Ringfence, checkpoints);
    assert!(of(&[begin.clone(), end.clone()]).is_ok());
    for (wrong, why) in [
        (vec![begin.clone()], "1 checkpoints, not 2"),
        (
            vec![(String::new(), begin.1.clone()), end.clone()],
            "dma_count",
        ),
        (
            vec![begin.clone(), (String::new(), end.1.clone())],
            "no operations",
        ),
        (
            vec![begin.clone(), ("operations: 9\n".into(), end.1.clone())],
            "no instructions",
        ),
        // The device that is counted served nothing.
        (
            vec![begin.clone(), (end.0.clone(), begin.1.clone())],
            "received nothing",
        ),
    ] {
        let error = of(&wrong).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn accesses_after_unmap_are_reached_or_stopped() {
    let of = |reached, stopped: u32| {
        exposure(
            &[
                metric("injected_permitted", "blk", reached),
                metric("faults", "blk", 0),
                metric("faults", "riommu", stopped),
            ]
            .concat(),
        )
    };
    let one = |reached| Ok(Some(StaleAccesses { tried: 1, reached }));
    assert_eq!(of(0, 0), Ok(None));
    assert_eq!(of(1, 0), one(1));
    assert_eq!(of(0, 1), one(0));
    // A further stopped access is one that the driver intended.
    assert!(of(1, 1).is_err());
    assert!(of(0, 2).is_err());
}
