//! A disk whose accesses the hardware model translates, behind each IOMMU and without one. It can
//! access exactly the mapped pages, through their frames, and each unmap invalidates the IOTLB.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use ringfence_live::assigned::AssignedDma;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::host::HostPagePool;
use ringfence_live::pviommu::PvIommu;
use ringfence_live::virtio::blk::Blk;
use ringfence_live::virtio::rng::Rng;
use ringfence_types::{Direction, RequesterId};

use crate::guest::{AWAY, ENDPOINT, Guest, READ, READ_WRITE, Virtio, read, transfer};
use crate::pviommu_driver::{DISK, PAGE, Para, map, unmap, unmap_for};
use crate::rig::*;

fn disk(counters: Arc<DeviceCounters>) -> Blk {
    Blk::new(disk_file(), false, counters).unwrap()
}

fn para(optimisations: HostPagePool) -> Guest<Blk, Para, AssignedDma> {
    let mut guest = Guest::assigned_para(optimisations, disk);
    guest.attach();
    let rings = guest.map(QUEUE + AWAY, 0xa000 - QUEUE, QUEUE, READ_WRITE);
    assert_eq!(rings, 0);
    guest.begin();
    guest
}

fn virtio() -> Guest<Blk, Virtio, AssignedDma> {
    Guest::assigned(disk)
}

/// The IOTLB has the translation at the unmap: only the invalidation removes it.
#[test]
fn unmap_removes_a_used_translation() {
    let mut guest = para(HostPagePool::Off);
    let data = 0xb000 + AWAY;
    for round in 0..3 {
        let gpa = 0xb000 + round * PAGE;
        assert_eq!(guest.map(data, PAGE, gpa, READ_WRITE), 0);
        let count = (3 * round) as u16;
        let hits = guest.disk.counters.unit_hits.get();
        assert_eq!(read(&mut guest, count + 1, data), Some(0));
        assert_eq!(read(&mut guest, count + 2, data), Some(0));
        assert!(guest.disk.counters.unit_hits.get() > hits, "it was cached");
        assert_ne!(guest.disk.peek(gpa, 512), vec![0; 512]);
        let invalidations = guest.iommu.counters.unit_invalidations.get();
        assert_eq!(guest.unmap(data, PAGE), 0);
        assert!(guest.iommu.counters.unit_invalidations.get() > invalidations);
        guest.disk.poke(gpa, &[0; 512]);
        assert_eq!(read(&mut guest, count + 3, data), Some(1));
        assert_eq!(guest.disk.peek(gpa, 512), vec![0; 512], "not a byte");
    }
    let counters = &guest.iommu.counters;
    assert_eq!((counters.faults.get(), counters.stale.get()), (3, 3));
}

/// A hardware walk reads four tables, or fewer with the paging-structure caches. The host finds a
/// page's frame by a second-stage walk, or through the pointer to the last table.
#[test]
fn hardware_and_host_work_is_counted() {
    for (optimisations, hits) in [(HostPagePool::Off, 0), (HostPagePool::On, 1)] {
        let mut guest = para(optimisations);
        let data = 0xb000 + AWAY;
        let now = |guest: &Guest<Blk, Para, AssignedDma>| {
            let (unit, host) = (&guest.disk.counters, &guest.iommu.counters);
            (
                (unit.unit_walks.get(), unit.unit_reads.get()),
                (host.frames.get(), host.frames_awaited.get()),
                (host.second_stage_walks.get(), host.last_table_hits.get()),
            )
        };
        let begun = now(&guest);
        // Pages of the rings, the header and the status.
        let pages = (0xa000 - QUEUE) / PAGE;
        let awaited = if hits == 0 { pages } else { 0 };
        assert_eq!(begun.1, (pages, awaited));
        assert_eq!(guest.map(data, PAGE, 0xb000, READ_WRITE), 0);
        assert_eq!(guest.unmap(data, PAGE), 0);
        let second = now(&guest);
        assert_eq!(second.1.0, pages + 1, "a page has one frame");
        assert_eq!(guest.map(data, PAGE, 0xb000, READ_WRITE), 0);
        let third = now(&guest);
        assert_eq!(third.1, second.1, "whatever becomes of its mapping");
        // Found through the pointer, or by a walk.
        assert_eq!(third.2, (second.2.0 + 1 - hits, second.2.1 + hits));
        assert_eq!(third.0, begun.0, "nobody accessed anything");
        assert_eq!(read(&mut guest, 1, data), Some(0));
        let (walks, reads) = now(&guest).0;
        assert!(walks > begun.0.0 && reads >= walks && reads <= 4 * walks);
        let faults = (
            guest.iommu.counters.faults.get(),
            guest.disk.counters.faults.get(),
        );
        assert_eq!(faults, (0, 0));
    }
}

