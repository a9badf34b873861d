//! QEMU judges the VT-d driver.

use ringfence_pgtable::{FirstStage, Levels, SecondStage};
use ringfence_qemu_judge::family::vtd::{Stage, Vtd};
use ringfence_qemu_judge::{
    Board, Broken, Disagreement, Kind, Machine, Options, Report, Setup, drive,
};
use ringfence_types::PageSize;
use ringfence_vtd::{Interface, Mode};

/// Accesses of a run. `RINGFENCE_JUDGED` sets another number.
const ACCESSES: u64 = 10_000;

fn machine(properties: &str) -> Machine {
    let unit = format!("intel-iommu{properties}");
    Machine::start(&Setup {
        board: Board::Q35,
        options: "",
        arguments: &["-device", &unit],
        devices: &[0x20, 0x28, 0x31, 0xe8],
        readers: &[0x40],
    })
    .unwrap()
}

fn run<T: Stage>(
    properties: &str,
    mode: Mode,
    interface: Interface,
    format: T,
    broken: Broken,
) -> anyhow::Result<Report> {
    let machine = machine(properties);
    let options = ringfence_vtd::Options {
        mode,
        interface,
        poll_limit: 1000,
    };
    let mut unit = Vtd::start(&machine, &options, format)?;
    let accesses = std::env::var("RINGFENCE_JUDGED").map_or(ACCESSES, |n| n.parse().unwrap());
    let options = Options {
        seed: 1,
        accesses,
        broken,
    };
    let report = drive(&machine, &mut unit, &options)?;
    unit.stop()?;
    println!("{properties} {mode:?} {interface:?}: {report}");
    for kind in Kind::ALL {
        assert!(report.of(kind) > accesses / 100, "{kind:?}: {report}");
    }
    assert_eq!(machine.frames().in_use(), 0);
    Ok(report)
}

fn second(levels: Levels) -> SecondStage {
    SecondStage::new(levels).with_pages_up_to(PageSize::Size2M)
}

fn first() -> FirstStage {
    FirstStage::FOUR_LEVELS.with_pages_up_to(PageSize::Size2M)
}

#[test]
fn legacy_mode() {
    for (properties, interface, levels) in [
        ("", Interface::Queue, Levels::Three),
        ("", Interface::Registers, Levels::Four),
        (",caching-mode=on", Interface::Queue, Levels::Four),
    ] {
        run(
            properties,
            Mode::Legacy,
            interface,
            second(levels),
            Broken::Nothing,
        )
        .unwrap();
    }
}

#[test]
fn scalable_second_stage() {
    for properties in [",scalable-mode=on", ",scalable-mode=on,caching-mode=on"] {
        let format = second(Levels::Four);
        run(
            properties,
            Mode::Scalable,
            Interface::Queue,
            format,
            Broken::Nothing,
        )
        .unwrap();
    }
}

#[test]
fn scalable_first_stage() {
    for properties in [
        ",scalable-mode=on,fsts=on",
        ",scalable-mode=on,fsts=on,caching-mode=on",
    ] {
        run(
            properties,
            Mode::Scalable,
            Interface::Queue,
            first(),
            Broken::Nothing,
        )
        .unwrap();
    }
}

/// QEMU caches translations, so its verdict reveals each error of the mapping layer.
#[test]
fn broken_invalidations_are_caught() {
    for broken in [
        Broken::Forgotten,
        Broken::WithoutFirstPage,
        Broken::WithoutLastPage,
        Broken::OtherDomain,
    ] {
        let (queue, four) = (Interface::Queue, second(Levels::Four));
        let results = [
            run("", Mode::Legacy, queue, four, broken),
            run("", Mode::Legacy, Interface::Registers, four, broken),
            run(",scalable-mode=on", Mode::Scalable, queue, four, broken),
            run(
                ",scalable-mode=on,fsts=on",
                Mode::Scalable,
                queue,
                first(),
                broken,
            ),
        ];
        for result in results {
            let error = result.unwrap_err();
            let disagreement = error.downcast_ref::<Disagreement>();
            let disagreement = disagreement.unwrap_or_else(|| panic!("{broken:?}: {error}"));
            assert_eq!(disagreement.kind, Kind::AfterUnmap, "{broken:?}: {error}");
            assert!(error.to_string().contains("Landed, expected Stopped"));
        }
    }
}
