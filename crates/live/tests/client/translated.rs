//! A disk behind the IOMMU: it can access exactly the pages that the guest has mapped.

use ringfence_live::limits::{BoundedLog, GuestLimits};
use ringfence_live::virtio::blk::Blk;

use crate::guest::*;
use crate::rig::*;

type Guest = crate::guest::Guest<Blk>;

fn guest() -> Guest {
    guest_within(&GuestLimits::default(), BoundedLog::default())
}

fn guest_within(caps: &GuestLimits, complaints: BoundedLog) -> Guest {
    let make = |_: &_, counters| Blk::new(disk_file(), false, counters).unwrap();
    let mut guest = Guest::within(caps, make);
    let unit = guest.iommu.session.function().device();
    unit.set_log(complaints);
    guest
}

/// Returns a guest with the rings, the header and the status mapped writable, and a data page at
/// 0xb000.
fn mapped() -> Guest {
    guest().mapped()
}

#[test]
fn it_works_once_all_is_mapped() {
    let mut guest = mapped();
    assert_eq!(read(&mut guest, 1, 0xb000 + AWAY), Some(0));
    assert_ne!(guest.disk.peek(0xb000, 512), vec![0; 512]);
}

#[test]
fn a_driver_that_ignores_the_iommu_is_refused() {
    let mut guest = guest();
    for status in [0, 1, 3] {
        guest.disk.set(0x14, &[status]);
    }
    guest.disk.set(0x08, &1u32.to_le_bytes());
    guest.disk.set(0x0c, &1u32.to_le_bytes());
    guest.disk.set(0x14, &[11]);
    assert_eq!(guest.disk.register(0x14, 1), 3, "features not accepted");
}

#[test]
fn nothing_is_reached_before_attach_and_after_detach() {
    let mut guest = guest();
    guest.begin();
    assert_eq!(read(&mut guest, 1, 0xb000), None);
    assert_eq!(guest.disk.register(0x14, 1) & 64, 64);

    let mut guest = mapped();
    assert_eq!(guest.detach(), 0);
    assert_eq!(read(&mut guest, 1, 0xb000 + AWAY), None);
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512]);

    // A reset of the IOMMU detaches the endpoint, too.
    let mut guest = mapped();
    guest.iommu.set(0x14, &[0]);
    assert_eq!(read(&mut guest, 1, 0xb000 + AWAY), None);
}

#[test]
fn stray_accesses_are_stopped_and_reported() {
    // Physical addresses; unmapped ones; the end of a page; the end of the address space.
    for data in [
        0xb000,
        0xdead_0000,
        0xbf00 + AWAY,
        u64::MAX - 100,
        0xfee0_0000,
    ] {
        let mut guest = mapped();
        guest.wait_for_a_fault();
        assert_eq!(guest.fault(), None);
        assert_eq!(read(&mut guest, 1, data), Some(1), "{data:#x}");
        assert_eq!(
            guest.disk.peek(0xb000, 0x2000),
            vec![0; 0x2000],
            "{data:#x}: not a byte"
        );
        let at = match data {
            // An access across a page boundary is reported at its first unmapped byte.
            0x1000_0000_bf00 => 0xc000 + AWAY,
            // Accesses to doorbells and ranges that wrap are not translation faults.
            0xfee0_0000 => continue,
            _ if data > u64::MAX - 512 => continue,
            _ => data,
        };
        assert_eq!(guest.fault(), Some((ENDPOINT, at)), "{data:#x}");
        assert_eq!(
            read(&mut guest, 2, 0xb000 + AWAY),
            Some(0),
            "the next is served"
        );
    }
}

#[test]
fn an_unmapped_page_is_out_of_reach_when_the_answer_is_there() {
    let mut guest = mapped();
    assert_eq!(read(&mut guest, 1, 0xb000 + AWAY), Some(0));
    assert_eq!(guest.unmap(0xb000 + AWAY, 0x1000), 0);
    guest.disk.poke(0xb000, &[0; 512]);
    assert_eq!(read(&mut guest, 2, 0xb000 + AWAY), Some(1));
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512]);
}

/// The IOMMU distinguishes a stale access from an access to a page that was never mapped. A page of
/// an earlier domain with the same ID counts as never mapped.
#[test]
fn stale_accesses_are_counted_as_such() {
    let mut guest = mapped();
    let counted = |guest: &Guest| {
        let counters = &guest.iommu.counters;
        (counters.faults.get(), counters.stale.get())
    };
    assert_eq!(read(&mut guest, 1, 0xdead_0000), Some(1));
    assert_eq!(counted(&guest), (1, 0), "never");
    assert_eq!(guest.unmap(0xb000 + AWAY, 0x1000), 0);
    assert_eq!(read(&mut guest, 2, 0xb000 + AWAY), Some(1));
    assert_eq!(counted(&guest), (2, 1), "stale");
    assert_eq!(guest.map(0xb000 + AWAY, 0x1000, 0xb000, READ), 0);
    assert_eq!(read(&mut guest, 3, 0xb000 + AWAY), Some(1));
    assert_eq!(counted(&guest), (3, 1), "there again, and read-only");
    assert_eq!(guest.unmap(0xb000 + AWAY, 0x1000), 0);
    assert_eq!(guest.detach(), 0);
    assert_eq!(guest.attach(), 0);
    assert_eq!(
        guest.map(QUEUE + AWAY, 0xa000 - QUEUE, QUEUE, READ_WRITE),
        0
    );
    assert_eq!(read(&mut guest, 4, 0xb000 + AWAY), Some(1));
    assert_eq!(counted(&guest), (4, 1), "another domain");
}

