//! Start and stop of the unit.

use ringfence_amd_vi::{Interrupts, UnitError, device_table_bytes};
use ringfence_pgtable::TableError;
use ringfence_types::{PhysAddr, PhysMemory, PhysRange, RequesterId};
use std::sync::atomic::Ordering;

use crate::model::{
    COMMAND_BUFFER_BASE, CONTROL, DEVICE_TABLE_BASE, EVENT_LOG_BASE, EVENT_RUN, POINTER, STATUS,
};
use crate::rig::{DEVICE_TABLE, FEATURE, GUEST_FEATURE, LARGEST, Rig};

#[test]
fn golden_registers() {
    let mut rig = Rig::new(FEATURE);
    rig.options.ivhd_flags = 0xff;
    // An exclusion range that firmware left.
    rig.model.set(0x20, 0x1003);
    rig.model.set(0x28, 0x2000);
    let unit = rig.unit();
    let register = |offset| rig.model.register(offset);
    // 512 entries of 32 bytes are 4 pages.
    assert_eq!(register(DEVICE_TABLE_BASE), DEVICE_TABLE | 3);
    // 256 entries each.
    assert_eq!(register(COMMAND_BUFFER_BASE) >> 56, 8);
    assert_eq!(register(EVENT_LOG_BASE) >> 56, 8);
    // IommuEn, HtTunEn, EventLogEn, EventIntEn, PassPW, ResPassPW, CohEn, Isoc, CmdBufEn.
    assert_eq!(register(CONTROL), 0x1f0f);
    assert_eq!((register(0x20), register(0x28)), (0, 0));
    unit.disable().unwrap();
    assert_eq!(register(CONTROL), 0);
    assert_eq!(rig.frames.in_use(), 0);
    // With GTSup also GTEn.
    let guest = Rig::new(GUEST_FEATURE);
    let _unit = guest.unit();
    assert_eq!(guest.model.register(CONTROL), 0x1_140d);
}

#[test]
fn every_device_is_blocked() {
    for (interrupts, third) in [(Interrupts::Pass, 0), (Interrupts::Abort, 1)] {
        let mut rig = Rig::new(FEATURE);
        rig.options.interrupts = interrupts;
        // Memory that firmware left.
        for offset in (0..device_table_bytes(LARGEST)).step_by(8) {
            rig.model.store(DEVICE_TABLE + offset, u64::MAX);
        }
        let _unit = rig.unit();
        for id in 0..=LARGEST.get() {
            assert_eq!(rig.access(RequesterId::new(id), 0x1000), None, "{id:#x}");
        }
        let words = rig.memory.words(PhysAddr::new(DEVICE_TABLE), 4 * 512);
        let words: Vec<_> = words
            .unwrap()
            .iter()
            .map(|w| w.load(Ordering::Relaxed))
            .collect();
        let blocked = |entry: &[u64]| entry[0] & !POINTER == 0x203 && entry[1..] == [0, third, 0];
        assert!(words.chunks(4).all(blocked));
    }
}

#[test]
fn caches_are_invalidated_before_use() {
    for (feature, last, domains) in [(FEATURE, [8 << 60, 0], 0), (0x800, [0; 2], 65536)] {
        let rig = Rig::new(feature);
        let _unit = rig.unit();
        let executed = rig.executed();
        let entries = executed.iter().filter(|[first, _]| first >> 60 == 2);
        let ids: Vec<_> = entries.map(|[first, _]| *first as u16).collect();
        assert!(ids.iter().copied().eq(0..=LARGEST.get()));
        assert_eq!(executed.contains(&last), last != [0; 2]);
        let pages = executed.iter().filter(|[first, _]| first >> 60 == 3);
        let all = pages.filter(|[_, second]| *second == 0x7fff_ffff_ffff_f003);
        let ids: Vec<_> = all.map(|[first, _]| first >> 32 & 0xffff).collect();
        assert!(ids.into_iter().eq(0..domains));
    }
}

/// Firmware, or a kernel before this one, left the unit running with tables of its own.
#[test]
fn a_running_unit_is_stopped_first() {
    let rig = Rig::new(FEATURE);
    std::mem::forget(rig.unit());
    // The model panics if a base changes while it is in use.
    let unit = rig.unit();
    unit.disable().unwrap();
}

#[test]
fn a_unit_that_never_starts_leaves_no_trace() {
    for (stuck, error) in [(EVENT_RUN, true), (0, false)] {
        let rig = Rig::new(FEATURE);
        rig.model.change(|state| state.stuck = stuck);
        assert_eq!(rig.start().is_err(), error);
        if error {
            assert!(matches!(
                rig.start().unwrap_err(),
                UnitError::TimedOut { .. }
            ));
            assert_eq!((rig.frames.in_use(), rig.model.register(CONTROL)), (0, 0));
        }
    }
}

#[test]
fn a_unit_that_never_stops_keeps_its_frames() {
    let rig = Rig::new(FEATURE);
    let unit = rig.unit();
    let in_use = rig.frames.in_use();
    rig.model.change(|state| state.stuck = EVENT_RUN);
    assert!(matches!(unit.disable(), Err(UnitError::TimedOut { .. })));
    assert_eq!(rig.frames.in_use(), in_use);
    // Nor is it reprogrammed.
    let base = rig.model.register(DEVICE_TABLE_BASE);
    assert!(matches!(
        rig.start().unwrap_err(),
        UnitError::TimedOut { .. }
    ));
    assert_eq!(rig.model.register(DEVICE_TABLE_BASE), base);
    assert_ne!(rig.model.register(STATUS) & EVENT_RUN, 0);
}

#[test]
fn memory_that_does_not_fit_is_refused() {
    let page = |start| PhysRange::new(PhysAddr::new(start), 4096).unwrap();
    for (table, error) in [
        (page(0x10_0800), UnitError::DeviceTable),
        (
            PhysRange::new(PhysAddr::new(0x10_0000), 4095).unwrap(),
            UnitError::DeviceTable,
        ),
        (page(1 << 52), UnitError::DeviceTable),
        (page(64 << 20), UnitError::Table(TableError::Memory)),
    ] {
        let mut rig = Rig::new(FEATURE);
        rig.options.device_table = table;
        assert_eq!(rig.start().unwrap_err(), error, "{table:?}");
        assert_eq!(rig.frames.in_use(), 0);
    }
}

#[test]
fn a_failed_allocation_frees_all_others() {
    let mut rig = Rig::new(FEATURE);
    for frames in 0..4 {
        let start = PhysAddr::new(0x20_0000);
        // One byte is no frame.
        let region = PhysRange::new(start, 1.max(frames * 4096)).unwrap();
        rig.frames = ringfence_memory::Frames::new(rig.memory.clone(), region);
        assert_eq!(
            rig.start().unwrap_err(),
            UnitError::Table(TableError::OutOfFrames)
        );
        assert_eq!(rig.frames.in_use(), 0);
    }
}

#[test]
fn sizes_of_device_tables() {
    for (largest, bytes) in [
        (0, 0x1000),
        (0x7f, 0x1000),
        (0x80, 0x2000),
        (0x1ff, 0x4000),
        (0xffff, 0x20_0000),
    ] {
        assert_eq!(device_table_bytes(RequesterId::new(largest)), bytes);
    }
}
