//! A GART: an aperture with a table; devices reach all other addresses untranslated.

use ringfence_hw::{GartUnit, Translate};
use ringfence_pgtable::{Coherency, EmptyEntry, Gart, GartTable};
use ringfence_types::FaultReason::{AddressBeyondWidth, BadLength, NotPresent};
use ringfence_types::{
    Invalidation, InvalidationError, Invalidator, Iova, PhysAddr, RingId, Ticket,
};

use crate::rig::{A, DISK, NIC, READ, RW, Seen, WRITE, arena, request, roomy, seen};

const ROOT: PhysAddr = PhysAddr::new(128 << 20);
const SPARE: PhysAddr = PhysAddr::new(0x5000);
/// An aperture of 32 MiB below 4 GiB.
const BITS: u32 = 25;
const BASE: u64 = 0xf400_0000;
const END: u64 = BASE + (1 << BITS);

fn dma(unit: &mut GartUnit, mem: &ringfence_memory::Arena, at: u64, bytes: u64) -> Seen {
    let result = unit.translate(mem, NIC, Iova::new(at), bytes, WRITE);
    seen(result.map(|translation| translation.to_vec()))
}

fn table(mem: &ringfence_memory::Arena, empty: EmptyEntry) -> GartTable {
    let format = Gart::new(BITS).unwrap();
    GartTable::at(format, A, Coherency::Coherent, empty, mem, ROOT).unwrap()
}

fn with_aperture() -> GartUnit {
    let mut unit = GartUnit::new(&roomy());
    unit.set_aperture(PhysAddr::new(BASE), A, Gart::new(BITS).unwrap(), ROOT);
    unit
}

#[test]
fn addresses_outside_the_aperture_are_physical() {
    let mem = arena();
    let table = table(&mem, EmptyEntry::Invalid);
    // Memory above 4 GiB, and the last page of the aperture.
    let high = 0x12_3456_7000;
    table.map(&mem, request(0x1000, high, 2, RW)).unwrap();
    let last = (1 << BITS) - 0x1000;
    table.map(&mem, request(last, 0x9000, 1, RW)).unwrap();
    let mut unit = with_aperture();
    let cases: [(u64, u64, Seen); 11] = [
        (0x1010, 8, Ok(vec![(0x1010, 8)])),
        (BASE - 8, 8, Ok(vec![(BASE - 8, 8)])),
        (END, 8, Ok(vec![(END, 8)])),
        (1 << 40, 8, Ok(vec![(1 << 40, 8)])),
        (BASE + 0x1010, 8, Ok(vec![(high + 0x10, 8)])),
        (BASE + 0x1ff8, 16, Ok(vec![(high + 0xff8, 16)])),
        (END - 8, 8, Ok(vec![(0x9ff8, 8)])),
        (BASE + 0x3010, 8, Err((BASE + 0x3010, NotPresent))),
        // Accesses across the first end, across both, and across the last.
        (BASE - 8, 16, Err((BASE - 8, AddressBeyondWidth))),
        (BASE - 8, 1 << 26, Err((BASE - 8, AddressBeyondWidth))),
        (END - 8, 16, Err((END - 8, AddressBeyondWidth))),
    ];
    for (at, bytes, expected) in cases {
        assert_eq!(dma(&mut unit, &mem, at, bytes), expected, "{at:#x}");
        let record = unit.faults().take().map(|record| record.page.get());
        let page = expected.err().map(|(at, _)| at & !0xfff);
        assert_eq!(record, page, "the record has the address on the bus");
    }
    assert_eq!(dma(&mut unit, &mem, 1, 0), Err((1, BadLength)));
    // Devices share the table, and an entry has no access control.
    for (device, access) in [(DISK, READ), (NIC, WRITE)] {
        let result = unit.translate(&mem, device, Iova::new(BASE + 0x1000), 1, access);
        assert_eq!(
            seen(result.map(|found| found.to_vec())),
            Ok(vec![(high, 1)])
        );
    }
}

#[test]
fn a_gart_without_an_aperture_translates_nothing() {
    let mem = arena();
    let mut unit = GartUnit::new(&roomy());
    let untranslated = Ok(vec![(BASE + 0x1000, 8)]);
    assert_eq!(dma(&mut unit, &mem, BASE + 0x1000, 8), untranslated);
    assert_eq!(
        dma(&mut unit, &mem, u64::MAX, 2),
        Err((u64::MAX, BadLength))
    );
    let ticket = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
}

/// Linux points every free entry at a spare page and flushes after a map.
#[test]
fn a_cached_entry_stays_until_the_whole_cache_is_invalidated() {
    let mem = arena();
    let table = table(&mem, EmptyEntry::Spare(SPARE));
    let mut unit = with_aperture();
    let errant = Ok(vec![(SPARE.get(), 8)]);
    assert_eq!(dma(&mut unit, &mem, BASE + 0x4000, 8), errant);
    table.map(&mem, request(0x4000, 0x7000, 1, RW)).unwrap();
    assert_eq!(dma(&mut unit, &mem, BASE + 0x4000, 8), errant);
    // A flush of one domain is a flush of all.
    let ticket = unit.submit(Invalidation::Domain(A)).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    assert_eq!(
        dma(&mut unit, &mem, BASE + 0x4000, 8),
        Ok(vec![(0x7000, 8)])
    );
    assert_eq!(
        unit.poll(Ticket::new(ticket.get() + 1)),
        Err(InvalidationError::Failed)
    );
    let ring = Invalidation::Ring {
        domain: A,
        device: NIC,
        ring: RingId::new(0),
    };
    assert_eq!(unit.submit(ring), Err(InvalidationError::Unsupported));
}
