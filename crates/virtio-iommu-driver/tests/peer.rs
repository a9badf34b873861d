//! The driver and the device of `ringfence-virtio-iommu` in one process.

use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::BTreeSet;

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{MapError, MapRequest, UnmapError};
use ringfence_types::{
    Access, CachedLevels, DomainId, Invalidation, Invalidator, Iova, IovaRange, Nanos, Pending,
    Permissions, Pfn, PfnRange, PhysAddr, PhysRange, RequesterId,
};
use ringfence_virtio_iommu::{
    AccessTarget, BypassPolicy, Device, EndpointId, Options, ReservedRegion, ReservedRegionKind,
};
use ringfence_virtio_iommu_driver::{
    DomainTable, FaultReason, FaultRecord, LocalDevice, SharedUnit, Status, Unit, UnitError,
};

const DOORBELL: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);
const OPTIONS: ringfence_virtio_iommu_driver::Options = ringfence_virtio_iommu_driver::Options {
    first_endpoint: 0,
    poll_limit: 1000,
};

fn range(first: u64, last: u64) -> IovaRange {
    IovaRange::inclusive(Iova::new(first), Iova::new(last)).unwrap()
}

fn device(memory: &Arena) -> LocalDevice<(), &Arena> {
    let options = Options {
        unattached: BypassPolicy::DriverDecides {
            bypass_at_first: true,
        },
        ..Options::default()
    };
    let mut device = Device::new(options, ()).unwrap();
    let doorbell = ReservedRegion {
        range: range(DOORBELL.0, DOORBELL.1),
        kind: ReservedRegionKind::Msi,
    };
    for id in 0..3 {
        device
            .add_endpoint(EndpointId::new(id), &[doorbell])
            .unwrap();
    }
    LocalDevice::new(device, memory)
}

fn frames(memory: &Arena) -> Frames<&Arena> {
    let region = PhysRange::new(PhysAddr::new(0x10_0000), 1 << 20).unwrap();
    Frames::new(memory, region)
}

fn pages(first: u64, count: u64) -> PfnRange {
    PfnRange::new(Pfn::new(first), count).unwrap()
}

fn request(first: u64, count: u64) -> MapRequest {
    MapRequest {
        iova: Iova::new(first << 12),
        pa: PhysAddr::new(0x70_0000 + (first << 12)),
        pages: count,
        permissions: Permissions::READ,
    }
}

fn reaches(device: &LocalDevice<(), &Arena>, endpoint: u16, page: u64) -> bool {
    let at = range(page << 12, page << 12);
    let found = device.access(EndpointId::new(endpoint.into()), at, Access::Read);
    if let Ok(AccessTarget::Memory { physical, .. }) = &found {
        assert_eq!(physical.start().get(), 0x70_0000 + (page << 12));
    }
    found.is_ok()
}

#[test]
fn reserved_regions_and_bypass() {
    let memory = Arena::new(1 << 24).unwrap();
    let (device, frames) = (device(&memory), frames(&memory));
    let at = range(0x5000, 0x5000);
    let write = || device.access(EndpointId::new(1), at, Access::Write);
    assert!(write().is_ok(), "bypass at first");
    let mut unit = Unit::new(&device, &memory, &frames, &OPTIONS).unwrap();
    assert!(write().is_err());
    let Some(FaultRecord::Fault(fault)) = unit.next_fault() else {
        panic!("no event");
    };
    assert_eq!(fault.reason, FaultReason::Domain);
    let found = unit.probe(RequesterId::new(1)).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].range, range(DOORBELL.0, DOORBELL.1));
    assert_eq!(found[0].kind, ReservedRegionKind::Msi);
    let nobody = unit.probe(RequesterId::new(9));
    assert_eq!(nobody, Err(UnitError::Refused(Status::NoEnt)));
    unit.pass_through(RequesterId::new(1), DomainId::new(5))
        .unwrap();
    assert!(write().is_ok());
    unit.detach(RequesterId::new(1)).unwrap();
    assert!(write().is_err());
}

