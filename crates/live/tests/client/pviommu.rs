//! A disk behind the para-virtual IOMMU: it can access exactly the pages that the driver has
//! mapped.

use ringfence_live::assigned::AssignedDma;
use ringfence_live::dma::Dma;
use ringfence_live::host::HostPagePool;
use ringfence_live::virtio::blk::Blk;
use ringfence_types::Direction;

use crate::guest::{AWAY, Guest, READ_WRITE, read};
use crate::pviommu_driver::*;
use crate::rig::*;

fn guest() -> Guest<Blk, Para> {
    Guest::behind_para(|_, counters| Blk::new(disk_file(), false, counters).unwrap())
}

/// Returns a guest whose disk the hardware model translates for.
fn assigned(optimisations: HostPagePool) -> Guest<Blk, Para, AssignedDma> {
    Guest::assigned_para(optimisations, |counters| {
        Blk::new(disk_file(), false, counters).unwrap()
    })
}

/// Starts the drivers: maps the disk's rings, header and status in both directions.
fn begun<A: Dma>(mut guest: Guest<Blk, Para, A>) -> Guest<Blk, Para, A> {
    guest.attach();
    let rings = guest.map(QUEUE + AWAY, 0xa000 - QUEUE, QUEUE, READ_WRITE);
    assert_eq!(rings, 0);
    guest.begin();
    guest
}

fn ready() -> Guest<Blk, Para> {
    begun(guest())
}

const HOSTS: [HostPagePool; 2] = [HostPagePool::Off, HostPagePool::On];

#[test]
fn mapped_pages_are_accessible_until_unmap() {
    reached_until_unmapped(guest());
    for host in HOSTS {
        reached_until_unmapped(assigned(host));
    }
}

/// A device that software translates for uses the same second stage. The host's lookup and
/// allocation of frames do not depend on the translation.
#[test]
fn every_translation_allocates_a_frame() {
    for (host, hits) in HOSTS.into_iter().zip([0, 1]) {
        let disk = |_: &_, counters| Blk::new(disk_file(), false, counters).unwrap();
        frame_for_a_page(begun(Guest::behind_para_of(host, disk)), hits);
        frame_for_a_page(begun(assigned(host)), hits);
    }
}

/// Checks the counters of walks, pointer hits, allocated frames and awaited frames. `hits` is the
/// number of pointer hits of one map.
fn frame_for_a_page<A: Dma>(mut guest: Guest<Blk, Para, A>, hits: u64) {
    let now = |guest: &Guest<Blk, Para, A>| {
        let host = &guest.iommu.counters;
        (
            (host.second_stage_walks.get(), host.last_table_hits.get()),
            (host.frames.get(), host.frames_awaited.get()),
        )
    };
    let data = 0xb000 + AWAY;
    let begun = now(&guest);
    // Rings, header and status, page by page.
    let pages = (0xa000 - QUEUE) / PAGE;
    assert_eq!(begun.1, (pages, pages * (1 - hits)));
    assert!(begun.0.0 > 0 && (begun.0.1 > 0) == (hits > 0));
    // Two IOVAs of one page have one frame, which remains after an unmap.
    for (round, giova) in [data, data + PAGE, data].into_iter().enumerate() {
        let before = now(&guest);
        assert_eq!(guest.map(giova, PAGE, 0xb000, READ_WRITE), 0);
        let after = now(&guest);
        let new = u64::from(round == 0);
        assert_eq!(
            after.1,
            (before.1.0 + new, before.1.1 + new * (1 - hits)),
            "{round}"
        );
        assert_eq!(
            after.0,
            (before.0.0 + 1 - hits, before.0.1 + hits),
            "{round}"
        );
        let count = round as u16 + 1;
        assert_eq!(read(&mut guest, count, giova), Some(0));
        assert_ne!(guest.disk.peek(0xb000, 512), vec![0; 512]);
        guest.disk.poke(0xb000, &[0; 512]);
        assert_eq!(now(&guest), after, "an access asks for none");
        if giova == data {
            assert_eq!(guest.unmap(giova, PAGE), 0);
        }
    }
    // An address outside guest memory gets no frame.
    assert_eq!(guest.map(data, PAGE, RAM_BYTES, READ_WRITE), 4);
    assert_eq!(now(&guest).1.0, pages + 1);
}

