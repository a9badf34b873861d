//! QEMU judges the driver of virtio-iommu.

use ringfence_pgtable::MapRequest;
use ringfence_qemu_judge::family::virtio::Virtio;
use ringfence_qemu_judge::{
    Board, Broken, Disagreement, Kind, Machine, Options, Report, Setup, TestDevice, Verdict, drive,
};
use ringfence_types::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, Iova, Permissions, Pfn,
    PfnRange, PhysAddr, RequesterId,
};
use ringfence_virtio_iommu::ReservedRegionKind;
use ringfence_virtio_iommu_driver::{Failure, FaultReason, FaultRecord, Status, UnitError};

/// Accesses of a run. `RINGFENCE_JUDGED` sets another number.
const ACCESSES: u64 = 50_000;

fn machine(properties: &str) -> Machine {
    let unit = format!("virtio-iommu-pci,addr=1.0{properties}");
    Machine::start(&Setup {
        board: Board::Q35,
        options: "",
        arguments: &["-device", &unit],
        devices: &[0x20, 0x28, 0x31, 0xe8],
        readers: &[0x40],
    })
    .unwrap()
}

fn run(properties: &str, broken: Broken) -> anyhow::Result<Report> {
    let machine = machine(properties);
    let mut unit = Virtio::start(&machine)?;
    let options = Options::from_environment(ACCESSES, broken)?;
    let report = drive(&machine, &mut unit, &options)?;
    unit.stop()?;
    println!("{properties}: {report}");
    for kind in Kind::ALL {
        assert!(
            report.of(kind) > options.accesses / 100,
            "{kind:?}: {report}"
        );
    }
    assert_eq!(machine.frames().in_use(), 0);
    Ok(report)
}

#[test]
fn every_verdict_is_the_oracles() {
    for properties in ["", ",boot-bypass=off,aw-bits=48"] {
        run(properties, Broken::Nothing).unwrap();
    }
}

/// The layer queues the UNMAP and never submits the invalidation that shows it to the device.
#[test]
fn a_forgotten_invalidation_is_caught() {
    let error = run("", Broken::Forgotten).unwrap_err();
    let disagreement = error.downcast_ref::<Disagreement>();
    let disagreement = disagreement.unwrap_or_else(|| panic!("{error}"));
    assert_eq!(disagreement.kind, Kind::AfterUnmap, "{error}");
    assert!(error.to_string().contains("Landed, expected Stopped"));
}

#[test]
fn reserved_regions_are_those_of_the_machine() {
    let machine = machine("");
    let mut virtio = Virtio::start(&machine).unwrap();
    let device = machine.devices()[0].requester();
    let found = virtio.unit().probe(device).unwrap();
    // The doorbells of x86.
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].kind, ReservedRegionKind::Msi);
    let range = found[0].range;
    assert_eq!(range.start().get(), 0xfee0_0000);
    assert_eq!(range.last().get(), 0xfeef_ffff);
    let nobody = virtio.unit().probe(RequesterId::new(0x77));
    assert_eq!(nobody, Err(UnitError::Refused(Status::NoEnt)));
    virtio.stop().unwrap();
}

#[test]
fn pass_through_reaches_physical_addresses_only_while_attached() {
    let machine = machine("");
    let mut virtio = Virtio::start(&machine).unwrap();
    let (device, at) = (&machine.devices()[0], machine.buffers().start());
    let write = || device.write(Iova::new(at.get()), 4).unwrap();
    assert_eq!(write(), Verdict::Stopped);
    let requester = device.requester();
    virtio
        .unit()
        .pass_through(requester, DomainId::new(9))
        .unwrap();
    assert_eq!(write(), Verdict::Landed);
    assert_eq!(machine.ram().byte(at), Some(TestDevice::pattern(0)));
    virtio.unit().detach(requester).unwrap();
    assert_eq!(write(), Verdict::Stopped);
    virtio.stop().unwrap();
}

fn pages(first: u64, count: u64) -> PfnRange {
    PfnRange::new(Pfn::new(first), count).unwrap()
}

fn request(range: PfnRange, pa: PhysAddr) -> MapRequest {
    MapRequest {
        iova: range.lo().iova(),
        pa,
        pages: range.pages(),
        permissions: Permissions::READ_WRITE,
    }
}

/// After a reset, QEMU has no domain; the driver restores the mappings that are not unmapped.
#[test]
fn recovery_restores_what_is_mapped() {
    let machine = machine("");
    let mut virtio = Virtio::start(&machine).unwrap();
    let device = &machine.devices()[0];
    let at = machine.buffers().start();
    let domain = DomainId::new(1);
    let unit = virtio.unit();
    unit.attach(device.requester(), domain).unwrap();
    for first in [0x100, 0x200] {
        unit.map(domain, request(pages(first, 1), at)).unwrap();
    }
    let _ = unit.unmap(domain, pages(0x100, 1)).unwrap();
    let write = |page: u64| device.write(Pfn::new(page).iova(), 4).unwrap();
    assert_eq!(write(0x100), Verdict::Landed, "not invalidated yet");
    unit.recover().unwrap();
    let ticket = unit.submit(Invalidation::Domain(domain)).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    assert_eq!(write(0x100), Verdict::Stopped);
    assert_eq!(write(0x200), Verdict::Landed);
    virtio.stop().unwrap();
}