/// Frames are allocated in the order of first use. Pages that are adjacent in IOVA and
/// guest-physical space are not adjacent in the host's.
#[test]
fn an_access_over_several_frames_lands_in_order() {
    let mut guest = para(HostPagePool::On);
    let data = 0x20_0000 + AWAY;
    let gpas = [0xd000, 0xb000, 0xf000, 0xc000];
    let pages: Vec<(u64, u64)> = (0..)
        .zip(gpas)
        .map(|(n, gpa)| (data + n * PAGE, gpa))
        .collect();
    assert_eq!(guest.ask(&[map(DISK, Direction::FromDevice, &pages)]), [0]);
    assert_eq!(
        transfer(&mut guest, 1, (0, 3), data + 512, 3 * 4096),
        Some(0)
    );
    let wanted: Vec<u8> = (3 * 512..3 * 512 + 3 * 4096)
        .map(|i| (i / 7) as u8)
        .collect();
    let mut found = Vec::new();
    for gpa in gpas {
        found.extend(guest.disk.peek(gpa, 4096));
    }
    assert_eq!(found[512..512 + wanted.len()], wanted);
    assert_eq!(found[..512], [0; 512]);
    assert_eq!(found[512 + wanted.len()..], [0; 4096 - 512]);
    // Unmap one page of the buffer: no part of an access happens.
    guest.disk.poke(0xd000, &[0; 4096]);
    assert_eq!(guest.ask(&[unmap(&[data + 2 * PAGE])]), [0]);
    assert_eq!(
        transfer(&mut guest, 2, (0, 3), data + 512, 3 * 4096),
        Some(1)
    );
    assert_eq!(guest.disk.peek(0xd000, 4096), vec![0; 4096]);
}

/// A second device, translated by software, accesses the same pages. Their guest-physical addresses
/// differ from the frame addresses.
#[test]
fn second_device_accesses_the_same_memory() {
    const RNG: u16 = DISK + 8;
    const RINGS: u64 = 0x2_0000;
    let (id, other) = (RequesterId::new(DISK), RequesterId::new(RNG));
    let counters = Arc::new(DeviceCounters::default());
    let [on, there] = [HostPagePool::On, HostPagePool::Off];
    let mut guests = [on, there].map(|optimisations| {
        let shared =
            PvIommu::with_assigned(&[other, id], &[id], optimisations, Arc::clone(&counters));
        let shared = shared.unwrap();
        assert!(shared.assigned(other, Arc::default()).is_err());
        assert!(shared.reader(id).is_err(), "the hardware's only");
        let own = Arc::new(DeviceCounters::default());
        let dma = shared.assigned(id, Arc::clone(&own)).unwrap();
        let client = Client::new(disk(Arc::clone(&own)), dma, true, own);
        let guest = Guest::of_para(&shared, Arc::clone(&counters), client);
        let rng = Rng::new(Arc::clone(&counters));
        let reader = shared.reader(other).unwrap();
        let mut rng = Client::new(rng, reader, true, Arc::clone(&counters));
        rng.ram = guest.iommu.ram.try_clone().unwrap();
        rng.agree();
        rng.share_memory();
        (guest, rng)
    });
    for (guest, rng) in &mut guests {
        guest.attach();
        // Map the disk's pages first, so that no frame number equals its page number.
        assert_eq!(
            guest.map(QUEUE + AWAY, 0xa000 - QUEUE, QUEUE, READ_WRITE),
            0
        );
        let pages: Vec<(u64, u64)> = (0..3)
            .map(|n| RINGS + n * PAGE)
            .map(|at| (at, at))
            .collect();
        let both = [
            map(RNG, Direction::Bidirectional, &pages),
            map(RNG, Direction::FromDevice, &[(AWAY, 0xb000)]),
            map(DISK, Direction::FromDevice, &[(AWAY, 0xb000)]),
        ];
        assert_eq!(guest.ask(&both), [0; 3]);
        guest.begin();
        rng.negotiate(1 << 33);
        rng.enable(0, 16, RINGS);
        rng.set(0x14, &[15]);
        rng.poke(RINGS, &descriptor(AWAY, 64, WRITE, 0));
        rng.poke(RINGS + 0x1002, &[1, 0]);
        rng.ring(0);
        assert_eq!(rng.peek(RINGS + 0x2002, 2), [1, 0]);
        assert_ne!(rng.peek(0xb000, 64), vec![0; 64]);
        assert_eq!(rng.peek(0xb040, 64), vec![0; 64]);
        assert_eq!(read(guest, 1, AWAY), Some(0));
        assert_eq!(
            rng.peek(0xb000, 8),
            [0, 0, 0, 0, 0, 0, 0, 1],
            "the disk's bytes"
        );
    }
}

