//! A disk in a process: it works, it reaches what is mapped, while it is, and what it does not reach the guest is told.

use ringfence_live::errant::Errant;
use ringfence_types::Iova;

use crate::guest::*;
use crate::rig::*;
use crate::{Apart, apart};

fn good() -> Apart {
    apart("", &[], &disk_file())
}

fn mapped(apart: Apart) -> Apart {
    Apart {
        guest: apart.guest.mapped(),
        ..apart
    }
}

#[test]
fn it_reads_and_counts() {
    let mut apart = mapped(good());
    for count in 1..=5 {
        assert_eq!(read(&mut apart.guest, count, 0xb000 + AWAY), Some(0));
    }
    let whole: Vec<u8> = (0..512u64).map(|i| (i / 7) as u8).collect();
    assert_eq!(apart.guest.disk.peek(0xb000, 512), whole);
    let counters = &apart.guest.disk.counters;
    assert_eq!(counters.requests.get(), 5);
    assert_eq!(counters.bytes_read.get(), 5 * 512);
    assert_eq!(counters.service.count(), 5);
    assert_eq!(apart.guest.disk.register(0x2000, 8), DISK_SECTORS);
}

#[test]
fn an_unmapped_page_is_out_of_reach_and_the_guest_is_told() {
    let mut apart = mapped(good());
    let guest = &mut apart.guest;
    assert_eq!(read(guest, 1, 0xb000 + AWAY), Some(0));
    assert_eq!(guest.unmap(0xb000 + AWAY, 0x1000), 0);
    guest.disk.poke(0xb000, &[0; 512]);
    guest.wait_for_a_fault();
    assert_eq!(read(guest, 2, 0xb000 + AWAY), Some(1));
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512]);
    assert_eq!(guest.fault(), Some((ENDPOINT, 0xb000 + AWAY)));
    // And comes back.
    assert_eq!(guest.map(0xb000 + AWAY, 0x1000, 0xd000, READ_WRITE), 0);
    assert_eq!(read(guest, 3, 0xb000 + AWAY), Some(0));
    assert_ne!(guest.disk.peek(0xd000, 512), vec![0; 512]);
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512]);
}

#[test]
fn stray_accesses_and_wrong_directions_are_stopped() {
    for (data, at) in [
        (0xb000, 0xb000),
        (0xdead_0000, 0xdead_0000),
        (0xbf00 + AWAY, 0xc000 + AWAY),
        (0xe000 + AWAY, 0xe000 + AWAY),
    ] {
        let mut apart = mapped(good());
        let guest = &mut apart.guest;
        assert_eq!(guest.map(0xe000 + AWAY, 0x1000, 0xe000, READ), 0);
        guest.wait_for_a_fault();
        assert_eq!(read(guest, 1, data), Some(1), "{data:#x}");
        assert_eq!(guest.disk.peek(0xb000, 0x5000), vec![0; 0x5000]);
        assert_eq!(guest.fault(), Some((ENDPOINT, at)), "{data:#x}");
        assert_eq!(read(guest, 2, 0xb000 + AWAY), Some(0), "the next is served");
    }
}

/// Two pages that lie elsewhere: the data is cut, and each part lands where its page is mapped.
#[test]
fn data_scatters_over_pages() {
    let mut apart = mapped(good());
    let guest = &mut apart.guest;
    assert_eq!(guest.map(0xc000 + AWAY, 0x1000, 0xf000, READ_WRITE), 0);
    assert_eq!(read(guest, 1, 0xbf00 + AWAY), Some(0));
    let whole: Vec<u8> = (0..512u64).map(|i| (i / 7) as u8).collect();
    assert_eq!(guest.disk.peek(0xbf00, 256), whole[..256]);
    assert_eq!(guest.disk.peek(0xf000, 256), whole[256..]);
}

#[test]
fn detaching_takes_everything_and_attaching_brings_it() {
    let mut apart = mapped(good());
    let guest = &mut apart.guest;
    assert_eq!(read(guest, 1, 0xb000 + AWAY), Some(0));
    assert_eq!(guest.detach(), 0);
    guest.disk.poke(0xb000, &[0; 512]);
    assert_eq!(read(guest, 2, 0xb000 + AWAY), None);
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512]);
    assert_eq!(guest.disk.register(0x14, 1) & 64, 64, "its rings are gone");

    // Another guest takes over: the process has forgotten the rings, and is the same one.
    guest.disk.set(0x14, &[0]);
    assert_eq!(guest.attach(), 0);
    assert_eq!(
        guest.map(QUEUE + AWAY, 0xa000 - QUEUE, QUEUE, READ_WRITE),
        0
    );
    assert_eq!(guest.map(0xb000 + AWAY, 0x1000, 0xb000, READ_WRITE), 0);
    guest.disk.poke(QUEUE, &[0; 0x3000]);
    guest.begin();
    assert_eq!(read(guest, 1, 0xb000 + AWAY), Some(0));
}

