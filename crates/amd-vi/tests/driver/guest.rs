//! Guest tables ("v2").

use ringfence_amd_vi::{Stage, UnitError};
use ringfence_pgtable::{AmdV2, Coherency, Levels, Table};
use ringfence_types::{CachedLevels, DomainId, Invalidation};

use crate::model::Processor;
use crate::rig::{
    DEVICE, DOMAIN, FEATURE, GUEST_FEATURE, IOVA, OTHER, PA, Rig, host, invalidate, pages, range,
};

fn table(rig: &Rig, domain: DomainId, levels: Levels) -> Table<AmdV2> {
    let format = AmdV2::new(levels).unwrap();
    Table::new(
        format,
        domain,
        Coherency::Coherent,
        &rig.memory,
        &rig.frames,
    )
    .unwrap()
}

fn stage(table: &Table<AmdV2>, levels: Levels) -> Stage {
    Stage::Guest {
        root: table.root(),
        levels,
    }
}

#[test]
fn guest_tables_translate_and_are_invalidated() {
    for levels in [Levels::Four, Levels::Five] {
        let rig = Rig::new(GUEST_FEATURE);
        let mut unit = rig.unit();
        let table = table(&rig, DOMAIN, levels);
        rig.map(&table, IOVA, PA, 3);
        unit.attach(DEVICE, DOMAIN, stage(&table, levels)).unwrap();
        assert_eq!(rig.access(DEVICE, IOVA + 0x2010), Some(PA + 0x2010));
        rig.unmap(&table, IOVA, 3);
        assert_eq!(
            rig.access(DEVICE, IOVA + 0x2010),
            Some(PA + 0x2010),
            "cached"
        );
        invalidate(&mut unit, pages(DOMAIN, IOVA, 3));
        assert_eq!(rig.access(DEVICE, IOVA + 0x2010), None);
        rig.map(&table, IOVA, PA, 3);
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
        rig.unmap(&table, IOVA, 3);
        invalidate(&mut unit, Invalidation::Domain(DOMAIN));
        assert_eq!(rig.access(DEVICE, IOVA), None);
    }
}

/// The kind of tables of a domain selects GN.
#[test]
fn golden_commands_of_both_kinds() {
    let rig = Rig::new(GUEST_FEATURE);
    let mut unit = rig.unit();
    // Domains at both ends of the set, and beside another one.
    for (domain, guest) in [
        (1, true),
        (2, false),
        (0x7fff, true),
        (0x8000, false),
        (0xffff, true),
    ] {
        let domain = DomainId::new(domain);
        let guest_table = table(&rig, domain, Levels::Four);
        let host_table = rig.table(domain, 3);
        let stage = match guest {
            true => stage(&guest_table, Levels::Four),
            false => host(&host_table),
        };
        unit.attach(DEVICE, domain, stage).unwrap();
        rig.executed();
        let range = range(IOVA, 1);
        let levels = CachedLevels::All;
        invalidate(
            &mut unit,
            Invalidation::Pages {
                domain,
                range,
                levels,
            },
        );
        let first = 3 << 60 | u64::from(domain.get()) << 32;
        let second = IOVA | if guest { 6 } else { 2 };
        assert_eq!(rig.executed()[0], [first, second], "{domain}");
        // The domain changes its kind when no device uses it.
        unit.detach(DEVICE).unwrap();
        unit.attach(DEVICE, domain, host(&host_table)).unwrap();
        rig.executed();
        invalidate(&mut unit, pages(domain, IOVA, 1));
        assert_eq!(rig.executed()[0], [first, IOVA], "{domain}");
    }
}

#[test]
fn frames_of_gcr3_tables_are_freed() {
    let rig = Rig::new(GUEST_FEATURE);
    let mut unit = rig.unit();
    let table = table(&rig, DOMAIN, Levels::Four);
    let stage = stage(&table, Levels::Four);
    let before = rig.frames.in_use();
    for _ in 0..3 {
        unit.attach(DEVICE, DOMAIN, stage).unwrap();
        unit.attach(OTHER, DOMAIN, stage).unwrap();
        // Two of the set of domains, and one for each device.
        assert_eq!(rig.frames.in_use(), before + 4);
        unit.detach(OTHER).unwrap();
    }
    // A unit that may still use the table keeps it.
    rig.model.change(|state| state.processor = Processor::Hung);
    assert!(unit.detach(DEVICE).is_err());
    assert_eq!(rig.frames.in_use(), before + 3);
    rig.model
        .change(|state| state.processor = Processor::Prompt);
    unit.recover().unwrap();
    unit.attach(OTHER, DOMAIN, stage).unwrap();
    unit.disable().unwrap();
    // The root of the table, and the GCR3 table of the failed detach.
    assert_eq!(rig.frames.in_use(), 2);
}

#[test]
fn units_without_the_features_refuse() {
    for feature in [
        FEATURE,
        GUEST_FEATURE & !(1 << 4),
        GUEST_FEATURE & !(1 << 48),
        GUEST_FEATURE | 3 << 12,
        GUEST_FEATURE | 3 << 14,
    ] {
        let rig = Rig::new(feature);
        let mut unit = rig.unit();
        let table = table(&rig, DOMAIN, Levels::Four);
        let levels = Levels::Four;
        let result = unit.attach(DEVICE, DOMAIN, stage(&table, levels));
        assert_eq!(
            result,
            Err(UnitError::GuestLevels { levels }),
            "{feature:#x}"
        );
    }
    // GATS = 00b: four levels.
    let rig = Rig::new(GUEST_FEATURE & !(3 << 12));
    let mut unit = rig.unit();
    let (four, five) = (Levels::Four, Levels::Five);
    let table = table(&rig, DOMAIN, five);
    let result = unit.attach(DEVICE, DOMAIN, stage(&table, five));
    assert_eq!(result, Err(UnitError::GuestLevels { levels: five }));
    unit.attach(DEVICE, DOMAIN, stage(&table, four)).unwrap();
}

#[test]
fn a_domain_has_one_table() {
    let rig = Rig::new(GUEST_FEATURE);
    let mut unit = rig.unit();
    let (first, second) = (
        table(&rig, DOMAIN, Levels::Four),
        table(&rig, DOMAIN, Levels::Four),
    );
    let mismatch = Err(UnitError::DomainMismatch { domain: DOMAIN });
    unit.attach(DEVICE, DOMAIN, stage(&first, Levels::Four))
        .unwrap();
    for other in [
        stage(&second, Levels::Four),
        stage(&first, Levels::Five),
        host(&rig.table(DOMAIN, 4)),
    ] {
        assert_eq!(unit.attach(OTHER, DOMAIN, other), mismatch);
    }
    unit.attach(OTHER, DOMAIN, stage(&first, Levels::Four))
        .unwrap();
    rig.map(&first, IOVA, PA, 1);
    assert_eq!(rig.access(OTHER, IOVA), Some(PA));
}
