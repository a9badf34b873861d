//! Calgary's unit: one flat table per host bridge.

use ringfence_hw::{CalgaryUnit, FaultRecord, HostBridge};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{CalgaryTce, Coherency, Table};
use ringfence_types::FaultReason::{
    AddressBeyondWidth, Blocked, NotPresent, ReadDenied, WriteDenied,
};
use ringfence_types::{Access, DomainId, Iova, Permissions, PhysAddr, PhysRange, RequesterId};

use crate::rig::{A, B, DISK, NIC, READ, RW, Seen, WRITE, arena, request, roomy, seen};

/// A device below no bridge.
const OUTSIDE: RequesterId = RequesterId::new(0x0500);
/// Two devices below the second bridge.
const ETHERNET: RequesterId = RequesterId::new(0x0300);
const STORAGE: RequesterId = RequesterId::new(0x0408);
/// The last page of the largest space.
const LAST: u64 = (1 << 32) - 0x1000;

/// An enabled unit without bridges, and memory for their tables.
struct Bridges<'m> {
    mem: &'m Arena,
    frames: Frames<&'m Arena>,
    unit: CalgaryUnit,
}

impl<'m> Bridges<'m> {
    fn new(mem: &'m Arena) -> Self {
        let region = PhysRange::new(PhysAddr::new(128 << 20), 64 << 20).unwrap();
        let mut unit = CalgaryUnit::calgary(&roomy());
        unit.enable();
        Self {
            mem,
            frames: Frames::new(mem, region),
            unit,
        }
    }

    /// Programs a bridge with an empty table.
    fn bridge(
        &mut self,
        buses: [u8; 2],
        domain: DomainId,
        format: CalgaryTce,
    ) -> Table<CalgaryTce> {
        let pages = Table::root_bytes_of(&format) / 4096;
        let root = self.frames.alloc_contiguous(pages).unwrap();
        let table = Table::at(format, domain, Coherency::Coherent, self.mem, root).unwrap();
        let [first_bus, last_bus] = buses;
        self.unit.set_bridge(HostBridge {
            first_bus,
            last_bus,
            domain,
            format,
            table: root,
        });
        table
    }

    fn map(&self, table: &Table<CalgaryTce>, iova: u64, pa: u64, permissions: Permissions) {
        let request = request(iova, pa, 1, permissions);
        table.map(self.mem, &self.frames, request).unwrap();
    }

    fn dma(&mut self, device: RequesterId, iova: u64, bytes: u64, access: Access) -> Seen {
        let iova = Iova::new(iova);
        let result = self.unit.translate(self.mem, device, iova, bytes, access);
        seen(result.map(|translation| translation.to_vec()))
    }
}

#[test]
fn a_flat_table_is_walked_in_one_step() {
    let mem = arena();
    let mut rig = Bridges::new(&mem);
    let table = rig.bridge([1, 2], A, CalgaryTce::FULL);
    for (iova, pa, permissions) in [
        (0x1000, 0x7000, RW),
        (0x2000, 0xff_ffff_f000, Permissions::READ),
        (LAST, 0x9000, RW),
    ] {
        rig.map(&table, iova, pa, permissions);
    }
    let cases: [(RequesterId, u64, u64, Access, Seen); 7] = [
        (NIC, 0x1010, 4, WRITE, Ok(vec![(0x7010, 4)])),
        (
            DISK,
            0x1ff8,
            16,
            READ,
            Ok(vec![(0x7ff8, 8), (0xff_ffff_f000, 8)]),
        ),
        (NIC, 0x1ff8, 16, WRITE, Err((0x2000, WriteDenied))),
        (NIC, 0x3000, 1, READ, Err((0x3000, NotPresent))),
        (NIC, LAST, 0x1000, READ, Ok(vec![(0x9000, 0x1000)])),
        (NIC, LAST, 0x1001, READ, Err((1 << 32, AddressBeyondWidth))),
        (OUTSIDE, 0x1000, 1, READ, Err((0x1000, Blocked))),
    ];
    for (device, iova, bytes, access, outcome) in cases {
        assert_eq!(rig.dma(device, iova, bytes, access), outcome, "{iova:#x}");
    }
    // 0x1000 was walked once and 0x2000 hit after its fill. The unmapped and the last address were
    // walked once each, with one reference per walk.
    let stats = rig.unit.stats();
    assert_eq!(stats.walk_references, stats.iotlb_misses);
    assert_eq!(rig.unit.walk_caches_live(), [0; 3]);
}