/// The tables of two assigned devices map the same address to different pages. An unmap for one of
/// them leaves the other's mapping.
#[test]
fn each_assigned_device_has_its_own_table() {
    const RNG: u16 = DISK + 8;
    const RINGS: u64 = 0x2_0000;
    let (id, other) = (RequesterId::new(DISK), RequesterId::new(RNG));
    let counters = Arc::new(DeviceCounters::default());
    let both = [other, id];
    let shared =
        PvIommu::with_assigned(&both, &both, HostPagePool::Off, Arc::clone(&counters)).unwrap();
    let own = Arc::new(DeviceCounters::default());
    let dma = shared.assigned(id, Arc::clone(&own)).unwrap();
    let client = Client::new(disk(Arc::clone(&own)), dma, true, own);
    let mut guest = Guest::of_para(&shared, Arc::clone(&counters), client);
    let own = Arc::new(DeviceCounters::default());
    let dma = shared.assigned(other, Arc::clone(&own)).unwrap();
    let mut rng = Client::new(Rng::new(Arc::clone(&own)), dma, true, own);
    rng.ram = guest.iommu.ram.try_clone().unwrap();
    rng.agree();
    rng.share_memory();
    guest.attach();
    let queue = guest.map(QUEUE + AWAY, 0xa000 - QUEUE, QUEUE, READ_WRITE);
    assert_eq!(queue, 0);
    let rings = [0, PAGE, 2 * PAGE].map(|offset| (RINGS + offset, RINGS + offset));
    let map_at = |device, gpa| map(device, Direction::FromDevice, &[(AWAY, gpa)]);
    let requests = [
        map(RNG, Direction::Bidirectional, &rings),
        map_at(RNG, 0xc000),
        map_at(DISK, 0xb000),
    ];
    assert_eq!(guest.ask(&requests), [0; 3]);
    guest.begin();
    rng.negotiate(1 << 33);
    rng.enable(0, 16, RINGS);
    rng.set(0x14, &[15]);
    rng.poke(RINGS, &descriptor(AWAY, 64, WRITE, 0));
    let nothing = [0; 64];
    let rounds = [
        (vec![], true, true),
        (vec![unmap(&[AWAY])], true, false),
        (
            vec![map_at(DISK, 0xb000), unmap_for(RNG, &[AWAY])],
            false,
            true,
        ),
    ];
    for (count, (requests, rng_mapped, disk_mapped)) in (1..).zip(rounds) {
        if !requests.is_empty() {
            assert!(guest.ask(&requests).iter().all(|status| *status == 0));
        }
        rng.poke(0xb000, &[0; 512]);
        rng.poke(0xc000, &[0; 512]);
        rng.poke(RINGS + 0x1002, &[count, 0]);
        rng.ring(0);
        let random = rng.peek(0xc000, 512);
        assert_eq!(random[..64] != nothing, rng_mapped, "round {count}");
        assert_eq!(rng.peek(0xb000, 64), nothing, "round {count}");
        let status = u8::from(!disk_mapped);
        assert_eq!(read(&mut guest, count.into(), AWAY), Some(status));
        assert_eq!(
            rng.peek(0xb000, 64) != nothing,
            disk_mapped,
            "round {count}"
        );
        assert_eq!(rng.peek(0xc000, 512), random, "the disk writes elsewhere");
    }
}

