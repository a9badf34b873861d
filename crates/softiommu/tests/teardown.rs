//! Readers that outlive their unit.
#![allow(missing_docs)]

use std::sync::mpsc::channel;
use std::thread;

use ringfence_softiommu::{Reader, SoftIommu, SoftIommuLimits};
use ringfence_types::{Access, DomainId, Iova, IovaRange, Permissions, PhysAddr, RequesterId};

const DISK: RequesterId = RequesterId::new(0x20);
const DOMAIN: DomainId = DomainId::new(1);

fn page() -> IovaRange {
    IovaRange::new(Iova::new(0x1000), 0x1000).unwrap()
}

/// Creates a unit in which [`page`] is mapped for the disk.
fn unit() -> SoftIommu<()> {
    let mut unit = SoftIommu::new(SoftIommuLimits::default(), ());
    unit.add_endpoint(DISK).unwrap();
    unit.create_domain(DOMAIN).unwrap();
    unit.attach(DISK, DOMAIN).unwrap();
    map(&mut unit);
    unit
}

fn map(unit: &mut SoftIommu<()>) {
    let mapped = unit
        .domain(DOMAIN)
        .unwrap()
        .map(page(), PhysAddr::new(0x5000), Permissions::READ);
    mapped.unwrap();
}

/// Drops a unit while another thread is in a read section; if `in_a_burst`, this thread is in one
/// too. Returns whether each thread still reaches the page with its next guard.
fn reached_after_drop(mut unit: SoftIommu<()>, in_a_burst: bool) -> (bool, bool) {
    let reached = |reader: &mut Reader<()>| {
        reader
            .online()
            .guard()
            .translate(page(), Access::Read)
            .is_ok()
    };
    let (mut main_reader, mut there) = (unit.reader(DISK).unwrap(), unit.reader(DISK).unwrap());
    assert!(reached(&mut main_reader) && reached(&mut there));
    // A change while no reader is online: the readers must not rely on it to reload their view.
    map_and_unmap(&mut unit);
    thread::scope(|scope| {
        let (online, is_online) = channel();
        let (drop_over, is_dropped) = channel::<()>();
        let other = scope.spawn(move || {
            let mut burst = there.online();
            online.send(()).unwrap();
            // If this thread has no read section, drop waits for the end of this one.
            if in_a_burst {
                is_dropped.recv().unwrap();
                burst.guard().translate(page(), Access::Read).is_ok()
            } else {
                drop(burst);
                is_dropped.recv().unwrap();
                there
                    .online()
                    .guard()
                    .translate(page(), Access::Read)
                    .is_ok()
            }
        });
        is_online.recv().unwrap();
        if in_a_burst {
            let mut burst = main_reader.online();
            assert!(burst.guard().translate(page(), Access::Read).is_ok());
            drop(unit);
            drop_over.send(()).unwrap();
            let main_reader = burst.guard().translate(page(), Access::Read).is_ok();
            (main_reader, other.join().unwrap())
        } else {
            drop(unit);
            drop_over.send(()).unwrap();
            (reached(&mut main_reader), other.join().unwrap())
        }
    })
}

fn map_and_unmap(unit: &mut SoftIommu<()>) {
    let other = IovaRange::new(Iova::new(0x8000), 0x1000).unwrap();
    let mut domain = unit.domain(DOMAIN).unwrap();
    domain
        .map(other, PhysAddr::ZERO, Permissions::READ)
        .unwrap();
    assert_eq!(domain.unmap(other), Ok(1));
}

#[test]
fn readers_are_denied_when_drop_returns() {
    assert_eq!(reached_after_drop(unit(), false), (false, false));
}

/// A thread in a read section cannot wait for readers. Each reader is nevertheless blocked from its
/// next guard on.
#[test]
fn drop_in_a_burst_denies_the_next_pin() {
    assert_eq!(reached_after_drop(unit(), true), (false, false));
}

/// The same with an idle QSBR state before both readers go online.
#[test]
fn readers_of_a_parked_gate_are_denied_after_drop() {
    let mut unit = unit();
    for _ in 0..10_000 {
        map_and_unmap(&mut unit);
    }
    assert_eq!(reached_after_drop(unit, true), (false, false));
}