/// One I/O space of up to 4 GiB per host bridge, shared by all devices below it (CG02). Devices of
/// one bridge never reach the space of another, cached or not.
#[test]
fn each_bridge_has_a_space_of_its_own() {
    let mem = arena();
    let mut rig = Bridges::new(&mem);
    let first = rig.bridge([1, 2], A, CalgaryTce::FULL);
    let small = CalgaryTce::new(25).unwrap();
    let second = rig.bridge([3, 4], B, small);
    rig.map(&first, 0x1000, 0x7000, RW);
    rig.map(&first, 0x2000, 0x8000, RW);
    rig.map(&first, LAST, 0x9000, RW);
    rig.map(&second, 0x1000, 0xa000, RW);
    rig.map(&second, 0x4000, 0xb000, RW);
    // Address, outcome below the first bridge, outcome below the second.
    let cases: [(u64, Seen, Seen); 5] = [
        (0x1010, Ok(vec![(0x7010, 1)]), Ok(vec![(0xa010, 1)])),
        (0x2010, Ok(vec![(0x8010, 1)]), Err((0x2010, NotPresent))),
        (0x4010, Err((0x4010, NotPresent)), Ok(vec![(0xb010, 1)])),
        // 32 MiB is the end of the second space; 4 GiB is the end of the first.
        (LAST, Ok(vec![(0x9000, 1)]), Err((LAST, AddressBeyondWidth))),
        (
            1 << 32,
            Err((1 << 32, AddressBeyondWidth)),
            Err((1 << 32, AddressBeyondWidth)),
        ),
    ];
    // The second round hits what the first has cached.
    for round in 0..2 {
        for (iova, in_first, in_second) in &cases {
            for device in [NIC, DISK] {
                let seen = rig.dma(device, *iova, 1, WRITE);
                assert_eq!(&seen, in_first, "{device} at {iova:#x}, round {round}");
            }
            for device in [ETHERNET, STORAGE] {
                let seen = rig.dma(device, *iova, 1, WRITE);
                assert_eq!(&seen, in_second, "{device} at {iova:#x}, round {round}");
            }
            let seen = rig.dma(OUTSIDE, *iova, 1, WRITE);
            assert_eq!(seen, Err((*iova, Blocked)), "round {round}");
        }
    }
    // Devices of one bridge share cached translations: three entries and two.
    assert_eq!(rig.unit.iotlb_live(), 5);
    // A new table of the second bridge replaces that bridge and leaves the first.
    let _empty = rig.bridge([3, 4], B, small);
    assert_eq!(rig.dma(NIC, 0x1010, 1, WRITE), Ok(vec![(0x7010, 1)]));
    assert_eq!(
        rig.dma(STORAGE, 0x1010, 1, WRITE),
        Err((0x1010, NotPresent))
    );
}

/// A removed bridge blocks its devices at once, also at cached addresses, and no others.
#[test]
fn a_bridge_without_a_table_blocks_its_devices() {
    let mem = arena();
    let mut rig = Bridges::new(&mem);
    let first = rig.bridge([1, 2], A, CalgaryTce::FULL);
    let second = rig.bridge([3, 4], B, CalgaryTce::FULL);
    rig.map(&first, 0x1000, 0x7000, RW);
    rig.map(&second, 0x1000, 0xa000, RW);
    assert_eq!(rig.dma(STORAGE, 0x1000, 1, READ), Ok(vec![(0xa000, 1)]));
    rig.unit.clear_bridge(3);
    for device in [ETHERNET, STORAGE] {
        assert_eq!(rig.dma(device, 0x1000, 1, READ), Err((0x1000, Blocked)));
    }
    assert_eq!(rig.dma(NIC, 0x1000, 1, READ), Ok(vec![(0x7000, 1)]));
    rig.unit.clear_bridge(9);
    assert_eq!(rig.dma(NIC, 0x1000, 1, READ), Ok(vec![(0x7000, 1)]));
}

/// An access without an entry, or with one that lacks the right, is stopped, and the unit reports
/// it with device, page and access (CG03).
#[test]
fn stopped_accesses_are_reported() {
    let mem = arena();
    let mut rig = Bridges::new(&mem);
    let table = rig.bridge([1, 2], A, CalgaryTce::FULL);
    rig.map(&table, 0x1000, 0x7000, Permissions::READ);
    rig.map(&table, 0x2000, 0x8000, Permissions::WRITE);
    // Neither access is reported.
    assert_eq!(rig.dma(NIC, 0x1010, 4, READ), Ok(vec![(0x7010, 4)]));
    assert_eq!(rig.dma(NIC, 0x2010, 4, WRITE), Ok(vec![(0x8010, 4)]));
    assert_eq!(rig.unit.faults().take(), None);
    // Device, address, access, reason, and the code of the record.
    let cases = [
        (NIC, 0x1010, WRITE, WriteDenied, 5),
        (DISK, 0x2010, READ, ReadDenied, 6),
        (NIC, 0x3010, READ, NotPresent, 6),
        (DISK, 0x3010, WRITE, NotPresent, 5),
        (OUTSIDE, 0x1010, READ, Blocked, 2),
    ];
    for (device, iova, access, reason, code) in cases {
        let seen = rig.dma(device, iova, 4, access);
        assert_eq!(seen, Err((iova, reason)), "{access} at {iova:#x}");
        let record = FaultRecord {
            source: device,
            page: Iova::new(iova & !0xfff),
            access,
            reason: code,
        };
        assert_eq!(rig.unit.faults().take(), Some(record), "{reason}");
        assert_eq!(rig.unit.faults().take(), None, "{reason}");
    }
    assert_eq!(rig.unit.stats().faults, 5);
}
