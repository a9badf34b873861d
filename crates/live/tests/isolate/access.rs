//! A sandboxed disk: it works, it can access exactly the mapped pages, and the guest receives a
//! fault for any other access.

use ringfence_live::dma_fault_injection::InjectedDma;
use ringfence_live::limits::GuestLimits;
use ringfence_live::sandbox::GrantError;
use ringfence_types::{Iova, IovaRange, Permissions, PhysAddr};

use crate::guest::*;
use crate::pviommu_driver::Para;
use crate::rig::*;
use crate::{Boundary, DEVICE, SandboxedGuest, sandboxed_guest, sandboxed_guest_with_limits};

fn good<I: Boundary>() -> SandboxedGuest<I> {
    sandboxed_guest("", &[], &disk_file()).mapped()
}

#[test]
fn it_reads_and_counts() {
    it_reads_and_counts_behind::<Virtio>();
    it_reads_and_counts_behind::<Para>();
}

fn it_reads_and_counts_behind<I: Boundary>() {
    let mut sandboxed = good::<I>();
    for count in 1..=5 {
        assert_eq!(read(&mut sandboxed.guest, count, 0xb000 + AWAY), Some(0));
    }
    let whole: Vec<u8> = (0..512u64).map(|i| (i / 7) as u8).collect();
    assert_eq!(sandboxed.guest.disk.peek(0xb000, 512), whole);
    let counters = &sandboxed.guest.disk.counters;
    assert_eq!(counters.requests.get(), 5);
    assert_eq!(counters.bytes_read.get(), 5 * 512);
    assert_eq!(counters.service.count(), 5);
    assert_eq!(sandboxed.guest.disk.register(0x2000, 8), DISK_SECTORS);
}

#[test]
fn unmapped_page_faults_and_is_reported() {
    unmapped_pages_fault::<Virtio>();
    unmapped_pages_fault::<Para>();
}

fn unmapped_pages_fault<I: Boundary>() {
    let mut sandboxed = good::<I>();
    let guest = &mut sandboxed.guest;
    assert_eq!(read(guest, 1, 0xb000 + AWAY), Some(0));
    assert_eq!(I::unmap(guest, 0xb000 + AWAY, 0x1000), 0);
    guest.disk.poke(0xb000, &[0; 512]);
    I::wait_for_a_fault(guest);
    assert_eq!(read(guest, 2, 0xb000 + AWAY), Some(1));
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512]);
    assert_eq!(I::fault(guest), Some((ENDPOINT, 0xb000 + AWAY)));
    // Map the page again.
    assert_eq!(I::map(guest, 0xb000 + AWAY, 0x1000, 0xd000, READ_WRITE), 0);
    assert_eq!(read(guest, 3, 0xb000 + AWAY), Some(0));
    assert_ne!(guest.disk.peek(0xd000, 512), vec![0; 512]);
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512]);
}

#[test]
fn stray_accesses_and_wrong_directions_are_stopped() {
    stray_accesses_and_wrong_directions_are_stopped_behind::<Virtio>();
    stray_accesses_and_wrong_directions_are_stopped_behind::<Para>();
}

fn stray_accesses_and_wrong_directions_are_stopped_behind<I: Boundary>() {
    for (data, at) in [
        (0xb000, 0xb000),
        (0xdead_0000, 0xdead_0000),
        (0xbf00 + AWAY, 0xc000 + AWAY),
        (0xe000 + AWAY, 0xe000 + AWAY),
    ] {
        let mut sandboxed = good::<I>();
        let guest = &mut sandboxed.guest;
        assert_eq!(I::map(guest, 0xe000 + AWAY, 0x1000, 0xe000, READ), 0);
        I::wait_for_a_fault(guest);
        assert_eq!(read(guest, 1, data), Some(1), "{data:#x}");
        assert_eq!(guest.disk.peek(0xb000, 0x5000), vec![0; 0x5000]);
        assert_eq!(I::fault(guest), Some((ENDPOINT, at)), "{data:#x}");
        assert_eq!(read(guest, 2, 0xb000 + AWAY), Some(0), "the next is served");
    }
}

