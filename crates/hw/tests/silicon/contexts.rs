//! Context lookup, and the fault records of failed lookups.

use ringfence_hw::{FaultRecord, RootTable, UnitConfig, VtdUnit};
use ringfence_pgtable::Levels;
use ringfence_types::FaultReason::{
    Blocked, ContextInvalid, ContextNotPresent, ReservedBit, RootNotPresent, TableAccess,
    WriteDenied,
};
use ringfence_types::{
    Access, DomainId, FaultReason, Invalidation, Iova, PageSize, Permissions, PhysAddr, PhysMemory,
    RequesterId,
};
use std::sync::atomic::Ordering;

use crate::rig::{A, DISK, GPU, NIC, READ, RW, Rig, WRITE, arena, geometry, roomy};

#[test]
fn devices_without_a_context_are_denied() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let _table = rig.domain(A, &[NIC]);
    assert_eq!(
        rig.dma(DISK, 0x1000, 1, READ),
        Err((0x1000, RootNotPresent))
    );
    assert_eq!(
        rig.dma(GPU, 0x1000, 1, READ),
        Err((0x1000, ContextNotPresent))
    );
    let mut unprogrammed = VtdUnit::vtd(&roomy());
    unprogrammed.enable();
    let fault = unprogrammed
        .translate(&mem, NIC, Iova::new(0x1000), 1, READ)
        .unwrap_err();
    assert_eq!(fault.reason, Blocked);
}

/// Invalid or unsupported words in the context entry of the NIC.
#[test]
fn bad_entries_are_refused() {
    let cases = [
        ("a table", 0x1001, 0x102, None),
        ("a table and a device TLB", 0x1005, 0x102, None),
        ("TT = 11b", 0x100d, 0x102, Some(ContextInvalid)),
        ("AW = 0", 0x1001, 0x100, Some(ContextInvalid)),
        ("AW = 7", 0x1001, 0x107, Some(ContextInvalid)),
        (
            "five levels, which this unit lacks",
            0x1001,
            0x103,
            Some(ContextInvalid),
        ),
        (
            "pass-through of such a width",
            0x9,
            0x103,
            Some(ContextInvalid),
        ),
        (
            "page requests without TT = 01b",
            0x1011,
            0x102,
            Some(ReservedBit),
        ),
        ("reserved low bit", 0x1021, 0x102, Some(ReservedBit)),
        (
            "reserved high bit",
            0x1001,
            1 << 63 | 0x102,
            Some(ReservedBit),
        ),
        (
            "table outside memory",
            0x000f_ffff_0000_0001,
            0x102,
            Some(TableAccess),
        ),
        ("absent", 0x1000, 0x102, Some(ContextNotPresent)),
    ];
    let mem = arena();
    for (name, low, high, reason) in cases {
        let mut rig = Rig::new(&mem, &UnitConfig::UNCACHED);
        let root = PhysAddr::new(0x1000);
        rig.attach(NIC, A, root, Levels::Four);
        let directory = RootTable::unprogrammed(Levels::Four, PageSize::Size4K);
        rig.unit = VtdUnit::new(&UnitConfig::UNCACHED, directory);
        rig.unit.set_root_table(rig.contexts.root());
        rig.unit.enable();
        let bus = rig.contexts.root().wrapping_add(u64::from(NIC.bus()) * 16);
        let table = mem.word(bus).unwrap().load(Ordering::Relaxed) & !0xfff;
        let entry = PhysAddr::new(table + u64::from(NIC.devfn()) * 16);
        mem.word(entry).unwrap().store(low, Ordering::Relaxed);
        let behind = entry.wrapping_add(8);
        mem.word(behind).unwrap().store(high, Ordering::Relaxed);
        let expected = reason.unwrap_or(FaultReason::NotPresent);
        assert_eq!(rig.dma(NIC, 0, 1, READ), Err((0, expected)), "{name}");
        // And in the root entry that points to the context table.
        for (raw, reason) in [
            (0x1003, ReservedBit),
            (0x000f_ffff_0000_0001, TableAccess),
            (0, RootNotPresent),
        ] {
            mem.word(bus).unwrap().store(raw, Ordering::Relaxed);
            assert_eq!(rig.dma(NIC, 0, 1, READ), Err((0, reason)), "{raw:#x}");
        }
    }
}

#[test]
fn contexts_are_cached_until_invalidated() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[NIC]);
    rig.map(&table, 0x1000, 0x7000, 2, RW);
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_ok());
    assert!(matches!(rig.contexts.detach(&mem, NIC), Ok(Some(_))));
    // The cached context and the translations of its domain stay valid, also for pages not
    // translated before.
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_ok());
    assert!(rig.dma(NIC, 0x2000, 1, READ).is_ok());
    rig.unit.invalidate(&Invalidation::Global);
    assert!(
        rig.dma(NIC, 0x1000, 1, READ).is_ok(),
        "contexts have their own"
    );
    rig.unit.invalidate(&Invalidation::Context(DISK));
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_ok(), "another device's");
    rig.unit.invalidate(&Invalidation::Context(NIC));
    assert_eq!(rig.unit.iotlb_live(), 0, "its translations go with it");
    assert_eq!(rig.unit.walk_caches_live(), [0; 3]);
    assert_eq!(
        rig.dma(NIC, 0x1000, 1, READ),
        Err((0x1000, ContextNotPresent))
    );
    // Absent contexts are not cached.
    rig.attach(NIC, A, table.root(), Levels::Four);
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_ok());
}

