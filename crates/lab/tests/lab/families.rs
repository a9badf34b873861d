//! Families of IOMMUs beside VT-d: the oracle's verdicts, the commands of an invalidation, and the
//! modes that are modelled.

use ringfence_lab::compare::{CompareOptions, Comparison, compare};
use ringfence_lab::modes::Mode;
use ringfence_lab::row::Row;
use ringfence_lab::{IommuFamily, LabError, ReplayStatus};
use ringfence_types::PageSize;

use crate::script::*;

const PAGE: u64 = 4096;
const OTHERS: [IommuFamily; 3] = [IommuFamily::AmdVi, IommuFamily::Smmuv3, IommuFamily::RiscV];

fn modelled() -> Vec<Mode> {
    let mut modes = Mode::named();
    modes.retain(|mode| mode.not_on(IommuFamily::RiscV).is_none());
    modes
}

fn options(family: IommuFamily, modes: Vec<Mode>) -> CompareOptions {
    let mut options = CompareOptions {
        modes,
        ..judged_only(true)
    };
    options.profile.iommu = family;
    options
}

fn run(lines: &[String], options: &CompareOptions) -> Result<Comparison, LabError> {
    compare("script", trace(lines), options, |_| {})
}

/// Received and sent buffers of `pages` pages, with an offset in every other one; up to eight of
/// each are live at once.
fn traffic(pairs: u64, pages: &[u64]) -> Vec<String> {
    let sent = |line: String| line.replace("FROM_DEVICE", "TO_DEVICE");
    let mut lines = Vec::new();
    let buffer = |n: u64| {
        let bytes = pages[n as usize % pages.len()] * PAGE;
        (
            0x4000_0000 + n % 64 * (1 << 20) + n % 2 * 0x200,
            bytes - 0x200,
        )
    };
    for n in 0..pairs + 8 {
        let line = |n: u64, map: bool| {
            let (at, bytes) = buffer(n);
            let line = match map {
                true => map_line("nic", at, bytes),
                false => unmap_line("nic", at, bytes),
            };
            if n.is_multiple_of(3) {
                sent(line)
            } else {
                line
            }
        };
        if n < pairs {
            lines.push(line(n, true));
        }
        if n >= 8 {
            lines.push(line(n - 8, false));
        }
    }
    lines
}

fn row<'a>(rows: &'a [Row], mode: &str) -> &'a Row {
    rows.iter().find(|row| row.mode == mode).unwrap()
}

#[test]
fn a_promise_holds_on_every_family() {
    let lines = traffic(400, &[1, 2, 3, 16, 33, 40]);
    for size in [PageSize::Size4K, PageSize::Size64K, PageSize::Size2M] {
        let modes: Vec<Mode> = modelled()
            .into_iter()
            .map(|mode| mode.with_page_size(size))
            .collect();
        let vtd = run(&lines, &options(IommuFamily::Vtd, modes.clone())).unwrap();
        for family in OTHERS {
            let found = run(&lines, &options(family, modes.clone())).unwrap();
            for (row, vtd) in found.rows.iter().zip(&vtd.rows) {
                let case = format!("{family:?} {} {size:?}", row.mode);
                assert_eq!(row.status, ReplayStatus::Ok, "{case}");
                assert_eq!((row.maps, row.false_faults), (400, 0), "{case}");
                assert_eq!((&row.mode, &row.safety), (&vtd.mode, &vtd.safety));
                assert_eq!(row.invalidations, vtd.invalidations, "{case}");
                assert_eq!(row.stale_window_max_ns, vtd.stale_window_max_ns, "{case}");
                assert_eq!(row.colocated, vtd.colocated, "{case}");
                let violations = |row: &Row| row.violations.unwrap();
                if ["strict", "byte-granular"].contains(&row.safety.as_str()) {
                    assert_eq!(violations(row).total, 0, "{case}");
                }
                assert_eq!(vtd.reads_against_direction, Some(0));
                let on_family = row.iommu == family.name();
                assert_eq!(on_family, row.mode != "none", "{case}");
            }
        }
    }
}