/// Two adjacent pages, mapped to scattered ones: each part of the data reaches its own page.
#[test]
fn data_scatters_over_pages() {
    data_scatters_over_pages_behind::<Virtio>();
    data_scatters_over_pages_behind::<Para>();
}

fn data_scatters_over_pages_behind<I: Boundary>() {
    let mut sandboxed = good::<I>();
    let guest = &mut sandboxed.guest;
    assert_eq!(I::map(guest, 0xc000 + AWAY, 0x1000, 0xf000, READ_WRITE), 0);
    assert_eq!(read(guest, 1, 0xbf00 + AWAY), Some(0));
    let whole: Vec<u8> = (0..512u64).map(|i| (i / 7) as u8).collect();
    assert_eq!(guest.disk.peek(0xbf00, 256), whole[..256]);
    assert_eq!(guest.disk.peek(0xf000, 256), whole[256..]);
}

#[test]
fn detaching_takes_everything_and_attaching_brings_it() {
    detaching_takes_everything_and_attaching_brings_it_behind::<Virtio>();
    detaching_takes_everything_and_attaching_brings_it_behind::<Para>();
}

fn detaching_takes_everything_and_attaching_brings_it_behind<I: Boundary>() {
    let mut sandboxed = good::<I>();
    let guest = &mut sandboxed.guest;
    assert_eq!(read(guest, 1, 0xb000 + AWAY), Some(0));
    I::withdraw(guest);
    guest.disk.poke(0xb000, &[0; 512]);
    assert_eq!(read(guest, 2, 0xb000 + AWAY), None);
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512]);
    assert_eq!(guest.disk.register(0x14, 1) & 64, 64, "its rings are gone");

    // Another guest takes over: the process has discarded the rings, and is the same one.
    guest.disk.set(0x14, &[0]);
    I::again(guest);
    assert_eq!(
        I::map(guest, QUEUE + AWAY, 0xa000 - QUEUE, QUEUE, READ_WRITE),
        0
    );
    assert_eq!(I::map(guest, 0xb000 + AWAY, 0x1000, 0xb000, READ_WRITE), 0);
    guest.disk.poke(QUEUE, &[0; 0x3000]);
    guest.begin();
    assert_eq!(read(guest, 1, 0xb000 + AWAY), Some(0));
}

/// The client unshares and shares the guest's memory, as it does while firmware runs. The process
/// loses all grants of it.
#[test]
fn other_memory_is_granted_anew() {
    other_memory_is_granted_anew_behind::<Virtio>();
    other_memory_is_granted_anew_behind::<Para>();
}

fn other_memory_is_granted_anew_behind<I: Boundary>() {
    let mut sandboxed = good::<I>();
    let guest = &mut sandboxed.guest;
    assert_eq!(read(guest, 1, 0xb000 + AWAY), Some(0));
    let old = std::mem::replace(I::ram(guest), sealed(RAM_BYTES));
    I::unshare(guest);
    std::os::unix::fs::FileExt::write_all_at(&old, &[0; 512], 0xb000).unwrap();
    // Without rings the device serves nothing.
    assert_eq!(read(guest, 2, 0xb000 + AWAY), None);
    let mut bytes = [1; 512];
    std::os::unix::fs::FileExt::read_exact_at(&old, &mut bytes, 0xb000).unwrap();
    assert_eq!(bytes, [0; 512]);
    I::share(guest);
    guest.disk.ram = I::ram(guest).try_clone().unwrap();
    guest.disk.set(0x14, &[0]);
    guest.begin();
    assert_eq!(read(guest, 1, 0xb000 + AWAY), Some(0));
    assert_ne!(guest.disk.peek(0xb000, 512), vec![0; 512]);
}

/// The CPU could not enforce it, since a writable page is readable; the process's table does.
#[test]
fn write_only_pages_are_not_read() {
    write_only_pages_are_not_readable::<Virtio>();
    write_only_pages_are_not_readable::<Para>();
}

