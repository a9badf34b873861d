//! Widths, limits and lifetimes of the unit.

use ringfence_softiommu::{
    DomainMapReason, DomainUnmapError, IommuError, Reader, SoftIommu, SoftIommuLimits, Width,
};
use ringfence_types::{
    Access, DomainId, FaultReason, Iova, IovaRange, Permissions, PhysAddr, RequesterId,
};

const PAGE: u64 = 1 << 12;
const DEVICES: [RequesterId; 2] = [RequesterId::new(0x20), RequesterId::new(0x28)];
const DOMAINS: [DomainId; 2] = [DomainId::new(1), DomainId::new(2)];

/// Creates a unit at its limits of endpoints, domains and readers of each endpoint.
fn full_unit() -> (SoftIommu<()>, [Reader<()>; 2]) {
    let limits = SoftIommuLimits {
        endpoints: 2,
        domains: 2,
        readers: 1,
        ..SoftIommuLimits::default()
    };
    let mut unit = SoftIommu::new(limits, ());
    for (device, domain) in DEVICES.into_iter().zip(DOMAINS) {
        unit.add_endpoint(device).unwrap();
        unit.create_domain(domain).unwrap();
    }
    let readers = DEVICES.map(|device| unit.reader(device).unwrap());
    (unit, readers)
}

fn range(page: u64, pages: u64) -> IovaRange {
    IovaRange::new(Iova::new(page * PAGE), pages * PAGE).unwrap()
}

#[test]
fn unaligned_ranges_are_rejected() {
    let (mut unit, _readers) = full_unit();
    let mut domain = unit.domain(DOMAINS[0]).unwrap();
    for (start, bytes) in [(1, PAGE), (0, PAGE - 1), (0, 1), (PAGE, PAGE + 1)] {
        let requests = IovaRange::new(Iova::new(start), bytes).unwrap();
        let error = domain
            .map(requests, PhysAddr::ZERO, Permissions::READ)
            .unwrap_err();
        assert_eq!(
            (error.range, error.reason),
            (requests, DomainMapReason::NotPages)
        );
        assert_eq!(
            domain.unmap(requests),
            Err(DomainUnmapError::NotPages {
                domain: DOMAINS[0],
                range: requests
            })
        );
    }
    for at in [1, u64::MAX - PAGE + 1 + 1, u64::MAX - PAGE + 1] {
        let at = PhysAddr::new(at);
        let error = domain.map(range(0, 2), at, Permissions::READ).unwrap_err();
        assert_eq!(error.reason, DomainMapReason::BadMemory { at });
    }
}

#[test]
fn every_width_translates_to_its_end_and_no_further() {
    for bits in 13..=64 {
        let limits = SoftIommuLimits {
            width: Width::new(bits).unwrap(),
            ..SoftIommuLimits::default()
        };
        let mut unit = SoftIommu::new(limits, ());
        unit.add_endpoint(DEVICES[0]).unwrap();
        let mut reader = unit.reader(DEVICES[0]).unwrap();
        let mut domain = unit.create_domain(DOMAINS[0]).unwrap();
        let last = (u64::MAX >> (64 - bits)) / PAGE;
        domain
            .map(range(last, 1), PhysAddr::new(PAGE), Permissions::READ)
            .unwrap();
        unit.attach(DEVICES[0], DOMAINS[0]).unwrap();
        let mut burst = reader.online();
        let pin = burst.guard();
        let found = pin.translate(range(last, 1), Access::Read).unwrap();
        assert_eq!(found.only().unwrap().start(), PhysAddr::new(PAGE), "{bits}");
        if bits < 64 {
            let byte = IovaRange::new(Iova::new(1 << bits), 1).unwrap();
            let fault = pin.translate(byte, Access::Read).unwrap_err();
            assert_eq!(fault.reason, FaultReason::AddressBeyondWidth, "{bits}");
        }
        drop(burst);
        let mut domain = unit.domain(DOMAINS[0]).unwrap();
        let all = IovaRange::inclusive(Iova::ZERO, Iova::new(u64::MAX)).unwrap();
        assert_eq!(domain.unmap(all), Ok(1), "{bits}");
    }
    assert!([0, 12, 65].iter().all(|bits| Width::new(*bits).is_none()));
}

#[test]
fn limits_hold() {
    let (mut unit, readers) = full_unit();
    let other = RequesterId::new(9);
    assert_eq!(
        unit.add_endpoint(DEVICES[0]),
        Err(IommuError::EndpointExists(DEVICES[0]))
    );
    assert_eq!(
        unit.add_endpoint(other),
        Err(IommuError::TooManyEndpoints(other))
    );
    assert_eq!(
        unit.reader(DEVICES[0]).err(),
        Some(IommuError::TooManyReaders(DEVICES[0]))
    );
    assert_eq!(
        unit.reader(other).err(),
        Some(IommuError::NoEndpoint(other))
    );
    assert_eq!(
        unit.create_domain(DOMAINS[0]).err(),
        Some(IommuError::TooManyDomains(DOMAINS[0]))
    );
    unit.attach(DEVICES[0], DOMAINS[0]).unwrap();
    assert_eq!(
        unit.remove_domain(DOMAINS[0]),
        Err(IommuError::DomainInUse(DOMAINS[0]))
    );
    unit.detach(DEVICES[0]).unwrap();
    assert_eq!(unit.remove_domain(DOMAINS[0]), Ok(()));
    assert_eq!(
        unit.remove_domain(DOMAINS[0]),
        Err(IommuError::NoDomain(DOMAINS[0]))
    );
    assert_eq!(
        unit.create_domain(DOMAINS[1]).err(),
        Some(IommuError::DomainExists(DOMAINS[1]))
    );
    // Dropping a reader frees its slot, even if its read section was leaked.
    let mut reader = readers.into_iter().next().unwrap();
    std::thread::spawn(move || std::mem::forget(reader.online()))
        .join()
        .unwrap();
    let mut reader = unit.reader(DEVICES[0]).unwrap();
    assert!(
        reader
            .online()
            .guard()
            .translate(range(0, 1), Access::Read)
            .is_err()
    );
}

/// After removal of the endpoint or the unit, its readers get no translation.
#[test]
fn readers_outlive_their_endpoint_and_the_unit() {
    for how in 0..2 {
        let (mut unit, [mut reader, _other]) = full_unit();
        let mut domain = unit.domain(DOMAINS[0]).unwrap();
        let memory = PhysAddr::new(7 * PAGE);
        domain.map(range(0, 1), memory, Permissions::READ).unwrap();
        unit.attach(DEVICES[0], DOMAINS[0]).unwrap();
        let found = reader.online().guard().translate(range(0, 1), Access::Read);
        assert_eq!(found.unwrap().only().unwrap().start(), memory);
        if how == 0 {
            unit.remove_endpoint(DEVICES[0]).unwrap();
        } else {
            drop(unit);
        }
        let fault = reader
            .online()
            .guard()
            .translate(range(0, 1), Access::Read)
            .unwrap_err();
        assert_eq!(fault.reason, FaultReason::Blocked);
    }
}

/// Guests create domains; a failed allocation must not abort the process.
#[test]
fn a_domain_that_there_is_no_memory_for_is_refused() {
    let limits = SoftIommuLimits {
        tables: usize::MAX >> 13,
        ..SoftIommuLimits::default()
    };
    let mut iommu = SoftIommu::new(limits, ());
    let id = DomainId::new(1);
    assert_eq!(
        iommu.create_domain(id).err(),
        Some(IommuError::NoMemory(id))
    );
    assert_eq!(iommu.domain(id).err(), Some(IommuError::NoDomain(id)));
}