fn reached_until_unmapped<A: Dma>(guest: Guest<Blk, Para, A>) {
    let mut guest = begun(guest);
    let data = 0xb000 + AWAY;
    assert_eq!(read(&mut guest, 1, data), Some(1), "not mapped yet");
    // In one batch: map for reading by the disk, unmap, map for writing by the disk. A second map
    // is refused.
    let from_disk = map(DISK, Direction::FromDevice, &[(data, 0xb000)]);
    let statuses = guest.ask(&[
        map(DISK, Direction::ToDevice, &[(data, 0xb000)]),
        unmap(&[data]),
        from_disk.clone(),
        from_disk,
        map(DISK + 1, Direction::FromDevice, &[(data + PAGE, 0xb000)]),
        map(DISK, Direction::FromDevice, &[(data + PAGE, RAM_BYTES)]),
    ]);
    assert_eq!(statuses, [0, 0, 0, 5, 2, 4]);
    assert_eq!(guest.iommu.counters.doorbells.get(), 2, "one for each call");
    assert_eq!(read(&mut guest, 2, data), Some(0));
    assert_ne!(guest.disk.peek(0xb000, 512), vec![0; 512]);
    guest.disk.poke(0xb000, &[0; 512]);
    assert_eq!(guest.ask(&[unmap(&[data])]), [0]);
    assert_eq!(read(&mut guest, 3, data), Some(1));
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512], "not a byte");
    assert_eq!(guest.ask(&[unmap(&[data])]), [6]);
}

#[test]
fn access_only_between_driver_ok_and_reset() {
    only_between(guest(), guest());
    for host in HOSTS {
        only_between(assigned(host), assigned(host));
    }
}

fn only_between<A: Dma>(mut guest: Guest<Blk, Para, A>, other: Guest<Blk, Para, A>) {
    guest.start_disk(QUEUE);
    assert_eq!(read(&mut guest, 1, 0xb000), None);
    assert_eq!(
        guest.disk.register(0x14, 1) & 64,
        64,
        "its rings are out of reach"
    );

    let mut guest = begun(other);
    let data = 0xb000 + AWAY;
    assert_eq!(
        guest.ask(&[map(DISK, Direction::FromDevice, &[(data, 0xb000)])]),
        [0]
    );
    guest.iommu.set(0x14, &[0]);
    assert_eq!(read(&mut guest, 1, data), None);
    // The next driver finds no mappings.
    guest.attach();
    assert_eq!(guest.ask(&[unmap(&[data])]), [6]);
}

#[test]
fn stopped_access_is_reported() {
    told(guest());
    for host in HOSTS {
        told(assigned(host));
    }
}

fn told<A: Dma>(guest: Guest<Blk, Para, A>) {
    let mut guest = begun(guest);
    let data = 0xb000 + AWAY;
    assert_eq!(
        guest.ask(&[map(DISK, Direction::ToDevice, &[(data, 0xb000)])]),
        [0]
    );
    guest.wait_for_a_fault();
    assert_eq!(read(&mut guest, 1, data), Some(1), "not in this direction");
    assert_eq!(read(&mut guest, 2, 0xdead_0000), Some(1), "not mapped");
    let expected = [(2, data), (1, 0xdead_0000)].map(|(reason, giova)| {
        [longs(&[DISK.into()]), words(&[2, reason]), longs(&[giova])].concat()
    });
    assert_eq!(guest.events(), expected);
}

#[test]
fn a_request_without_a_place_for_its_status_breaks_the_device() {
    let mut guest = guest();
    guest.attach();
    guest.iommu.poke(REQUEST, &unmap(&[AWAY]));
    guest.iommu.poke(REQUESTS, &descriptor(REQUEST, 24, 0, 0));
    guest.iommu.poke(REQUESTS + 0x1002, &[1, 0]);
    guest.iommu.ring(0);
    assert_eq!(guest.iommu.register(0x14, 1) & 64, 64);
}

