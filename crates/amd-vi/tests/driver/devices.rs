//! Attach, detach and pass-through.

use ringfence_amd_vi::{Interrupts, Stage, UnitError};
use ringfence_pgtable::Level;
use ringfence_types::{
    DomainId, Invalidation, InvalidationError, Invalidator, PhysAddr, PhysMemory, RequesterId,
};
use std::sync::atomic::Ordering;

use crate::model::{POINTER, Processor};
use crate::rig::{DEVICE, DEVICE_TABLE, DOMAIN, FEATURE, IOVA, OTHER, PA, Rig, host};

#[test]
fn tables_of_every_depth_translate() {
    for levels in 1..=6 {
        let rig = Rig::new(FEATURE);
        let mut unit = rig.unit();
        let table = rig.table(DOMAIN, levels);
        let iova = if levels == 1 { 0x1000 } else { 0x12_3000 };
        rig.map(&table, iova, PA, 1);
        unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
        assert_eq!(rig.access(DEVICE, iova + 0xabc), Some(PA + 0xabc));
        assert_eq!(rig.access(DEVICE, iova + 0x1000), None);
        assert_eq!(rig.access(OTHER, iova), None);
        unit.detach(DEVICE).unwrap();
        assert_eq!(rig.access(DEVICE, iova), None);
    }
}

/// The unit caches a blocked entry, then an attached one, then the next.
#[test]
fn no_cached_entry_or_translation_survives() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    let (first, second) = (rig.table(DOMAIN, 3), rig.table(DomainId::new(6), 4));
    rig.map(&first, IOVA, PA, 1);
    rig.map(&second, IOVA, PA + 0x1000, 1);
    assert_eq!(rig.access(DEVICE, IOVA), None);
    unit.attach(DEVICE, DOMAIN, host(&first)).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
    // Attach to another domain blocks the device in between.
    unit.attach(DEVICE, DomainId::new(6), host(&second))
        .unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), Some(PA + 0x1000));
    unit.pass_through(DEVICE).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), Some(IOVA));
    unit.detach(DEVICE).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), None);
    // The domain-id gets another table: no translation of the old one is left.
    let third = rig.table(DOMAIN, 3);
    unit.attach(DEVICE, DOMAIN, host(&third)).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), None);
}

#[test]
fn an_entry_is_invalidated_before_its_domain() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    let table = rig.table(DOMAIN, 3);
    unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
    rig.executed();
    unit.detach(DEVICE).unwrap();
    let opcodes: Vec<_> = rig
        .executed()
        .iter()
        .map(|[first, _]| first >> 60)
        .collect();
    // Each with a completion of its own: the domain is invalidated after the entry was.
    assert_eq!(opcodes, [2, 1, 3, 1]);
}

/// A unit may read an entry at any time, so that no mixture of two entries may translate.
#[test]
fn an_entry_changes_through_blocked() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    let table = rig.table(DOMAIN, 3);
    unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
    let entry = || {
        let at = PhysAddr::new(DEVICE_TABLE + 32 * u64::from(DEVICE.get()));
        let words = rig.memory.words(at, 4).unwrap();
        words
            .iter()
            .map(|word| word.load(Ordering::Relaxed))
            .collect::<Vec<_>>()
    };
    let attached = table.root().get() | 0x6000_0000_0000_0603;
    assert_eq!(entry(), [attached, 5, 0, 0]);
    // The unit hangs, so that attach stops after its first step.
    rig.model.change(|state| state.processor = Processor::Hung);
    let other = rig.table(DomainId::new(6), 4);
    let result = unit.attach(DEVICE, DomainId::new(6), host(&other));
    assert!(matches!(result, Err(UnitError::Invalidation(_))));
    // Blocked: no IR and IW, and a table of one level.
    let (blocked, rest) = (entry()[0], entry()[1..].to_vec());
    assert_eq!(blocked & !POINTER, 0x203);
    assert_eq!(rest, [0; 3]);
    let empty = rig.memory.table(PhysAddr::new(blocked & POINTER)).unwrap();
    assert!(empty.iter().all(|word| word.load(Ordering::Relaxed) == 0));
}

#[test]
fn a_failed_attach_leaves_the_device_blocked() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    let table = rig.table(DOMAIN, 3);
    rig.map(&table, IOVA, PA, 1);
    rig.model.change(|state| state.processor = Processor::Hung);
    assert!(unit.attach(DEVICE, DOMAIN, host(&table)).is_err());
    assert_eq!(rig.access(DEVICE, IOVA), None);
    rig.model
        .change(|state| state.processor = Processor::Prompt);
    unit.recover().unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), None);
    unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
}