fn write_only_pages_are_not_readable<I: Boundary>() {
    let mut sandboxed =
        sandboxed_guest::<I>("", &[InjectedDma::ReadWriteOnly], &disk_file()).mapped();
    let guest = &mut sandboxed.guest;
    assert_eq!(I::map(guest, 0xe000 + AWAY, 0x1000, 0xe000, WRITE_ONLY), 0);
    I::wait_for_a_fault(guest);
    assert_eq!(read(guest, 1, 0xe000 + AWAY), Some(0));
    assert_eq!(I::fault(guest), Some((ENDPOINT, 0xe000 + AWAY)));
    assert_ne!(guest.disk.peek(0xe000, 512), vec![0; 512]);
    let log = sandboxed.log.lock().unwrap();
    assert!(
        log[0].ends_with("stopped") && !log[0].contains("not"),
        "{log:?}"
    );
}

/// A device that uses stale translations is stopped by the page protection.
#[test]
fn unmapped_page_is_removed() {
    the_page_itself_is_gone_behind::<Virtio>();
    the_page_itself_is_gone_behind::<Para>();
}

fn the_page_itself_is_gone_behind<I: Boundary>() {
    for class in [InjectedDma::AfterRevoke, InjectedDma::AfterUnmap] {
        let mut sandboxed = sandboxed_guest::<I>("", &[class], &disk_file()).mapped();
        let guest = &mut sandboxed.guest;
        // A large request, whose pages the injector remembers.
        let (start, bytes) = (0x2_0000, 0x8000);
        assert_eq!(I::map(guest, start + AWAY, bytes, start, READ_WRITE), 0);
        let disk = &mut guest.disk;
        disk.poke(0x8000, &request(0, 0));
        disk.descriptor(0, 0x8000 + AWAY, 16, NEXT, 1);
        disk.descriptor(1, start + AWAY, bytes as u32, NEXT | WRITE, 2);
        disk.descriptor(2, 0x9000 + AWAY, 1, WRITE, 0);
        disk.offer(0, 1);
        guest.settle();
        assert_eq!(guest.disk.used().0, 1);
        assert_eq!(I::unmap(guest, start + AWAY, bytes), 0);
        guest.disk.poke(start, &[0; 512]);
        I::wait_for_a_fault(guest);
        assert_eq!(read(guest, 2, 0xb000 + AWAY), Some(0));
        assert_eq!(guest.disk.peek(start, 512), vec![0; 512], "{class}");
        assert_eq!(I::fault(guest), Some((ENDPOINT, start + AWAY)), "{class}");
        let log = sandboxed.log.lock().unwrap();
        let at = Iova::new(start + AWAY);
        assert_eq!(*log, [format!("injected write ({class}) at {at}: stopped")]);
    }
}

/// One round trip per batch, and one call for consecutive pages in it, by range or by page.
#[test]
fn round_trips() {
    round_trips_behind::<Virtio>();
    round_trips_behind::<Para>();
}

fn round_trips_behind<I: Boundary>() {
    let mut sandboxed = good::<I>();
    let counted = |sandboxed: &SandboxedGuest<I>| {
        let counters = &sandboxed.guest.disk.counters;
        (counters.rounds.get(), counters.calls.get())
    };
    let before = counted(&sandboxed);
    assert_eq!(
        I::map(&mut sandboxed.guest, 0x10_0000 + AWAY, 0x4_0000, 0, READ),
        0
    );
    assert_eq!(
        I::unmap(&mut sandboxed.guest, 0x10_0000 + AWAY, 0x4_0000),
        0
    );
    let after = counted(&sandboxed);
    assert_eq!((after.0 - before.0, after.1 - before.1), (2, 2));
}

/// The process applies the same limits as a disk in the daemon, and the daemon logs its refusals.
#[test]
fn limits_of_one_request() {
    let caps = GuestLimits {
        request_bytes: 1024,
        queue_size: 1024,
        ..GuestLimits::default()
    };
    let mut sandboxed =
        sandboxed_guest_with_limits::<Virtio>(&caps, "", &[], &disk_file()).mapped();
    let guest = &mut sandboxed.guest;
    assert_eq!(
        guest.disk.register(0x18, 2),
        16,
        "of the driver's own choice"
    );
    for (count, bytes, status) in [(1, 1024, 0), (2, 1536, 1), (3, 512, 0)] {
        assert_eq!(read_bytes(guest, count, 0xb000 + AWAY, bytes), Some(status));
    }
    let log = sandboxed.log.lock().unwrap();
    assert_eq!(*log, ["a request of 1536 bytes exceeds the limit of 1024"]);
}