/// Returns the bytes of this process that are resident in memory.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * PAGE
}

/// A driver makes ten million requests available, sixteen at a time over the same ring, without a
/// doorbell. The device reads no request and uses no memory, and the disk is served. At the
/// doorbell, more requests are available than the queue has descriptors. virtio forbids that, so
/// the device needs a reset.
#[test]
fn ten_million_requests_without_a_doorbell_cost_nothing() {
    crate::alone("pviommu::ten_million_requests");
}

/// Runs in its own process, so that no other test affects the measured memory.
#[test]
#[ignore = "started by another test"]
fn ten_million_requests() {
    const MADE: u64 = 10_000_000;
    if !crate::is_alone() {
        return;
    }
    let mut guest = ready();
    let data = 0xb000 + AWAY;
    assert_eq!(guest.map(data, PAGE, 0xb000, READ_WRITE), 0);
    let (doorbells, maps) = {
        let counters = &guest.iommu.counters;
        (counters.doorbells.get(), counters.maps.get())
    };
    guest
        .iommu
        .poke(REQUEST, &map(DISK, Direction::ToDevice, &[(AWAY, 0xc000)]));
    let before = resident();
    let mut made = u64::from(guest.requests);
    for round in 0..MADE / 16 {
        made += 16;
        guest.iommu.poke(REQUESTS + 0x1004, &[0; 32]);
        let index = (made % (1 << 16)) as u16;
        guest.iommu.poke(REQUESTS + 0x1002, &index.to_le_bytes());
        if round % 100_000 == 0 {
            let count = (round / 100_000 + 1) as u16;
            assert_eq!(read(&mut guest, count, data), Some(0), "the disk is served");
        }
    }
    let kept = resident().saturating_sub(before);
    assert!(kept < 4 << 20, "{kept} bytes more");
    let counters = &guest.iommu.counters;
    assert_eq!(
        (counters.doorbells.get(), counters.maps.get()),
        (doorbells, maps),
        "nobody looked"
    );
    guest.iommu.ring(0);
    assert_eq!(guest.iommu.register(0x14, 1) & 64, 64);
    assert_eq!(guest.iommu.counters.maps.get(), maps);
    assert_eq!(read(&mut guest, 8, data), Some(0), "the disk is served");
    // The next driver finds the IOMMU in its initial state.
    guest.iommu.set(0x14, &[0]);
    guest.attach();
    assert_eq!(guest.map(data, PAGE, 0xb000, READ_WRITE), 0);
}

/// Attack A32: the client shares memory anew, and the host cannot lock a mapped page in it.
#[test]
fn memory_in_which_a_mapped_page_cannot_be_locked_is_refused() {
    const ENOMEM: u32 = 12;
    const START: u64 = 1 << 30;
    let mut guest = Guest::behind_para(|iommu, counters| {
        iommu.lock_mapped();
        Blk::new(disk_file(), false, counters).unwrap()
    });
    guest.attach();
    assert_eq!(guest.iommu.map(START, 2 * PAGE, 0, 3).errno, 0);
    assert_eq!(guest.map(AWAY, PAGE, START + PAGE, READ_WRITE), 0);
    // No device can access a missing page.
    assert_eq!(guest.iommu.unmap(START, 2 * PAGE, 0).errno, 0);
    // Here the page spans two host pages, or only half of it is present.
    let half = PAGE / 2;
    for (start, bytes) in [(START + half, 2 * PAGE), (START, PAGE + half)] {
        assert_eq!(guest.iommu.map(start, bytes, 0, 3).errno, ENOMEM);
    }
    // The refusals changed nothing.
    assert_eq!(guest.iommu.map(START, 2 * PAGE, 0, 3).errno, 0);
    assert_eq!(guest.unmap(AWAY, PAGE), 0);
    assert_eq!(guest.iommu.unmap(START, 2 * PAGE, 0).errno, 0);
    assert_eq!(guest.iommu.map(START + half, 2 * PAGE, 0, 3).errno, 0);
}
