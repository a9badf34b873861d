//! The IOMMUs, whose queue accesses need bus mastering, too.

use ringfence_live::virtio::blk::Blk;
use ringfence_types::Direction;

use super::{DATA, EVENT, blk, in_vain, then};
use crate::guest::{AWAY, DOMAIN, ENDPOINT, EVENT_QUEUE, Guest, IOMMU_QUEUE, read};
use crate::pviommu_driver::{self, DISK, PAGE, Para};
use crate::rig::*;

/// Reading its queues is an access by the IOMMU; translating is not. Its endpoints therefore
/// continue, and the driver receives faults later.
#[test]
fn a_virtio_iommu() {
    let mut guest = Guest::with(|_, counters| blk(counters)).mapped();
    // Unmaps the data page.
    let at = 0x6_0000;
    let range = longs(&[DATA + AWAY, DATA + AWAY + 0xfff]);
    let unmap = [vec![4, 0, 0, 0], words(&[DOMAIN]), range, vec![0; 4]].concat();
    guest.iommu.poke(at, &unmap);
    guest.iommu.poke(0x6_1000, &[0xee; 4]);
    let request = descriptor(at, unmap.len() as u32, NEXT, 1);
    guest.iommu.poke(IOMMU_QUEUE, &request);
    let count = guest.requests + 1;
    let slot = u64::from(guest.requests % 16);
    guest.iommu.poke(IOMMU_QUEUE + 0x1004 + 2 * slot, &[0, 0]);
    guest.iommu.poke(IOMMU_QUEUE + 0x1002, &count.to_le_bytes());
    in_vain(&mut guest.iommu, (0, IOMMU_QUEUE), |_| ());
    assert_eq!(read(&mut guest, 1, DATA + AWAY), Some(0), "still mapped");
    then(&mut guest.iommu, 0);
    assert_eq!(guest.iommu.peek(0x6_1000, 1), [0]);
    assert_eq!(read(&mut guest, 2, DATA + AWAY), Some(1), "unmapped");
}

#[test]
fn a_virtio_iommu_with_a_fault_to_tell() {
    let mut guest = Guest::with(|_, counters| blk(counters)).mapped();
    guest.wait_for_a_fault();
    guest.iommu.master(false);
    assert_eq!(read(&mut guest, 1, 0xdead_0000), Some(1));
    in_vain(&mut guest.iommu, (1, EVENT_QUEUE), |_| ());
    then(&mut guest.iommu, 1);
    assert_eq!(guest.fault(), Some((ENDPOINT, 0xdead_0000)));
}

#[test]
fn a_para_virtual_iommu() {
    let mut guest = Guest::behind_para(|_, counters| blk(counters)).mapped();
    let request = pviommu_driver::unmap(&[DATA + AWAY]);
    let (at, status) = (pviommu_driver::REQUEST, 0x7_1000);
    guest.iommu.poke(at, &request);
    guest.iommu.poke(status, &[0xee]);
    let chain = [
        descriptor(at, request.len() as u32, NEXT, 1),
        descriptor(status, 1, WRITE, 0),
    ];
    guest.iommu.poke(pviommu_driver::REQUESTS, &chain.concat());
    let slot = u64::from(guest.requests % 16);
    let count = guest.requests + 1;
    guest
        .iommu
        .poke(pviommu_driver::REQUESTS + 0x1004 + 2 * slot, &[0, 0]);
    guest
        .iommu
        .poke(pviommu_driver::REQUESTS + 0x1002, &count.to_le_bytes());
    in_vain(&mut guest.iommu, (0, pviommu_driver::REQUESTS), |_| ());
    assert_eq!(read(&mut guest, 1, DATA + AWAY), Some(0), "still mapped");
    then(&mut guest.iommu, 0);
    assert_eq!(guest.iommu.peek(status, 1), [0]);
    assert_eq!(read(&mut guest, 2, DATA + AWAY), Some(1), "unmapped");
}

#[test]
fn a_para_virtual_iommu_with_an_event_to_tell() {
    let mut guest: Guest<Blk, Para> = Guest::behind_para(|_, counters| blk(counters)).mapped();
    guest.wait_for_a_fault();
    guest.iommu.master(false);
    assert_eq!(read(&mut guest, 1, 0xdead_0000), Some(1));
    in_vain(&mut guest.iommu, (1, EVENT_QUEUE), |_| ());
    then(&mut guest.iommu, 1);
    assert_eq!(guest.fault(), Some((ENDPOINT, 0xdead_0000)));
    assert_eq!(guest.iommu.peek(EVENT, 1), [DISK as u8]);
    // Maps and unmaps requested in between have taken effect.
    let more = [(0x10_0000 + AWAY, PAGE)];
    let requests = [pviommu_driver::map(DISK, Direction::ToDevice, &more)];
    assert_eq!(guest.ask(&requests), [0]);
}