#[test]
fn a_page_to_read_from_is_not_written() {
    let mut guest = mapped();
    assert_eq!(guest.unmap(0xb000 + AWAY, 0x1000), 0);
    assert_eq!(guest.map(0xb000 + AWAY, 0x1000, 0xb000, READ), 0);
    guest.wait_for_a_fault();
    assert_eq!(read(&mut guest, 1, 0xb000 + AWAY), Some(1));
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512]);
    assert_eq!(guest.fault(), Some((ENDPOINT, 0xb000 + AWAY)));
}

/// Two adjacent pages, mapped to scattered ones: each part of the data reaches its own page.
#[test]
fn data_scatters_over_pages() {
    let mut guest = mapped();
    assert_eq!(guest.map(0xc000 + AWAY, 0x1000, 0xf000, READ_WRITE), 0);
    assert_eq!(read(&mut guest, 1, 0xbf00 + AWAY), Some(0));
    let whole: Vec<u8> = (0..512u64).map(|i| (i / 7) as u8).collect();
    assert_eq!(guest.disk.peek(0xbf00, 256), whole[..256]);
    assert_eq!(guest.disk.peek(0xf000, 256), whole[256..]);
    assert_eq!(guest.disk.peek(0xc000, 256), vec![0; 256]);
}

/// A full queue of requests with one doorbell: each request gets an answer.
#[test]
fn queued_requests_all_complete() {
    let mut guest = guest();
    guest.iommu.set(0x14, &[0]);
    guest.iommu.negotiate(0b10111);
    let size = 128u16;
    guest.iommu.enable(0, size, IOMMU_QUEUE);
    guest.iommu.set(0x14, &[15]);
    let ram = &guest.iommu;
    for at in 0..size / 2 {
        let (request, reply) = (0x6_0000 + 64 * u64::from(at), 0x7_0000 + 64 * u64::from(at));
        let detach = [vec![2, 0, 0, 0], words(&[DOMAIN, ENDPOINT]), vec![0; 8]].concat();
        ram.poke(request, &detach);
        ram.poke(reply, &[0xee; 4]);
        let first = IOMMU_QUEUE + 32 * u64::from(at);
        ram.poke(
            first,
            &descriptor(request, detach.len() as u32, NEXT, 2 * at + 1),
        );
        ram.poke(first + 16, &descriptor(reply, 4, WRITE, 0));
        ram.poke(
            IOMMU_QUEUE + 0x1004 + 2 * u64::from(at),
            &(2 * at).to_le_bytes(),
        );
    }
    ram.poke(IOMMU_QUEUE + 0x1002, &(size / 2).to_le_bytes());
    guest.iommu.ring(0);
    for at in 0..u64::from(size / 2) {
        assert_ne!(
            guest.iommu.peek(0x7_0000 + 64 * at, 1),
            [0xee],
            "request {at}"
        );
    }
    assert_eq!(
        guest.iommu.peek(IOMMU_QUEUE + 0x2002, 2),
        (size / 2).to_le_bytes()
    );
}

const NOMEM: u8 = 8;

/// Tests each limit on its own: requests beyond it are refused with a log line, and earlier
/// mappings keep working.
#[test]
fn guest_over_its_limits_is_refused_and_its_disk_continues() {
    let usual = GuestLimits::default();
    for (caps, word) in [
        (
            GuestLimits {
                mappings: 12,
                ..usual
            },
            "too many mappings",
        ),
        (
            GuestLimits {
                domains: 1,
                ..usual
            },
            "the sink failed: out of memory",
        ),
        (
            GuestLimits { tables: 8, ..usual },
            "the sink failed: out of memory",
        ),
    ] {
        let (sender, heard) = std::sync::mpsc::channel();
        let complaints = BoundedLog::new(move |refused| sender.send(refused.to_string()).unwrap());
        let mut guest = guest_within(&caps, complaints);
        assert_eq!(guest.attach(), 0);
        // The disk's rings and buffers.
        assert_eq!(guest.map(AWAY, 0x2_0000, 0, READ_WRITE), 0);
        guest.begin();
        let mut refused = 0;
        for n in 0..40_u64 {
            let status = if caps.domains == 1 {
                guest.ask(1, &words(&[DOMAIN + 1 + n as u32, ENDPOINT, 0, 0]))
            } else {
                guest.map((n + 1) << 30, 4096, 0, READ)
            };
            assert!([0, NOMEM].contains(&status), "{word}: {status}");
            refused += usize::from(status == NOMEM);
        }
        let said: Vec<String> = heard.try_iter().collect();
        assert!(refused > 16, "{word}: {refused}");
        assert_eq!(said.len(), 16, "{word}: no more than a log bears");
        assert!(said.iter().all(|said| said == word), "{said:?}");
        assert_eq!(read(&mut guest, 1, 0xb000 + AWAY), Some(0), "{word}");
    }
}
