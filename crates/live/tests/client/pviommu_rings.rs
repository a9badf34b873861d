//! Chains and rings that no driver of the para-virtual IOMMU makes. Each costs its request or the
//! queue, never the process. The devices behind the IOMMU continue, and the next driver finds the
//! IOMMU in its initial state.

use proptest::prelude::*;
use ringfence_live::server::PolledFunction;
use ringfence_live::virtio::blk::Blk;
use ringfence_types::Direction;

use crate::guest::{AWAY, Guest, READ_WRITE, read};
use crate::pviommu_driver::*;
use crate::rig::*;

/// Address of the request, which maps pages that are not mapped before.
const AT: u64 = REQUEST;
const STATUS: u64 = 0x7_2000;
const TABLE: u64 = 0xd000;
const NEW: u64 = 0xc000 + AWAY;
const DATA: u64 = 0xb000 + AWAY;
const INDIRECT_DESC: u64 = 1 << 28;

/// Address, bytes, flags, next.
type Descriptor = (u64, u32, u16, u16);

/// Outcome of a request.
#[derive(Debug, PartialEq)]
enum End {
    /// The request has this status.
    Status(u8),
    /// The device needs a reset, and has mapped nothing.
    Broken,
    /// The device needs a reset. It executed the request but could not write the status.
    Untold,
}
use End::{Broken, Status, Untold};

/// Returns a guest with a running disk, whose IOMMU driver has negotiated indirect descriptors.
fn ready() -> Guest<Blk, Para> {
    let mut guest =
        Guest::behind_para(|_, counters| Blk::new(disk_file(), false, counters).unwrap());
    guest.begin_para(INDIRECT_DESC);
    let rings = guest.map(QUEUE + AWAY, 0xa000 - QUEUE, QUEUE, READ_WRITE);
    assert_eq!(rings, 0);
    assert_eq!(guest.map(DATA, PAGE, 0xb000, READ_WRITE), 0);
    guest.begin();
    guest
}

/// Makes the chain at descriptor 0 available, after the earlier ones.
fn offer(guest: &mut Guest<Blk, Para>) {
    let slot = u64::from(guest.requests % 16);
    guest.requests += 1;
    let ram = &guest.iommu;
    ram.poke(REQUESTS + 0x1004 + 2 * slot, &[0, 0]);
    ram.poke(REQUESTS + 0x1002, &guest.requests.to_le_bytes());
    guest.iommu.ring(0);
}

fn is_broken(guest: &mut Guest<Blk, Para>) -> bool {
    guest.iommu.register(0x14, 1) & 64 != 0
}

/// Checks that the disk is served, and that another driver can map pages.
fn goes_on(mut guest: Guest<Blk, Para>, name: &str) {
    assert_eq!(read(&mut guest, 2, DATA), Some(0), "{name}: the disk");
    guest.iommu.set(0x14, &[0]);
    assert_eq!(read(&mut guest, 3, DATA), None, "{name}: nothing is left");
    guest.attach();
    assert_eq!(guest.map(NEW, PAGE, 0xc000, READ_WRITE), 0, "{name}");
}

fn end_of(name: &str, chain: &[Descriptor], table: &[Descriptor]) -> End {
    let mut guest = ready();
    let request = map(DISK, Direction::Bidirectional, &[(NEW, 0xc000)]);
    guest.iommu.poke(AT, &request);
    guest.iommu.poke(STATUS, &[0xee; 2]);
    let write = |start: u64, descriptors: &[Descriptor]| {
        for (index, (at, bytes, flags, next)) in (0u64..).zip(descriptors) {
            let raw = descriptor(*at, *bytes, *flags, *next);
            guest.iommu.poke(start + 16 * index, &raw);
        }
    };
    write(REQUESTS, chain);
    write(TABLE, table);
    let maps = guest.iommu.counters.maps.get();
    offer(&mut guest);
    let asked = guest.iommu.counters.maps.get() - maps;
    let status = guest.iommu.peek(STATUS, 2);
    let broken = is_broken(&mut guest);
    let mapped = read(&mut guest, 1, NEW) == Some(0);
    let end = match (broken, asked) {
        (false, _) => {
            let used = guest.iommu.peek(REQUESTS + 0x2002, 2);
            assert_eq!(used, guest.requests.to_le_bytes(), "{name}: returned");
            Status(status[0])
        }
        (true, 0) => Broken,
        (true, _) => Untold,
    };
    assert_eq!(status[1], 0xee, "{name}: one byte is the status");
    assert!(end == Status(status[0]) || status[0] == 0xee, "{name}");
    assert_eq!(mapped, matches!(end, Status(0) | Untold), "{name}: mapped");
    goes_on(guest, name);
    end
}