/// The guest's memory goes and comes, as while firmware runs: what was granted of it goes, too.
#[test]
fn other_memory_is_granted_anew() {
    let mut apart = mapped(good());
    let guest = &mut apart.guest;
    assert_eq!(read(guest, 1, 0xb000 + AWAY), Some(0));
    let old = std::mem::replace(&mut guest.iommu.ram, sealed(RAM_BYTES));
    assert_eq!(guest.iommu.unmap(0, RAM_BYTES, 0).errno, 0);
    std::os::unix::fs::FileExt::write_all_at(&old, &[0; 512], 0xb000).unwrap();
    // No rings: nothing is served.
    assert_eq!(read(guest, 2, 0xb000 + AWAY), None);
    let mut bytes = [1; 512];
    std::os::unix::fs::FileExt::read_exact_at(&old, &mut bytes, 0xb000).unwrap();
    assert_eq!(bytes, [0; 512]);
    guest.iommu.share_memory();
    guest.disk.ram = guest.iommu.ram.try_clone().unwrap();
    guest.disk.set(0x14, &[0]);
    guest.begin();
    assert_eq!(read(guest, 1, 0xb000 + AWAY), Some(0));
    assert_ne!(guest.disk.peek(0xb000, 512), vec![0; 512]);
}

/// The processor would allow it: whoever may write a page may read it. The table does not.
#[test]
fn what_is_for_writing_is_not_read() {
    let mut apart = mapped(apart("", &[Errant::ReadWriteOnly], &disk_file()));
    let guest = &mut apart.guest;
    assert_eq!(guest.map(0xe000 + AWAY, 0x1000, 0xe000, WRITE_ONLY), 0);
    guest.wait_for_a_fault();
    assert_eq!(read(guest, 1, 0xe000 + AWAY), Some(0));
    assert_eq!(guest.fault(), Some((ENDPOINT, 0xe000 + AWAY)));
    assert_ne!(guest.disk.peek(0xe000, 512), vec![0; 512]);
    let told = apart.told.lock().unwrap();
    assert!(
        told[0].ends_with("stopped") && !told[0].contains("not"),
        "{told:?}"
    );
}

/// A device that goes on using what it was once told meets the page's own rights.
#[test]
fn the_page_itself_is_gone() {
    for class in [Errant::AfterRevoke, Errant::AfterUnmap] {
        let mut apart = mapped(apart("", &[class], &disk_file()));
        let guest = &mut apart.guest;
        // A large request, whose pages it keeps in mind.
        let (start, bytes) = (0x2_0000, 0x8000);
        assert_eq!(guest.map(start + AWAY, bytes, start, READ_WRITE), 0);
        let disk = &mut guest.disk;
        disk.poke(0x8000, &request(0, 0));
        disk.descriptor(0, 0x8000 + AWAY, 16, NEXT, 1);
        disk.descriptor(1, start + AWAY, bytes as u32, NEXT | WRITE, 2);
        disk.descriptor(2, 0x9000 + AWAY, 1, WRITE, 0);
        disk.offer(0, 1);
        guest.settle();
        assert_eq!(guest.disk.used().0, 1);
        assert_eq!(guest.unmap(start + AWAY, bytes), 0);
        guest.disk.poke(start, &[0; 512]);
        guest.wait_for_a_fault();
        assert_eq!(read(guest, 2, 0xb000 + AWAY), Some(0));
        assert_eq!(guest.disk.peek(start, 512), vec![0; 512], "{class}");
        assert_eq!(guest.fault(), Some((ENDPOINT, start + AWAY)), "{class}");
        let told = apart.told.lock().unwrap();
        let at = Iova::new(start + AWAY);
        assert_eq!(*told, [format!("errant write ({class}) at {at}: stopped")]);
    }
}

/// One round trip for a batch, and one call for each mapping.
#[test]
fn round_trips() {
    let mut apart = mapped(good());
    let counted = |apart: &Apart| {
        let counters = &apart.guest.disk.counters;
        (counters.rounds.get(), counters.calls.get())
    };
    let before = counted(&apart);
    assert_eq!(apart.guest.map(0x10_0000 + AWAY, 0x4_0000, 0, READ), 0);
    assert_eq!(apart.guest.unmap(0x10_0000 + AWAY, 0x4_0000), 0);
    let after = counted(&apart);
    assert_eq!((after.0 - before.0, after.1 - before.1), (2, 2));
}