/// The invalidation of the domain was never submitted. Without IASup, a global invalidation names
/// the domains of attached devices only, and would leave its translations.
#[test]
fn a_failed_detach_fails_all_invalidations_until_recovery() {
    for feature in [0x800, FEATURE] {
        let rig = Rig::new(feature);
        let mut unit = rig.unit();
        let table = rig.table(DOMAIN, 3);
        rig.map(&table, IOVA, PA, 1);
        unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
        let earlier = unit.submit(Invalidation::Global).unwrap();
        rig.model.change(|state| state.processor = Processor::Hung);
        let timed_out = UnitError::Invalidation(InvalidationError::TimedOut);
        assert_eq!(unit.detach(DEVICE), Err(timed_out));
        rig.model
            .change(|state| state.processor = Processor::Prompt);
        rig.model.execute(usize::MAX);
        let failed = InvalidationError::Failed;
        assert_eq!(unit.submit(Invalidation::Global), Err(failed));
        assert_eq!(unit.poll(earlier), Err(failed));
        let other = rig.table(DomainId::new(6), 3);
        let attached = unit.attach(OTHER, DomainId::new(6), host(&other));
        assert_eq!(attached, Err(UnitError::Invalidation(failed)));
        rig.executed();
        unit.recover().unwrap();
        let of_the_domain = [0x3000_0005_0000_0000, 0x7fff_ffff_ffff_f003];
        let everything = [8 << 60, 0];
        let executed = rig.executed();
        let expected = if feature == FEATURE {
            everything
        } else {
            of_the_domain
        };
        assert!(executed.contains(&expected), "{feature:#x}");
        unit.attach(OTHER, DomainId::new(6), host(&other)).unwrap();
    }
}

#[test]
fn interrupts_follow_the_option() {
    let mut rig = Rig::new(FEATURE);
    rig.options.interrupts = Interrupts::Abort;
    let mut unit = rig.unit();
    let table = rig.table(DOMAIN, 3);
    unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
    unit.pass_through(OTHER).unwrap();
    for device in [DEVICE, OTHER] {
        let at = PhysAddr::new(DEVICE_TABLE + 32 * u64::from(device.get()) + 16);
        let word = rig.memory.word(at).unwrap().load(Ordering::Relaxed);
        assert_eq!(word, 1, "{device}");
    }
}

#[test]
fn requests_that_the_unit_cannot_express_change_nothing() {
    // HATS = 01b: five levels.
    let rig = Rig::new(0x440);
    let mut unit = rig.unit();
    let table = rig.table(DOMAIN, 5);
    unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
    let level = |raw| Level::new(raw).unwrap();
    let stage = |root, levels| Stage::Host {
        root: PhysAddr::new(root),
        levels: level(levels),
    };
    let beyond = RequesterId::new(0x200);
    let six = DomainId::new(6);
    rig.executed();
    let before = rig.frames.in_use();
    for (device, domain, stage, error) in [
        (
            beyond,
            six,
            host(&table),
            UnitError::DeviceBeyondTable { device: beyond },
        ),
        (
            OTHER,
            DomainId::new(0),
            host(&table),
            UnitError::ReservedDomain,
        ),
        (
            OTHER,
            six,
            stage(0x20_0000, 6),
            UnitError::HostLevels { levels: level(6) },
        ),
        (
            OTHER,
            six,
            stage(0x20_0800, 4),
            UnitError::Root {
                at: PhysAddr::new(0x20_0800),
            },
        ),
        (
            OTHER,
            six,
            stage(1 << 52, 4),
            UnitError::Root {
                at: PhysAddr::new(1 << 52),
            },
        ),
        // Domain 5 has another root, or another depth.
        (
            OTHER,
            DOMAIN,
            stage(0x30_0000, 5),
            UnitError::DomainMismatch { domain: DOMAIN },
        ),
        (
            OTHER,
            DOMAIN,
            stage(table.root().get(), 4),
            UnitError::DomainMismatch { domain: DOMAIN },
        ),
    ] {
        assert_eq!(unit.attach(device, domain, stage), Err(error));
    }
    let error = UnitError::DeviceBeyondTable { device: beyond };
    assert_eq!(unit.pass_through(beyond), Err(error));
    assert_eq!(unit.detach(beyond), Err(error));
    let error = UnitError::NotAttached { device: OTHER };
    assert_eq!(unit.detach(OTHER), Err(error));
    assert_eq!((rig.executed(), rig.frames.in_use()), (vec![], before));
    // The same table serves a second device, and the first one may change its table.
    unit.attach(OTHER, DOMAIN, host(&table)).unwrap();
    unit.detach(OTHER).unwrap();
    let other = rig.table(DOMAIN, 4);
    unit.attach(DEVICE, DOMAIN, host(&other)).unwrap();
}