/// A refusal in the middle of a burst undoes the others.
#[test]
fn a_refused_burst_leaves_nothing() {
    let memory = Arena::new(1 << 24).unwrap();
    let (device, frames) = (device(&memory), frames(&memory));
    let mut unit = Unit::new(&device, &memory, &frames, &OPTIONS).unwrap();
    let domain = DomainId::new(1);
    unit.attach(RequesterId::new(1), domain).unwrap();
    let burst = [request(1, 1), request(0xf_ee00, 1), request(2, 1)];
    let refused = unit.map_all(domain, &burst);
    assert_eq!(refused, Err(UnitError::Refused(Status::Inval)));
    assert_eq!(device.mappings(), 0);
    // A domain that maps the doorbells accepts no endpoint that reserves them.
    let other = DomainId::new(2);
    unit.map_all(other, &burst).unwrap();
    let refused = unit.attach(RequesterId::new(2), other);
    assert_eq!(refused, Err(UnitError::Refused(Status::Inval)));
    assert!(!reaches(&device, 2, 1));
    let many: Vec<_> = (0..200).map(|n| request(0x100 + 2 * n, 1)).collect();
    unit.map_all(domain, &many).unwrap();
    assert_eq!(device.mappings(), 200);
}

#[derive(Debug, Clone)]
enum Step {
    Map(u16, u64, u64),
    Unmap(u16, u64, u64),
    Flush,
    Attach(u16, u16),
    Detach(u16),
    Recover,
}

fn step() -> impl Strategy<Value = Step> {
    let (domain, device) = (1_u16..3, 0_u16..3);
    prop_oneof![
        4 => (domain.clone(), 0_u64..24, 1_u64..5).prop_map(|(d, f, c)| Step::Map(d, f, c)),
        3 => (domain.clone(), 0_u64..24, 1_u64..9).prop_map(|(d, f, c)| Step::Unmap(d, f, c)),
        2 => Just(Step::Flush),
        1 => (device.clone(), domain).prop_map(|(e, d)| Step::Attach(e, d)),
        1 => device.prop_map(Step::Detach),
        1 => Just(Step::Recover),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// After a flush, each device reaches exactly the pages that its domain maps.
    #[test]
    fn the_device_agrees(steps in prop::collection::vec(step(), 0..50)) {
        let memory = Arena::new(1 << 24).unwrap();
        let (device, frames) = (device(&memory), frames(&memory));
        let mut unit = Unit::new(&device, &memory, &frames, &OPTIONS).unwrap();
        let mut mapped = BTreeSet::new();
        let mut domains = [None; 3];
        for step in steps {
            match step {
                Step::Map(domain, first, count) => {
                    let is_free = (first..first + count).all(|p| !mapped.contains(&(domain, p)));
                    let result = unit.map(DomainId::new(domain), request(first, count));
                    prop_assert_eq!(result.is_ok(), is_free);
                    if is_free {
                        mapped.extend((first..first + count).map(|page| (domain, page)));
                    }
                }
                Step::Unmap(domain, first, count) => {
                    let result = unit.unmap(DomainId::new(domain), pages(first, count));
                    let all = (first..first + count).all(|p| mapped.contains(&(domain, p)));
                    prop_assert!(all || result.is_err());
                    if result.is_ok() {
                        mapped.retain(|(d, p)| *d != domain || *p < first || *p >= first + count);
                    }
                }
                Step::Flush => {
                    let ticket = unit.submit(Invalidation::Global).unwrap();
                    prop_assert_eq!(unit.poll(ticket), Ok(true));
                }
                Step::Attach(requester, domain) => {
                    let slot = &mut domains[usize::from(requester)];
                    let id = DomainId::new(domain);
                    let result = unit.attach(RequesterId::new(requester), id);
                    prop_assert_eq!(result.is_ok(), slot.is_none());
                    *slot = slot.or(Some(domain));
                }
                Step::Detach(requester) => {
                    let slot = domains[usize::from(requester)].take();
                    let result = unit.detach(RequesterId::new(requester));
                    prop_assert_eq!(result.is_ok(), slot.is_some());
                }
                Step::Recover => prop_assert_eq!(unit.recover(), Ok(())),
            }
        }
        let ticket = unit.submit(Invalidation::Global).unwrap();
        prop_assert_eq!(unit.poll(ticket), Ok(true));
        for (requester, domain) in (0..).zip(domains) {
            for page in 0..32 {
                let expected = domain.is_some_and(|domain| mapped.contains(&(domain, page)));
                prop_assert_eq!(reaches(&device, requester, page), expected);
            }
        }
    }
}

type Shared<'m> = SharedUnit<
    &'m LocalDevice<(), &'m Arena>,
    &'m Arena,
    &'m Frames<&'m Arena>,
    RefCell<Unit<&'m LocalDevice<(), &'m Arena>, &'m Arena, &'m Frames<&'m Arena>>>,
>;

struct Cpu<'m> {
    memory: &'m Arena,
    frames: &'m Frames<&'m Arena>,
    invalidator: &'m Shared<'m>,
}