/// A device reads buffers that it may only write, where no table forbids that.
#[test]
fn reads_of_receive_buffers_are_counted_apart() {
    let lines = traffic(100, &[1]);
    for family in IommuFamily::ALL {
        let modes = vec![mode("fence"), mode("none")];
        let rows = run(&lines, &options(family, modes)).unwrap().rows;
        let fence = row(&rows, "fence");
        let reads = fence.reads_against_direction.unwrap();
        assert_eq!(reads > 0, !family.has_write_only_pages(), "{family:?}");
        assert_eq!(fence.violations.unwrap().total, 0, "{family:?}");
        let none = row(&rows, "none");
        assert_eq!(none.reads_against_direction, Some(0));
        // Without an IOMMU, they are violations.
        let tried = family != IommuFamily::Vtd;
        assert_eq!(none.violations.unwrap().direction > 0, tried, "{family:?}");
        assert_eq!(
            (none.iommu.as_str(), fence.iommu.as_str()),
            ("none", family.name())
        );
    }
}

/// `fence` invalidates at each unmap, with as many commands as the range takes in each family.
#[test]
fn an_invalidation_takes_the_commands_of_its_family() {
    for (pages, amd, smmu, riscv) in [(1, 1, 1, 1), (32, 2, 1, 32), (33, 2, 2, 1)] {
        let lines = traffic(64, &[pages]);
        for (family, least) in OTHERS.into_iter().zip([1, smmu, riscv]) {
            let modes = vec![mode("fence")];
            let rows = run(&lines, &options(family, modes)).unwrap().rows;
            assert_eq!(rows[0].invalidations, 64, "{family:?}");
            let commands = rows[0].invalidation_commands.unwrap();
            match family {
                // The number depends on the address.
                IommuFamily::AmdVi => assert!((64..=64 * amd).contains(&commands), "{commands}"),
                _ => assert_eq!(commands, 64 * least, "{family:?} {pages}"),
            }
        }
        let modes = vec![mode("fence")];
        let rows = run(&lines, &options(IommuFamily::Vtd, modes)).unwrap().rows;
        assert_eq!(rows[0].invalidation_commands, None);
    }
}

/// A command that is wider than its range removes translations of other live buffers: they miss
/// again when the device accesses them.
#[test]
fn wide_commands_cost_the_walk_of_other_buffers() {
    let lines = traffic(400, &[40]);
    let misses = |family| {
        let mut options = options(family, vec![mode("fence")]);
        options.early_touches = true;
        (options.profile.iotlb_sets, options.profile.iotlb_ways) = (256, 16);
        run(&lines, &options).unwrap().rows[0]
            .misses_per_page
            .unwrap()
    };
    let [vtd, amd, smmu, riscv] = IommuFamily::ALL.map(misses);
    assert!((smmu - vtd).abs() < 1e-9, "{smmu} {vtd}");
    assert!(amd >= smmu && riscv > 1.2 * smmu, "{amd} {smmu} {riscv}");
}

#[test]
fn modes_of_other_hardware_are_refused() {
    let names: Vec<String> = modelled().into_iter().map(|mode| mode.name).collect();
    assert_eq!(
        names,
        [
            "none",
            "linux-strict",
            "linux-lazy",
            "fence",
            "fence-burst",
            "copy"
        ]
    );
    for (name, reason) in [
        ("riommu", "its tables are the rings of rIOMMU"),
        ("calgary", "its table is Calgary's"),
        (
            "virtio-strict",
            "the tables of a host are modelled for VT-d only",
        ),
        (
            "fs",
            "the combination of its parts is modelled for VT-d only",
        ),
    ] {
        for family in OTHERS {
            assert_eq!(mode(name).not_on(family), Some(reason));
            let refused = run(&traffic(4, &[1]), &options(family, vec![mode(name)]));
            assert!(matches!(refused, Err(LabError::NotBuilt(_))), "{name}");
        }
        assert_eq!(mode(name).not_on(IommuFamily::Vtd), None);
    }
    let hardware = |name: &str| mode(name).hardware(IommuFamily::Vtd);
    assert_eq!(
        ["none", "riommu", "xen", "fence"].map(hardware),
        ["none", "riommu", "calgary", "vtd"]
    );
}

/// Timed replays use tables of the family, too.
#[test]
fn every_modelled_mode_can_be_timed() {
    let lines = traffic(60, &[1, 16]);
    for family in OTHERS {
        let mut options = options(family, modelled());
        options.repetitions = 1;
        for row in run(&lines, &options).unwrap().rows {
            assert_eq!(row.status, ReplayStatus::Ok, "{family:?} {}", row.mode);
            assert!(row.components.is_some());
        }
    }
}
