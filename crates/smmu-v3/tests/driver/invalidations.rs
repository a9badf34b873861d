//! Invalidations against a unit that caches all it reads.

use ringfence_types::{CachedLevels, DomainId, Invalidation};

use crate::rig::{
    DEVICE, DOMAIN, IOVA, PA, Rig, TestTable, TestUnit, all_levels, invalidate, one, pages, two,
};

fn setups() -> impl Iterator<Item = (Rig, bool)> {
    let kinds = [(true, true), (true, false), (false, true), (false, false)];
    kinds
        .into_iter()
        .map(|(has_ranges, is_stage1)| match has_ranges {
            true => (Rig::new(), is_stage1),
            false => (Rig::without_ranges(), is_stage1),
        })
}

fn attach(rig: &Rig, unit: &mut TestUnit<'_>, is_stage1: bool) -> TestTable {
    let table = match is_stage1 {
        true => rig.stage1(DOMAIN),
        false => rig.stage2(DOMAIN),
    };
    let translation = if is_stage1 { one(&table) } else { two(&table) };
    unit.attach(DEVICE, DOMAIN, &translation).unwrap();
    table
}

#[test]
fn pages_are_invalidated_and_their_neighbours_are_not() {
    for (rig, is_stage1) in setups() {
        let mut unit = rig.unit();
        let table = attach(&rig, &mut unit, is_stage1);
        for count in [1, 2, 31, 32] {
            rig.map(&table, IOVA, PA, count + 2);
            let access = |page: u64| rig.access(DEVICE, IOVA + 0x1000 * page);
            for page in 0..count + 2 {
                assert_eq!(access(page), Some(PA + 0x1000 * page));
            }
            rig.unmap(&table, IOVA, count + 2);
            assert_eq!(access(1), Some(PA + 0x1000), "the model cached nothing");
            invalidate(&mut unit, pages(DOMAIN, IOVA + 0x1000, count));
            for page in 1..=count {
                assert_eq!(access(page), None, "{page} of {count}");
            }
            assert_eq!(access(0), Some(PA), "{count}");
            assert_eq!(
                access(count + 1),
                Some(PA + 0x1000 * (count + 1)),
                "{count}"
            );
            invalidate(&mut unit, Invalidation::Domain(DOMAIN));
            assert_eq!(access(0), None);
        }
    }
}

/// Without ranges, a range that needs too many commands empties the domain.
#[test]
fn many_pages_without_ranges_are_a_domain() {
    let rig = Rig::without_ranges();
    let mut unit = rig.unit();
    let _table = attach(&rig, &mut unit, true);
    rig.commands();
    invalidate(&mut unit, pages(DOMAIN, IOVA, 32));
    assert_eq!(rig.commands().len(), 33);
    invalidate(&mut unit, pages(DOMAIN, IOVA, 33));
    assert_eq!(rig.commands(), [[0x0005_0000_0000_0011, 0], [0x46, 0]]);
}

/// Tables that became free may be used for something else.
#[test]
fn freed_tables_are_not_walked() {
    for (rig, is_stage1) in setups() {
        let mut unit = rig.unit();
        let table = attach(&rig, &mut unit, is_stage1);
        rig.map(&table, IOVA, PA, 1);
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
        rig.unmap(&table, IOVA, 1);
        invalidate(&mut unit, all_levels(DOMAIN, IOVA, 1));
        assert_eq!(rig.access(DEVICE, IOVA), None);
        // A cached pointer to the old table would hide the new one.
        let other = match is_stage1 {
            true => rig.stage1(DOMAIN),
            false => rig.stage2(DOMAIN),
        };
        rig.map(&other, IOVA, PA + 0x1000, 1);
        let translation = if is_stage1 { one(&other) } else { two(&other) };
        unit.attach(DEVICE, DOMAIN, &translation).unwrap();
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA + 0x1000));
    }
}

/// The invalidation of all levels reaches a table that only neighbours use.
#[test]
fn all_levels_reach_cached_tables() {
    for (rig, is_stage1) in setups() {
        let mut unit = rig.unit();
        let table = attach(&rig, &mut unit, is_stage1);
        rig.map(&table, IOVA, PA, 1);
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
        rig.commands();
        invalidate(&mut unit, all_levels(DOMAIN, IOVA, 512));
        let commands = rig.commands();
        assert!(
            commands.iter().all(|[_, second]| second & 1 == 0),
            "{commands:x?}"
        );
    }
}

/// A domain without devices, and pages beyond the addresses of a table.
#[test]
fn requests_without_a_table_empty_the_domain() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let _table = attach(&rig, &mut unit, true);
    rig.commands();
    let unused = DomainId::new(7);
    invalidate(&mut unit, pages(unused, IOVA, 1));
    let both = [[0x0007_0000_0000_0011, 0], [0x0007_0000_0028, 0], [0x46, 0]];
    assert_eq!(rig.commands(), both);
    for iova in [1 << 39, (1 << 39) - 0x1000, u64::MAX << 20] {
        invalidate(&mut unit, pages(DOMAIN, iova, 2));
        assert_eq!(
            rig.commands(),
            [[0x0005_0000_0000_0011, 0], [0x46, 0]],
            "{iova:#x}"
        );
    }
}

/// A unit with one stage knows no command for the other.
#[test]
fn units_with_one_stage() {
    for (rig, is_stage1) in [(Rig::without(1), true), (Rig::without(2), false)] {
        let mut unit = rig.unit();
        let table = attach(&rig, &mut unit, is_stage1);
        rig.map(&table, IOVA, PA, 1);
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
        rig.unmap(&table, IOVA, 1);
        let range = crate::rig::range(IOVA, 1);
        for domain in [DOMAIN, DomainId::new(7)] {
            invalidate(&mut unit, Invalidation::Domain(domain));
            let levels = CachedLevels::All;
            invalidate(
                &mut unit,
                Invalidation::Pages {
                    domain,
                    range,
                    levels,
                },
            );
        }
        invalidate(&mut unit, Invalidation::Global);
        assert_eq!(rig.access(DEVICE, IOVA), None);
        assert!(unit.command_error().is_none());
    }
}