impl<'m> Platform for Cpu<'m> {
    type Memory = &'m Arena;
    type Frames = &'m Frames<&'m Arena>;
    type Invalidator = &'m Shared<'m>;

    fn memory(&self) -> &Self::Memory {
        &self.memory
    }

    fn frames(&self) -> &Self::Frames {
        &self.frames
    }

    fn invalidator(&mut self) -> &mut Self::Invalidator {
        &mut self.invalidator
    }

    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

#[test]
fn a_table_of_the_mapping_layer() {
    let memory = Arena::new(1 << 24).unwrap();
    let (device, frames) = (device(&memory), frames(&memory));
    let mut unit = Unit::new(&device, &memory, &frames, &OPTIONS).unwrap();
    let domain = DomainId::new(1);
    unit.attach(RequesterId::new(1), domain).unwrap();
    let shared: Shared<'_> = SharedUnit::new(unit, RefCell::new);
    let mut cpu = Cpu {
        memory: &memory,
        frames: &frames,
        invalidator: &shared,
    };
    let table = DomainTable::new(&shared, domain);
    assert_eq!(table.domain(), domain);
    let map = |cpu: &mut Cpu<'_>, request| table.map(&mut (), cpu, request);
    // More unmaps than the queue has slots.
    for page in 0..100 {
        map(&mut cpu, request(page, 1)).unwrap();
    }
    let iova = Iova::new(0x5000);
    assert_eq!(
        map(&mut cpu, request(5, 1)),
        Err(MapError::AlreadyMapped { iova })
    );
    assert_eq!(map(&mut cpu, request(5, 0)), Err(MapError::Empty));
    assert_eq!(table.is_mapped(&cpu, Pfn::new(99)), Some(true));
    let mut last = None;
    for page in 0..100 {
        let (token, levels, ()) = table.unmap(&mut (), &mut cpu, pages(page, 1)).unwrap();
        assert_eq!(levels, CachedLevels::Leaves);
        last = Some(token);
    }
    assert!(reaches(&device, 1, 99), "not invalidated yet");
    let missing = table.unmap(&mut (), &mut cpu, pages(5, 1)).map(drop);
    assert_eq!(missing, Err(UnmapError::NotMapped { iova }));
    table.sync(&mut (), &mut cpu);
    let invalidation = Invalidation::Pages {
        domain,
        range: pages(99, 1),
        levels: CachedLevels::Leaves,
    };
    let invalidator = cpu.invalidator();
    let pending = Pending::submit(invalidator, invalidation, last.unwrap()).unwrap();
    assert_eq!(pending.wait(invalidator).unwrap().range(), pages(99, 1));
    assert!((0..100).all(|page| !reaches(&device, 1, page)));
    assert!(table.is_empty(&cpu));
}
