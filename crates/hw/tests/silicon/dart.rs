//! A DART: one table of 32-bit entries without access control, for all devices.

use ringfence_hw::DartUnit;
use ringfence_pgtable::{Coherency, Dart, DartTable, EmptyEntry};
use ringfence_types::FaultReason::{AddressBeyondWidth, Blocked, NotPresent};
use ringfence_types::{
    Access, Invalidation, Invalidator, Iova, Permissions, Pfn, PfnRange, PhysAddr,
};

use crate::rig::{A, DISK, NIC, READ, RW, Seen, WRITE, arena, request, roomy, seen};

const ROOT: PhysAddr = PhysAddr::new(128 << 20);
const SPARE: PhysAddr = PhysAddr::new(0x5000);
/// The first address beyond the 2 GiB of a DART.
const END: u64 = 1 << 31;

fn dma(
    unit: &mut DartUnit,
    mem: &ringfence_memory::Arena,
    device: ringfence_types::RequesterId,
    iova: u64,
    access: Access,
) -> Seen {
    let result = unit.translate(mem, device, Iova::new(iova), 1, access);
    seen(result.map(|translation| translation.to_vec()))
}

#[test]
fn all_devices_share_one_table_and_its_cache() {
    let mem = arena();
    let mut unit = DartUnit::dart(&roomy());
    unit.enable();
    assert_eq!(
        dma(&mut unit, &mem, NIC, 0x1000, READ),
        Err((0x1000, Blocked))
    );
    let empty = EmptyEntry::Invalid;
    let table = DartTable::at(Dart::FULL, A, Coherency::Coherent, empty, &mem, ROOT).unwrap();
    unit.set_table(A, Dart::FULL, ROOT);
    for (page, frame) in [
        (1, 0x7000),
        (2, 0x9000),
        (3, 0xf_ffff_f000),
        (END / 4096 - 1, 0xb000),
    ] {
        table.map(&mem, request(page << 12, frame, 1, RW)).unwrap();
    }
    let cases: [(u64, Seen); 7] = [
        (0x1010, Ok(vec![(0x7010, 1)])),
        (0x2010, Ok(vec![(0x9010, 1)])),
        (0x3010, Ok(vec![(0xf_ffff_f010, 1)])),
        (0x4010, Err((0x4010, NotPresent))),
        (0x10, Err((0x10, NotPresent))),
        (END - 1, Ok(vec![(0xbfff, 1)])),
        (END, Err((END, AddressBeyondWidth))),
    ];
    for (iova, expected) in cases {
        for device in [NIC, DISK] {
            // An entry has no access control: reads and writes are alike.
            for access in [READ, WRITE] {
                assert_eq!(
                    dma(&mut unit, &mem, device, iova, access),
                    expected,
                    "{iova:#x}"
                );
            }
        }
    }
    // Devices share cached entries, too: four pages.
    assert_eq!(unit.iotlb_live(), 4);
    // A request that an entry cannot express is refused, not widened.
    let read_only = request(0x8000, 0x7000, 1, Permissions::READ);
    assert!(table.map(&mem, read_only).is_err());
    assert_eq!(
        dma(&mut unit, &mem, NIC, 0x8000, WRITE),
        Err((0x8000, NotPresent))
    );
}

/// Linux's spare page: an errant DMA reaches it and is not reported. The unit caches it, so a map
/// must invalidate, not an unmap.
#[test]
fn a_spare_page_takes_errant_accesses_unreported() {
    let mem = arena();
    let mut unit = DartUnit::dart(&roomy());
    unit.enable();
    let empty = EmptyEntry::Spare(SPARE);
    let table = DartTable::at(Dart::FULL, A, Coherency::Coherent, empty, &mem, ROOT).unwrap();
    unit.set_table(A, Dart::FULL, ROOT);
    assert_eq!(
        dma(&mut unit, &mem, NIC, 0x6010, WRITE),
        Ok(vec![(0x5010, 1)])
    );
    assert_eq!(unit.faults().take(), None);
    // The spare page is no mapping.
    let range = PfnRange::new(Pfn::new(6), 1).unwrap();
    assert!(table.unmap(&mem, range).is_err());
    table.map(&mem, request(0x6000, 0x7000, 1, RW)).unwrap();
    assert_eq!(
        dma(&mut unit, &mem, NIC, 0x6010, WRITE),
        Ok(vec![(0x5010, 1)]),
        "the cached empty entry hides the map"
    );
    unit.submit(Invalidation::Domain(A)).unwrap();
    assert_eq!(
        dma(&mut unit, &mem, NIC, 0x6010, WRITE),
        Ok(vec![(0x7010, 1)])
    );
    let (_unmapped, _levels) = table.unmap(&mem, range).unwrap();
    unit.submit(Invalidation::Domain(A)).unwrap();
    assert_eq!(
        dma(&mut unit, &mem, NIC, 0x6010, WRITE),
        Ok(vec![(0x5010, 1)])
    );
}
