//! QEMU's RISC-V IOMMU judges the driver's.

use ringfence_pgtable::Levels;
use ringfence_qemu_judge::family::riscv_iommu::{RiscvIommu, Stage};
use ringfence_qemu_judge::{
    Board, Broken, Disagreement, Kind, Machine, Options, Report, Setup, drive,
};
use ringfence_riscv_iommu::Options as UnitOptions;

/// Accesses of a run, unless `RINGFENCE_JUDGED` sets another number.
const ACCESSES: u64 = 10_000;

/// A configuration of the unit.
#[derive(Debug, Clone, Copy)]
struct Case {
    stage: Stage,
    levels: Levels,
    /// Device contexts of 32 bytes instead of 64.
    base_format: bool,
    device_id_bits: u32,
}

const fn case(stage: Stage, levels: Levels, base_format: bool, device_id_bits: u32) -> Case {
    Case {
        stage,
        levels,
        base_format,
        device_id_bits,
    }
}

const CASES: [Case; 10] = [
    case(Stage::First, Levels::Three, false, 16),
    case(Stage::First, Levels::Four, true, 7),
    case(Stage::First, Levels::Five, false, 15),
    case(Stage::Second, Levels::Three, true, 24),
    case(Stage::Second, Levels::Four, false, 16),
    case(Stage::Second, Levels::Five, true, 16),
    case(Stage::Process, Levels::Three, false, 16),
    case(Stage::FirstOfGuest, Levels::Three, false, 16),
    case(Stage::FirstOfGuest, Levels::Five, true, 16),
    case(Stage::SecondOfGuest, Levels::Three, false, 16),
];

fn run(case: &Case, options: &Options) -> anyhow::Result<Report> {
    let device = match case.base_format {
        true => "riscv-iommu-pci,addr=1.0,intremap=off",
        false => "riscv-iommu-pci,addr=1.0",
    };
    let machine = Machine::start(&Setup {
        board: Board::RiscvVirt,
        options: "acpi=off",
        arguments: &["-cpu", "max", "-device", device],
        devices: &[0x20, 0x28, 0x31],
        readers: &[0x40],
    })?;
    let unit_options = UnitOptions {
        device_id_bits: case.device_id_bits,
        ..UnitOptions::default()
    };
    let mut unit = RiscvIommu::new(&machine, case.stage, case.levels, unit_options)?;
    let report = drive(&machine, &mut unit, options)?;
    unit.unit
        .disable(machine.frames())
        .map_err(|(_, error)| error)?;
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
fn errors_of_the_mapping_layer_are_caught() {
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
            assert!(found.is_some(), "{case:?} {broken:?}: {error:#}");
        }
    }
}