#[test]
fn chains_that_no_driver_makes() {
    let whole = (AT, 40, NEXT, 1);
    let status = (STATUS, 1, WRITE, 0);
    let end = RAM_BYTES - 16;
    let cases: &[(&str, &[Descriptor], &[Descriptor], End)] = &[
        ("as it should be", &[whole, status], &[], Status(0)),
        (
            "in pieces of any size",
            &[
                (AT, 1, NEXT, 1),
                (AT + 1, 0, NEXT, 2),
                (AT + 1, 38, NEXT, 3),
                (AT + 39, 1, NEXT, 4),
                (STATUS, 0, WRITE | NEXT, 5),
                (STATUS, 2, WRITE, 0),
            ],
            &[],
            Status(0),
        ),
        ("less a byte", &[(AT, 39, NEXT, 1), status], &[], Status(1)),
        (
            "one byte more",
            &[(AT, 41, NEXT, 1), status],
            &[],
            Status(1),
        ),
        ("no request", &[status], &[], Status(1)),
        ("no room for a status", &[(AT, 40, 0, 0)], &[], Broken),
        (
            "room of no bytes for a status",
            &[whole, (STATUS, 0, WRITE, 0)],
            &[],
            Broken,
        ),
        (
            "writable before readable",
            &[(STATUS, 1, WRITE | NEXT, 1), (AT, 40, 0, 0)],
            &[],
            Broken,
        ),
        (
            "readable after the status",
            &[
                (AT, 40, NEXT, 1),
                (STATUS, 1, WRITE | NEXT, 2),
                (AT, 8, 0, 0),
            ],
            &[],
            Broken,
        ),
        (
            "a request outside memory",
            &[(RAM_BYTES, 40, NEXT, 1), status],
            &[],
            Broken,
        ),
        (
            "a request that memory ends in",
            &[(end, 40, NEXT, 1), status],
            &[],
            Broken,
        ),
        (
            "a request that wraps",
            &[(u64::MAX - 7, 40, NEXT, 1), status],
            &[],
            Broken,
        ),
        (
            "a status outside memory",
            &[whole, (RAM_BYTES, 1, WRITE, 0)],
            &[],
            Untold,
        ),
        (
            "a status at the end of all addresses",
            &[whole, (u64::MAX, 1, WRITE, 0)],
            &[],
            Untold,
        ),
        (
            "more bytes than any request has",
            &[
                (0, RAM_BYTES as u32, NEXT, 1),
                (0, RAM_BYTES as u32, NEXT, 2),
                status,
            ],
            &[],
            Status(1),
        ),
        (
            "as many as a chain may have, outside memory",
            &[(1 << 40, u32::MAX - 1, NEXT, 1), status],
            &[],
            Status(1),
        ),
        (
            "more than a chain may have",
            &[(1 << 40, u32::MAX, NEXT, 1), status],
            &[],
            Broken,
        ),
        (
            "a loop",
            &[(AT, 40, NEXT, 1), (AT, 40, NEXT, 0)],
            &[],
            Broken,
        ),
        (
            "a loop through the status",
            &[whole, (STATUS, 1, WRITE | NEXT, 0)],
            &[],
            Broken,
        ),
        ("itself", &[(AT, 40, NEXT, 0)], &[], Broken),
        ("out of the table", &[(AT, 40, NEXT, 999)], &[], Broken),
        (
            "a separate table",
            &[(TABLE, 32, INDIRECT, 0)],
            &[whole, status],
            Status(0),
        ),
        (
            "a table in a table",
            &[(TABLE, 32, INDIRECT, 0)],
            &[(TABLE, 32, INDIRECT, 0), status],
            Broken,
        ),
        (
            "a table that loops",
            &[(TABLE, 32, INDIRECT, 0)],
            &[whole, (AT, 8, NEXT, 0)],
            Broken,
        ),
        (
            "a table of no descriptor",
            &[(TABLE, 0, INDIRECT, 0)],
            &[whole, status],
            Broken,
        ),
        (
            "half a descriptor",
            &[(TABLE, 24, INDIRECT, 0)],
            &[whole, status],
            Broken,
        ),
        (
            "a table of 4 GiB",
            &[(TABLE, !15, INDIRECT, 0)],
            &[whole, status],
            Broken,
        ),
        (
            "a table outside memory",
            &[(RAM_BYTES, 32, INDIRECT, 0)],
            &[],
            Broken,
        ),
        (
            "a table behind a descriptor",
            &[whole, (TABLE, 16, INDIRECT, 0)],
            &[status],
            Status(0),
        ),
    ];
    for (name, chain, table, end) in cases {
        assert_eq!(end_of(name, chain, table), *end, "{name}");
    }
}