/// The client unshares memory that is mapped, and shares it again.
#[test]
fn removed_memory_is_not_accessed() {
    let mut guest = para(HostPagePool::Off);
    let data = 0xb000 + AWAY;
    assert_eq!(guest.map(data, PAGE, 0xb000, READ_WRITE), 0);
    assert_eq!(read(&mut guest, 1, data), Some(0));
    guest.disk.poke(0xb000, &[0; 512]);
    assert_eq!(guest.iommu.unmap(0, RAM_BYTES, 0).errno, 0);
    assert_eq!(read(&mut guest, 2, data), None, "nor are its rings");
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512]);
    guest.iommu.share_memory();
    guest.disk.set(0x14, &[0]);
    guest.begin();
    guest.disk.poke(QUEUE + 0x2000, &[0; 64]);
    assert_eq!(read(&mut guest, 1, data), Some(0));
    assert_ne!(guest.disk.peek(0xb000, 512), vec![0; 512]);
}

#[test]
fn device_accesses_the_mappings_of_its_domain() {
    let mut guest = virtio().mapped();
    let data = 0xb000 + AWAY;
    assert_eq!(read(&mut guest, 1, data), Some(0));
    assert_ne!(guest.disk.peek(0xb000, 512), vec![0; 512]);
    assert!(guest.disk.counters.unit_walks.get() > 0);
    guest.disk.poke(0xb000, &[0; 512]);
    guest.wait_for_a_fault();
    assert_eq!(guest.unmap(data, PAGE), 0);
    assert_eq!(read(&mut guest, 2, data), Some(1));
    assert_eq!(guest.fault(), Some((ENDPOINT, data)));
    assert_eq!(guest.map(data, PAGE, 0xb000, READ), 0);
    assert_eq!(read(&mut guest, 3, data), Some(1), "not in this direction");
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512], "not a byte");
    assert_eq!(guest.unmap(data, PAGE), 0);
    // A map outside guest memory fails, and the software IOMMU's part of it is rolled back.
    assert_eq!(guest.map(data, PAGE, RAM_BYTES, READ_WRITE), 7);
    assert_eq!(guest.map(data, 2 * PAGE, RAM_BYTES - PAGE, READ_WRITE), 7);
    assert_eq!(guest.map(data, PAGE, 0xc000, READ_WRITE), 0);
    assert_eq!(read(&mut guest, 4, data), Some(0));
    assert_eq!(guest.detach(), 0);
    guest.disk.poke(0xc000, &[0; 512]);
    assert_eq!(read(&mut guest, 5, data), None);
    assert_eq!(guest.disk.peek(0xc000, 512), vec![0; 512], "not a byte");
    // Again for a new driver: attaching an endpoint gives it the domain's existing mappings.
    let mut guest = virtio();
    assert_eq!(guest.attach(), 0);
    assert_eq!(guest.map(data, PAGE, 0xb000, READ_WRITE), 0);
    assert_eq!(
        guest.map(QUEUE + AWAY, 0xa000 - QUEUE, QUEUE, READ_WRITE),
        0
    );
    guest.begin();
    assert_eq!(read(&mut guest, 1, data), Some(0));
    guest.iommu.set(0x14, &[0]);
    assert_eq!(read(&mut guest, 2, data), None, "a reset detaches");
}

