//! QEMU's SMMUv3 judges the driver.

use ringfence_pgtable::{Arm, Granule4K};
use ringfence_qemu_judge::family::smmu_v3::{Setting, SmmuV3, Stage};
use ringfence_qemu_judge::{
    Board, Broken, Disagreement, Kind, Machine, Options, Report, Setup, drive,
};
use ringfence_types::PageSize;

/// Accesses of a run, unless `RINGFENCE_JUDGED` sets another number.
const ACCESSES: u64 = 10_000;

/// Bits of stream ids with a linear stream table.
const LINEAR: u32 = 6;

/// A configuration of unit and tables.
#[derive(Debug, Clone, Copy)]
struct Case {
    stage: Stage,
    width: u32,
    largest: PageSize,
    has_hint: bool,
    stream_id_bits: u32,
    has_ranges: bool,
}

const fn case(
    stage: Stage,
    width: u32,
    largest: PageSize,
    stream_id_bits: u32,
    has_ranges: bool,
) -> Case {
    Case {
        stage,
        width,
        largest,
        has_hint: false,
        stream_id_bits,
        has_ranges,
    }
}

const fn with_hint(case: Case) -> Case {
    Case {
        has_hint: true,
        ..case
    }
}

const CASES: [Case; 10] = [
    case(Stage::One, 48, PageSize::Size4K, 16, true),
    case(Stage::One, 39, PageSize::Size2M, LINEAR, true),
    case(Stage::One, 32, PageSize::Size2M, 16, false),
    with_hint(case(Stage::One, 48, PageSize::Size2M, 7, true)),
    with_hint(case(Stage::One, 42, PageSize::Size2M, LINEAR, false)),
    case(Stage::Two, 44, PageSize::Size4K, 16, true),
    case(Stage::Two, 39, PageSize::Size2M, LINEAR, true),
    case(Stage::Two, 35, PageSize::Size2M, 16, false),
    with_hint(case(Stage::Two, 30, PageSize::Size2M, 10, true)),
    with_hint(case(Stage::Two, 37, PageSize::Size2M, 16, false)),
];

impl Case {
    fn setting(&self) -> Setting {
        let format = match self.stage {
            Stage::One => Arm::<Granule4K>::stage1(self.width),
            Stage::Two => Arm::stage2(self.width),
        };
        let format = format.unwrap().with_pages_up_to(self.largest);
        Setting {
            stage: self.stage,
            format: match self.has_hint {
                true => format.with_contiguous_hint(),
                false => format,
            },
            stream_id_bits: self.stream_id_bits,
            has_ranges: self.has_ranges,
        }
    }
}

fn machine() -> Machine {
    Machine::start(&Setup {
        board: Board::ArmVirt,
        options: "acpi=off,gic-version=3,iommu=smmuv3",
        arguments: &["-cpu", "max"],
        // Streams below 64, for the linear table.
        devices: &[0x20, 0x28, 0x31],
        readers: &[0x38],
    })
    .unwrap()
}

fn run(case: &Case, options: &Options) -> anyhow::Result<Report> {
    let machine = machine();
    let mut unit = SmmuV3::start(&machine, case.setting())?;
    let report = drive(&machine, &mut unit, options)?;
    unit.stop()?;
    Ok(report)
}

#[test]
fn every_verdict_is_the_oracles() {
    let first = Options::from_environment(ACCESSES, Broken::Nothing).unwrap();
    for (seed, case) in (first.seed..).zip(&CASES) {
        let report = run(case, &Options { seed, ..first })
            .unwrap_or_else(|error| panic!("{case:?}: {error:#}"));
        println!("{case:?}: {report}");
        assert!(report.round_trips < report.accesses, "{report}");
        for kind in Kind::ALL {
            assert!(report.of(kind) > first.accesses / 100, "{kind:?}: {report}");
        }
    }
}

#[test]
fn broken_invalidations_are_caught() {
    for case in &CASES {
        for broken in [
            Broken::Forgotten,
            Broken::WithoutFirstPage,
            Broken::WithoutLastPage,
            Broken::OtherDomain,
        ] {
            let options = Options {
                seed: 1,
                accesses: ACCESSES,
                broken,
            };
            let error = run(case, &options).expect_err("not caught");
            let found = error.downcast_ref::<Disagreement>();
            println!("{case:?} {broken:?}: {error:#}");
            let found = found.unwrap_or_else(|| panic!("{case:?} {broken:?}: {error:#}"));
            assert_eq!(
                found.kind,
                Kind::AfterUnmap,
                "{case:?} {broken:?}: {error:#}"
            );
        }
    }
}
