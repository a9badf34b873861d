//! QEMU judges the VT-d driver.

use ringfence_pgtable::{FirstStage, Levels, SecondStage};
use ringfence_qemu_judge::family::vtd::{Stage, Vtd};
use ringfence_qemu_judge::{
    Board, Broken, Disagreement, Kind, Machine, Options, Report, Setup, TestDevice, Verdict, drive,
};
use ringfence_types::{
    DomainId, Invalidation, InvalidationError, Invalidator, Iova, PageSize, Registers,
};
use ringfence_vtd::{Interface, Mode};

/// Accesses of a run, unless `RINGFENCE_JUDGED` sets another number.
const ACCESSES: u64 = 15_000;

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
    let options = Options::from_environment(ACCESSES, broken)?;
    let report = drive(&machine, &mut unit, &options)?;
    unit.stop()?;
    println!("{properties} {mode:?} {interface:?}: {report}");
    assert!(report.round_trips < report.accesses, "{report}");
    for kind in Kind::ALL {
        assert!(
            report.of(kind) > options.accesses / 100,
            "{kind:?}: {report}"
        );
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
        (",aw-bits=39", Interface::Queue, Levels::Three),
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
            // The stale translation let the access land. A read compares its fault record first.
            let problems = ["write: Landed, expected Stopped", "read: no fault record"];
            let problem = disagreement.problem.as_str();
            assert!(problems.contains(&problem), "{broken:?}: {error}");
        }
    }
}

fn options(mode: Mode) -> ringfence_vtd::Options {
    ringfence_vtd::Options {
        mode,
        interface: Interface::Queue,
        poll_limit: 1000,
    }
}

/// QEMU stops its queue at a tail that no descriptor of 256 bits has, and continues after recovery.
#[test]
fn the_queue_continues_after_an_error() {
    let machine = machine(",scalable-mode=on");
    let mut vtd = Vtd::start(&machine, &options(Mode::Scalable), second(Levels::Four)).unwrap();
    let unit = vtd.unit();
    machine.registers(0xfed9_0000).write64(0x88, 0x10);
    let ticket = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.poll(ticket), Err(InvalidationError::Failed));
    unit.recover().unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    vtd.stop().unwrap();
}

#[test]
fn pass_through_reaches_physical_addresses_only_while_attached() {
    for (properties, mode) in [("", Mode::Legacy), (",scalable-mode=on", Mode::Scalable)] {
        let machine = machine(properties);
        let mut vtd = Vtd::start(&machine, &options(mode), second(Levels::Four)).unwrap();
        let (device, at) = (&machine.devices()[0], machine.buffers().start());
        let write = || device.write(Iova::new(at.get()), 4).unwrap();
        assert_eq!(write(), Verdict::Stopped);
        let domain = DomainId::new(9);
        vtd.unit().pass_through(device.requester(), domain).unwrap();
        assert_eq!(write(), Verdict::Landed);
        assert_eq!(machine.ram().byte(at), Some(TestDevice::pattern(0)));
        vtd.unit().detach(device.requester()).unwrap();
        assert_eq!(write(), Verdict::Stopped);
        vtd.stop().unwrap();
        assert_eq!(write(), Verdict::Landed, "translation is disabled");
    }
}