/// The whole queue in one burst: 64 UNMAPs, one notification.
#[test]
fn a_burst_fills_the_queue() {
    let machine = machine("");
    let mut virtio = Virtio::start(&machine).unwrap();
    let device = &machine.devices()[0];
    let (domain, at) = (DomainId::new(1), machine.buffers().start());
    let unit = virtio.unit();
    unit.attach(device.requester(), domain).unwrap();
    let maps: Vec<_> = (0..65).map(|n| request(pages(n * 2, 1), at)).collect();
    unit.map_all(domain, &maps).unwrap();
    for n in 0..64 {
        let _ = unit.unmap(domain, pages(n * 2, 1)).unwrap();
    }
    let last = unit.unmap(domain, pages(128, 1));
    assert_eq!(last, Err(UnitError::QueueFull));
    let before = machine.qtest().round_trips();
    let invalidation = Invalidation::Pages {
        domain,
        range: pages(0, 127),
        levels: CachedLevels::Leaves,
    };
    let ticket = unit.submit(invalidation).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    assert_eq!(machine.qtest().round_trips(), before + 1);
    for n in 0..65 {
        let verdict = device.write(Pfn::new(n * 2).iova(), 4).unwrap();
        let expected = if n == 64 {
            Verdict::Landed
        } else {
            Verdict::Stopped
        };
        assert_eq!(verdict, expected, "{n}");
    }
    virtio.stop().unwrap();
}

/// The reasons that QEMU reports, with raw words.
#[test]
fn events_name_their_reason() {
    let machine = machine("");
    let mut virtio = Virtio::start(&machine).unwrap();
    let device = &machine.devices()[0];
    let domain = DomainId::new(1);
    let unit = virtio.unit();
    unit.attach(device.requester(), domain).unwrap();
    let at = machine.buffers().start();
    let read_only = MapRequest {
        permissions: Permissions::READ,
        ..request(pages(8, 1), at)
    };
    unit.map(domain, read_only).unwrap();
    for (iova, raw) in [
        // No mapping: QEMU does not report the kind of access.
        (0x7ff0, [0x100_0000_0002, 0x20, 0x7ff0]),
        (0x8010, [0x102_0000_0002, 0x20, 0x8010]),
    ] {
        let verdict = device.write(Iova::new(iova), 4).unwrap();
        assert_eq!(verdict, Verdict::Stopped);
        let Some(FaultRecord::Fault(fault)) = unit.next_fault() else {
            panic!("no event");
        };
        assert_eq!(fault.raw, raw);
        assert_eq!(fault.reason, FaultReason::Mapping);
    }
    unit.detach(device.requester()).unwrap();
    while unit.next_fault().is_some() {}
    assert_eq!(
        device.write(Iova::new(0x9000), 4).unwrap(),
        Verdict::Stopped
    );
    let Some(FaultRecord::Fault(fault)) = unit.next_fault() else {
        panic!("no event");
    };
    // A finding: section 5.13.6.9 has reason DOMAIN for an endpoint without a domain.
    assert_eq!(fault.raw, [0x100_0000_0000, 0x20, 0x9000]);
    assert_eq!(fault.reason, FaultReason::Unknown(0));
    virtio.stop().unwrap();
}

/// A queue that the device was not told about: it needs a reset, and recovers.
#[test]
fn a_reset_behind_the_drivers_back_is_a_failure() {
    let machine = machine("");
    let mut virtio = Virtio::start(&machine).unwrap();
    let device = &machine.devices()[0];
    let domain = DomainId::new(1);
    let unit = virtio.unit();
    unit.attach(device.requester(), domain).unwrap();
    let at = machine.buffers().start();
    unit.map(domain, request(pages(8, 1), at)).unwrap();
    // `device_status` of the common configuration, at the start of the BAR.
    let mut commands = ringfence_qemu_judge::Commands::default();
    commands.write8(0xe000_0014, 0);
    machine.qtest().send(&commands).unwrap();
    let _ = unit.unmap(domain, pages(8, 1)).unwrap();
    let ticket = unit.submit(Invalidation::Global).unwrap();
    let error = loop {
        match unit.poll(ticket) {
            Ok(false) => {}
            other => break other,
        }
    };
    assert_eq!(error, Err(InvalidationError::Failed));
    let refused = unit.attach(machine.devices()[1].requester(), domain);
    assert_eq!(refused, Err(UnitError::Failed(Failure::Status(0))));
    unit.recover().unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    virtio.stop().unwrap();
}

/// A finding: QEMU looks for a mapping of two bytes, so that a word that begins directly below a
/// mapping is translated by it. The byte lands directly below the physical range.
#[test]
fn the_byte_below_a_mapping_lands() {
    let machine = machine("");
    let mut virtio = Virtio::start(&machine).unwrap();
    let device = &machine.devices()[0];
    let domain = DomainId::new(1);
    let unit = virtio.unit();
    unit.attach(device.requester(), domain).unwrap();
    let at = machine.buffers().start().wrapping_add(0x5000);
    unit.map(domain, request(pages(8, 1), at)).unwrap();
    let below = at.wrapping_add(u64::MAX);
    for (iova, verdict, byte) in [
        (0x7ffe, Verdict::Stopped, 0),
        (0x7fff, Verdict::Landed, 0x78),
    ] {
        assert_eq!(device.write(Iova::new(iova), 1).unwrap(), verdict);
        assert_eq!(machine.ram().byte(below), Some(byte), "{iova:x}");
    }
    virtio.stop().unwrap();
}