/// The process accepts a ring of the largest size offered.
#[test]
fn a_ring_may_be_as_long_as_was_offered() {
    let caps = GuestLimits {
        queue_size: 1024,
        ..GuestLimits::default()
    };
    let mut sandboxed = sandboxed_guest_with_limits::<Virtio>(&caps, "", &[], &disk_file());
    let guest = &mut sandboxed.guest;
    assert_eq!(guest.attach(), 0);
    // The parts have the layout of a ring of 1024, from guest-physical address 0x10000 on.
    assert_eq!(guest.map(AWAY, RAM_BYTES, 0, READ_WRITE), 0);
    guest.disk.negotiate(1 << 33);
    guest.disk.set(0x16, &[0, 0]);
    assert_eq!(guest.disk.register(0x18, 2), 1024);
    for (register, at) in [(0x20, 0x1_0000), (0x28, 0x1_8000), (0x30, 0x1_a000)] {
        guest.disk.set(register, &(at + AWAY).to_le_bytes());
    }
    guest.disk.set(0x1c, &[1, 0]);
    guest.disk.set(0x14, &[15]);
    guest.disk.poke(0x8000, &request(0, 0));
    let chain = [
        descriptor(0x8000 + AWAY, 16, NEXT, 1001),
        descriptor(0xb000 + AWAY, 512, NEXT | WRITE, 1002),
        descriptor(0x9000 + AWAY, 1, WRITE, 0),
    ];
    // Indices beyond a ring of 256.
    guest.disk.poke(0x1_0000 + 1000 * 16, &chain.concat());
    guest.disk.poke(0x9000, &[0xee]);
    guest.disk.poke(0x1_8004, &1000u16.to_le_bytes());
    guest.disk.poke(0x1_8002, &1u16.to_le_bytes());
    guest.disk.ring(0);
    guest.settle();
    assert_eq!(guest.disk.peek(0x9000, 1), [0]);
    assert_eq!(guest.disk.peek(0x1_a002, 2), [1, 0]);
}

#[test]
fn a_range_that_overlaps_a_grant_is_unfit() {
    const MEMORY: u64 = 0xb000;
    const HOLE: u64 = 1 << 40;
    let sandboxed = good::<Virtio>();
    let map = |start: u64, bytes: u64, physical: u64| {
        let range = IovaRange::new(Iova::new(start), bytes).unwrap();
        let physical = PhysAddr::new(physical);
        let mapped = sandboxed.iommu.with_grants(DEVICE, |grants| {
            grants.map(range, physical, Permissions::READ_WRITE)
        });
        mapped.unwrap()
    };
    // No memory is behind the second grant, so it has no entry in the table.
    for (start, to) in [(1 << 32, MEMORY), (1 << 33, HOLE)] {
        assert_eq!(map(start, 0x4000, to), Ok(()));
        for (first, bytes) in [
            (start, 0x1000),
            (start + 0x3000, 0x2000),
            (start - 0x1000, 0x2000),
            (start - 0x1000, 0x8000),
        ] {
            assert_eq!(
                map(first, bytes, to),
                Err(GrantError::Unfit),
                "{first:#x}, {bytes:#x}"
            );
        }
        for neighbour in [start - 0x1000, start + 0x4000] {
            assert_eq!(map(neighbour, 0x1000, to), Ok(()));
        }
    }
    // Only a lack of tables or windows is a lack of room. Each of these pages needs a table.
    let pages = (0..1 << 16).map(|page| (1 << 34) + (page << 21));
    let mut failed = pages.filter_map(|start| map(start, 0x1000, MEMORY).err());
    assert_eq!(failed.next(), Some(GrantError::NoRoom));
}