/// The context cache no longer knows the domain of the device, but its translations must be
/// dropped.
#[test]
fn a_replaced_context_takes_everything_with_it() {
    let mem = arena();
    let mut config = roomy();
    config.contexts = geometry(1, 1);
    let mut rig = Rig::new(&mem, &config);
    let table = rig.domain(A, &[NIC, GPU]);
    rig.map(&table, 0x1000, 0x7000, 1, RW);
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_ok());
    assert!(rig.dma(GPU, 0x1000, 1, READ).is_ok());
    assert_eq!(rig.unit.stats().context_misses, 2);
    rig.unit.invalidate(&Invalidation::Context(NIC));
    assert_eq!((rig.unit.iotlb_live(), rig.unit.stats().widened), (0, 1));
    assert!(rig.dma(GPU, 0x1000, 1, READ).is_ok());
    assert_eq!(rig.unit.stats().context_misses, 2, "another device's stays");
}

#[test]
fn a_new_root_table_starts_afresh() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[NIC]);
    rig.map(&table, 0x1000, 0x7000, 1, RW);
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_ok());
    assert!(matches!(rig.contexts.detach(&mem, NIC), Ok(Some(_))));
    rig.unit.set_root_table(rig.contexts.root());
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_err());
    // The low bits of the register are not part of the address.
    rig.attach(NIC, A, table.root(), Levels::Four);
    rig.unit
        .set_root_table(rig.contexts.root().wrapping_add(0xfff));
    assert!(rig.dma(NIC, 0x1000, 1, READ).is_ok());
}

#[test]
fn faults_are_recorded_with_their_fields() {
    let mem = arena();
    let mut config = roomy();
    config.fault_log = 2;
    let mut rig = Rig::new(&mem, &config);
    let table = rig.domain(A, &[NIC]);
    rig.map(&table, 0x4000, 0x7000, 1, Permissions::READ);
    assert!(rig.dma(NIC, 0x1234, 4, WRITE).is_err());
    assert!(rig.dma(DISK, 0x5678, 4, READ).is_err());
    assert!(rig.dma(NIC, 0x9000, 4, READ).is_err());
    let record = |source, page, access, reason| FaultRecord {
        source,
        page: Iova::new(page),
        access,
        reason,
    };
    let log = rig.unit.faults();
    assert_eq!(log.take(), Some(record(NIC, 0x1000, Access::Write, 5)));
    assert_eq!(log.take(), Some(record(DISK, 0x5000, Access::Read, 1)));
    assert_eq!((log.take(), log.overflowed(), log.lost()), (None, true, 1));
    assert_eq!(rig.unit.stats().faults, 3);
    // A write to a read-only page.
    rig.unit.faults().clear_overflow();
    assert_eq!(rig.dma(NIC, 0x4008, 4, WRITE), Err((0x4008, WriteDenied)));
    let denied = rig.unit.faults().take();
    assert_eq!(denied, Some(record(NIC, 0x4000, Access::Write, 5)));
    assert_eq!(rig.unit.stats().faults, 4);
}

/// Every other device of a square of buses and functions is attached, each to a page of its own.
/// So neighbours that share the bus or the function have different states.
#[test]
fn contexts_of_all_buses_and_functions_are_distinct() {
    const PLACES: [u16; 5] = [0, 1, 127, 128, 255];
    let devices: Vec<_> = (0..25)
        .map(|i| (i, RequesterId::new(PLACES[i / 5] << 8 | PLACES[i % 5])))
        .collect();
    let attached = |i: usize| (i / 5 + i % 5).is_multiple_of(2);
    for contexts in [geometry(1, 1), geometry(64, 1), geometry(4096, 1)] {
        let mem = arena();
        let mut config = roomy();
        config.contexts = contexts;
        let mut rig = Rig::new(&mem, &config);
        let page = |i: usize| 0x10_0000 + 0x1000 * i as u64;
        for (i, device) in devices.iter().filter(|(i, _)| attached(*i)) {
            let table = rig.domain(DomainId::new(*i as u16 + 1), &[*device]);
            rig.map(&table, 0x1000, page(*i), 1, RW);
        }
        for (i, device) in devices.iter().chain(&devices) {
            let seen = rig.dma(*device, 0x1000, 1, READ).map(|pieces| pieces[0].0);
            if attached(*i) {
                assert_eq!(seen, Ok(page(*i)), "{device}");
            } else {
                assert!(
                    matches!(seen, Err((0x1000, ContextNotPresent | RootNotPresent))),
                    "{device}: {seen:?}"
                );
            }
        }
    }
}

/// A cache of one context serves the device of that context only: not the same function of another
/// bus, and no other function of the bus.
#[test]
fn a_cached_context_serves_its_device_only() {
    let mem = arena();
    let mut config = roomy();
    config.contexts = geometry(1, 1);
    let mut rig = Rig::new(&mem, &config);
    let device = RequesterId::new(0x0100);
    let table = rig.domain(A, &[device]);
    rig.map(&table, 0x1000, 0x7000, 1, RW);
    for (other, reason) in [
        (RequesterId::new(0x0200), RootNotPresent),
        (RequesterId::new(0x0101), ContextNotPresent),
    ] {
        assert!(rig.dma(device, 0x1000, 1, READ).is_ok());
        assert_eq!(rig.dma(other, 0x1000, 1, READ), Err((0x1000, reason)));
    }
}