/// kvm-baseline: all guest memory is mapped, and nothing else.
#[test]
fn without_an_iommu_it_reaches_all_of_the_guest() {
    let counters = Arc::new(DeviceCounters::default());
    let dma = AssignedDma::identity_mapped(RequesterId::new(DISK), Arc::clone(&counters)).unwrap();
    let mut client = Client::new(disk(Arc::clone(&counters)), dma, false, counters);
    client.agree();
    client.share_memory();
    let pages = RAM_BYTES / PAGE;
    assert_eq!(
        client.counters.frames.get(),
        pages,
        "all of it, before it runs"
    );
    client.begin(0);
    let mut count = 0;
    let mut read = |client: &mut Client<Blk, AssignedDma>, data: u64| {
        count += 1;
        client.poke(0x8000, &request(0, 0));
        client.poke(0x9000, &[0xee]);
        client.descriptor(0, 0x8000, 16, NEXT, 1);
        client.descriptor(1, data, 512, NEXT | WRITE, 2);
        client.descriptor(2, 0x9000, 1, WRITE, 0);
        client.offer(0, count);
        client.peek(0x9000, 1)[0]
    };
    assert_eq!(read(&mut client, 0xb000), 0);
    assert_ne!(client.peek(0xb000, 512), vec![0; 512]);
    assert_eq!(read(&mut client, RAM_BYTES - 512), 0);
    assert_eq!(read(&mut client, RAM_BYTES), 1, "no memory");
    assert_eq!(client.counters.faults.get(), 1);
    assert_eq!(client.counters.frames.get(), pages);
    // The client unshares a part of the memory.
    assert_eq!(client.unmap(0, RAM_BYTES, 0).errno, 0);
    assert_eq!(client.map(0, RAM_BYTES / 2, 0, 3).errno, 0);
    assert_eq!(read(&mut client, 0xb000), 0);
    assert_eq!(read(&mut client, RAM_BYTES - 512), 1);
}

/// A map, an unmap or a disk request, by page number.
#[derive(Debug, Clone, Copy)]
enum Step {
    Map(u64, u64, Direction),
    Unmap(u64),
    /// The disk writes to the page.
    Read(u64),
    /// The disk reads the page.
    Write(u64),
}

const SLOTS: u64 = 6;
const GPAS: u64 = 4;

fn step() -> impl Strategy<Value = Step> {
    let direction = prop::sample::select(Direction::ALL.to_vec());
    prop_oneof![
        (0..SLOTS, 0..GPAS, direction).prop_map(|(slot, gpa, way)| Step::Map(slot, gpa, way)),
        (0..SLOTS).prop_map(Step::Unmap),
        (0..SLOTS).prop_map(Step::Read),
        (0..SLOTS).prop_map(Step::Write),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Checks accesses against a list of the mappings. An access succeeds exactly if the list
    /// contains its page, and it reaches that page and no other.
    #[test]
    fn accesses_follow_the_scatter_list(on in any::<bool>(), steps in vec(step(), 1..60)) {
        let mut guest = para(if on { HostPagePool::On } else { HostPagePool::Off });
        let mut list: [Option<(u64, Direction)>; SLOTS as usize] = [None; SLOTS as usize];
        let at = |slot: u64| 0x20_0000 + AWAY + slot * PAGE;
        let page = |gpa: u64| 0xb000 + gpa * PAGE;
        let mut count = 0;
        for (number, step) in (1_u8..).zip(steps) {
            for gpa in 0..GPAS {
                guest.disk.poke(page(gpa), &[number; 512]);
            }
            match step {
                Step::Map(slot, gpa, way) => {
                    let status = guest.ask(&[map(DISK, way, &[(at(slot), page(gpa))])])[0];
                    let entry = &mut list[slot as usize];
                    prop_assert_eq!(status, if entry.is_some() { 5 } else { 0 });
                    entry.get_or_insert((gpa, way));
                }
                Step::Unmap(slot) => {
                    let status = guest.ask(&[unmap(&[at(slot)])])[0];
                    let entry = list[slot as usize].take();
                    prop_assert_eq!(status, if entry.is_some() { 0 } else { 6 });
                }
                Step::Read(slot) | Step::Write(slot) => {
                    let reads = matches!(step, Step::Read(_));
                    let kind = u32::from(!reads);
                    count += 1;
                    let ended = transfer(&mut guest, count, (kind, 0), at(slot), 512);
                    let entry = list[slot as usize];
                    let wrong = if reads { Direction::ToDevice } else { Direction::FromDevice };
                    let through = entry.filter(|(_, way)| *way != wrong);
                    prop_assert_eq!(ended, Some(u8::from(through.is_none())));
                    let written = through.filter(|_| reads).map(|(gpa, _)| gpa);
                    for gpa in 0..GPAS {
                        let untouched = guest.disk.peek(page(gpa), 512) == [number; 512];
                        // The disk's first sector has different bytes.
                        let written = written == Some(gpa) && kind == 0;
                        prop_assert_eq!(untouched, !written, "page {}", gpa);
                    }
                }
            }
        }
    }
}