/// The IOMMU executes a request whose status it cannot write before it breaks, and also the request
/// that follows. The first unmaps a page that the second maps.
#[test]
fn a_status_that_cannot_be_written_undoes_nothing() {
    let mut guest = ready();
    assert_eq!(guest.map(NEW, PAGE, 0xc000, READ_WRITE), 0);
    let asked = [
        unmap(&[NEW]),
        map(DISK, Direction::Bidirectional, &[(NEW, 0xb000)]),
    ];
    for ((request, status), chain) in asked.iter().zip([RAM_BYTES, STATUS]).zip(0u64..) {
        let (at, head) = (AT + chain * PAGE, 2 * chain as u16);
        guest.iommu.poke(at, request);
        for (index, raw) in [
            descriptor(at, request.len() as u32, NEXT, head + 1),
            descriptor(status, 1, WRITE, 0),
        ]
        .iter()
        .enumerate()
        {
            let address = REQUESTS + 16 * (2 * chain + index as u64);
            guest.iommu.poke(address, raw);
        }
        let address = REQUESTS + 0x1004 + 2 * u64::from(guest.requests % 16);
        guest.iommu.poke(address, &head.to_le_bytes());
        guest.requests += 1;
    }
    let index = guest.requests.to_le_bytes();
    guest.iommu.poke(STATUS, &[0xee]);
    guest.iommu.poke(REQUESTS + 0x1002, &index);
    guest.iommu.ring(0);
    assert!(is_broken(&mut guest));
    assert_eq!(guest.iommu.peek(STATUS, 1), [0], "the second is answered");
    let used = guest.iommu.peek(REQUESTS + 0x2002, 2);
    assert_eq!(used, index, "both are returned");
    guest.iommu.poke(0xb000, &[0; 8]);
    assert_eq!(read(&mut guest, 1, NEW), Some(0));
    let sector: Vec<u8> = (0..8).map(|at| at / 7).collect();
    assert_eq!(guest.iommu.peek(0xb000, 8), sector, "the second's page");
    goes_on(guest, "a status that cannot be written");
}

#[test]
fn an_available_index_beyond_the_queue_breaks_the_device() {
    for ahead in [17, 1 << 15, u16::MAX] {
        let mut guest = ready();
        let index = guest.requests.wrapping_add(ahead);
        guest.iommu.poke(REQUESTS + 0x1002, &index.to_le_bytes());
        guest.iommu.ring(0);
        assert!(is_broken(&mut guest), "{ahead}");
        goes_on(guest, "an index that runs away");
    }
}

#[test]
fn rings_outside_memory_break_the_device() {
    for at in [RAM_BYTES, RAM_BYTES - PAGE, 1 << 40, (1 << 63) - PAGE] {
        let mut guest = ready();
        guest.iommu.negotiate(1);
        guest.iommu.enable(0, 16, at);
        guest.iommu.set(0x14, &[15]);
        guest.iommu.ring(0);
        assert!(is_broken(&mut guest), "{at:#x}");
        assert_eq!(read(&mut guest, 1, DATA), None, "it was reset before");
        guest.iommu.set(0x14, &[0]);
        guest.attach();
        assert_eq!(guest.map(NEW, PAGE, 0xc000, READ_WRITE), 0);
    }
}

/// Event buffers that are too short, outside memory, or not chains: the event waits or is lost, and
/// the request queue continues.
#[test]
fn buffers_for_events_that_hold_none() {
    for (name, at, bytes, flags) in [
        ("too short", 0x7_0000, 23, WRITE),
        ("for the device to read", 0x7_0000, 24, 0),
        ("outside memory", RAM_BYTES, 24, WRITE),
    ] {
        let mut guest = ready();
        let events = crate::guest::EVENT_QUEUE;
        guest.iommu.poke(0x7_0000, &[0xee; 24]);
        guest.iommu.poke(events, &descriptor(at, bytes, flags, 0));
        guest.iommu.poke(events + 0x1002, &[1, 0]);
        guest.iommu.ring(1);
        assert_eq!(read(&mut guest, 1, 0xdead_0000), Some(1), "{name}");
        guest.iommu.session.function().on_ready();
        guest.iommu.ring(1);
        assert_eq!(guest.iommu.peek(0x7_0000, 24), [0xee; 24], "{name}");
        assert_eq!(guest.map(NEW, PAGE, 0xc000, READ_WRITE), 0, "{name}");
    }
}

proptest! {
    /// Any descriptors in any ring: the process survives, and the disk keeps exactly the mappings
    /// that the driver made.
    #[test]
    fn any_descriptors(
        descriptors in prop::collection::vec(
            (
                prop_oneof![AT..AT + 64, 0u64..RAM_BYTES, any::<u64>()],
                prop_oneof![Just(40u32), 0u32..5000, any::<u32>()],
                0u16..8,
                0u16..20,
            ),
            16,
        ),
        heads in prop::collection::vec(any::<u16>(), 1..16),
    ) {
        let mut guest = ready();
        guest.iommu.poke(AT, &map(DISK, Direction::Bidirectional, &[(NEW, 0xc000)]));
        for (index, (at, bytes, flags, next)) in (0u64..).zip(descriptors) {
            guest.iommu.poke(REQUESTS + 16 * index, &descriptor(at, bytes, flags, next));
        }
        for (slot, head) in (u64::from(guest.requests)..).zip(&heads) {
            guest.iommu.poke(REQUESTS + 0x1004 + 2 * (slot % 16), &head.to_le_bytes());
        }
        let index = guest.requests + heads.len() as u16;
        guest.iommu.poke(REQUESTS + 0x1002, &index.to_le_bytes());
        guest.iommu.ring(0);
        prop_assert!(guest.iommu.counters.unmaps.get() == 0);
        guest.iommu.set(0x14, &[0]);
        guest.attach();
        prop_assert_eq!(guest.map(DATA, PAGE, 0xb000, READ_WRITE), 0);
    }
}
