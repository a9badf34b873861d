//! Forged requests of a guest. They affect at most the mappings of their own device and
//! nothing outside the guest.

use proptest::prelude::*;
use ringfence_pviommu::backend::{BackendLimits, FixedLastTable};
use ringfence_pviommu::wire::{Request, Status};
use ringfence_types::{Access, Direction};

use crate::rig::{DISK, MEMORY, NIC, PAGE, Rig, WINDOW, cases, config, map, memory, unmap};
use crate::simulator::host;

/// A victim device with one mapped page. The attacker in the same guest controls the queue.
fn victim() -> Rig {
    let mut rig = Rig::new();
    let pages = [(WINDOW, MEMORY)];
    assert_eq!(rig.map(DISK, Direction::ToDevice, &pages), Status::Ok);
    rig
}

fn holds(rig: &mut Rig) {
    let frame = rig.frame(MEMORY);
    assert_eq!(rig.reach(DISK, WINDOW, Access::Read), Ok(frame));
    assert!(rig.reach(DISK, WINDOW, Access::Write).is_err());
    assert!(rig.reach(DISK, WINDOW + PAGE, Access::Read).is_err());
}

#[test]
fn forged_requests_fail_without_effect() {
    let mut long = map(NIC, Direction::ToDevice, &[(WINDOW, MEMORY)]);
    long[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    // 2^28 pages of 16 bytes are 0 in 32-bit arithmetic.
    let mut wraps = map(NIC, Direction::ToDevice, &[(WINDOW, MEMORY)]);
    wraps[12..16].copy_from_slice(&(1_u32 << 28).to_le_bytes());
    let forged = |id: u64| ringfence_pviommu::wire::Devid::new(id);
    let to = Direction::ToDevice;
    for (name, request, status) in [
        (
            "a device of the host",
            map(forged(0x20), to, &[(WINDOW, MEMORY)]),
            Status::NoDevice,
        ),
        (
            "a device of another segment",
            map(forged(0x1_0010), to, &[(WINDOW, MEMORY)]),
            Status::NoDevice,
        ),
        (
            "memory of the host",
            map(NIC, to, &[(WINDOW, 0x1000_0000)]),
            Status::BadGpa,
        ),
        (
            "memory of the host, for an address that is mapped",
            map(DISK, to, &[(WINDOW, 0x1000_0000)]),
            Status::BadGpa,
        ),
        (
            "past the guest's memory",
            map(
                NIC,
                to,
                &[(WINDOW, (8 << 20) - PAGE), (WINDOW + PAGE, 8 << 20)],
            ),
            Status::BadGpa,
        ),
        ("a length that overflows", long, Status::Malformed),
        ("a length that wraps", wraps, Status::Malformed),
        (
            "an address of another device",
            unmap(NIC, &[WINDOW]),
            Status::NotMapped,
        ),
        (
            "what was never mapped",
            unmap(DISK, &[WINDOW + PAGE]),
            Status::NotMapped,
        ),
        (
            "what was never mapped, with what was",
            unmap(DISK, &[WINDOW, WINDOW + PAGE]),
            Status::NotMapped,
        ),
        (
            "an address twice",
            map(NIC, to, &[(WINDOW, MEMORY), (WINDOW, MEMORY + PAGE)]),
            Status::Mapped,
        ),
        (
            "what was mapped, twice",
            unmap(DISK, &[WINDOW, WINDOW]),
            Status::NotMapped,
        ),
        (
            "more than was mapped",
            map(DISK, Direction::Bidirectional, &[(WINDOW, MEMORY)]),
            Status::Mapped,
        ),
    ] {
        let mut rig = victim();
        assert_eq!(rig.backend.handle(&request), status, "{name}");
        holds(&mut rig);
        assert!(rig.reach(NIC, WINDOW, Access::Read).is_err(), "{name}");
        assert_eq!(rig.backend.mapped_pages(NIC), 0, "{name}");
    }
}

/// A simulated device is granted the pages that the guest names, but only inside the guest's
/// memory.
#[test]
fn memory_of_the_host_is_not_granted() {
    let outside = [
        0x1000_0000,
        8 << 20,
        (1 << 30) - PAGE,
        (1 << 30) + (4 << 20),
    ];
    let mut host = host(100);
    for gpa in outside {
        let request = map(NIC, Direction::ToDevice, &[(WINDOW, gpa)]);
        assert_eq!(host.backend.handle(&request), Status::BadGpa, "{gpa:#x}");
        let request = map(
            NIC,
            Direction::ToDevice,
            &[(WINDOW, MEMORY), (WINDOW + PAGE, gpa)],
        );
        assert_eq!(host.backend.handle(&request), Status::BadGpa, "{gpa:#x}");
        assert_eq!(host.granted(), 0, "{gpa:#x}");
    }
}

/// A guest that maps as much as it can reaches the limits, and a reset frees its memory.
#[test]
fn a_greedy_guest_ends_at_its_limits() {
    let limits = BackendLimits {
        mappings: 300,
        leaves: 20,
    };
    let mut rig = Rig::with(config(), limits, &memory(), FixedLastTable::default());
    let mut refused = 0;
    for page in 0..4000 {
        let giova = WINDOW + page * 37 * PAGE % (60 << 20);
        let status = rig.map(
            NIC,
            Direction::Bidirectional,
            &[(giova, MEMORY + page % 9 * PAGE)],
        );
        refused += u32::from(status == Status::NoRoom);
        assert!(
            matches!(status, Status::Ok | Status::NoRoom | Status::Mapped),
            "{status}"
        );
    }
    assert!(refused > 3000, "{refused} refused");
    assert!(rig.backend.mapped_pages(NIC) <= 300);
    // The other device is not affected.
    assert_eq!(
        rig.map(DISK, Direction::ToDevice, &[(WINDOW, MEMORY)]),
        Status::Ok
    );
    rig.backend.reset().unwrap();
    assert_eq!(rig.backend.mapped_pages(NIC), 0);
}

proptest! {
    #![proptest_config(cases(256, 20_251_124))]

    /// Arbitrary bytes, partly shaped like a request.
    #[test]
    fn no_bytes_harm_another_device(
        requests in prop::collection::vec(
            (prop::collection::vec(any::<u8>(), 0..120), 0..3_u32, 0..5_u32, any::<bool>()),
            1..20,
        ),
    ) {
        let mut rig = victim();
        for (mut bytes, kind, pages, own) in requests {
            if let Some(header) = bytes.get_mut(..16) {
                let id = if own {
                    NIC.get()
                } else {
                    u64::from_le_bytes(header[..8].try_into().unwrap())
                };
                header[..8].copy_from_slice(&id.to_le_bytes());
                header[8..12].copy_from_slice(&kind.to_le_bytes());
                header[12..].copy_from_slice(&pages.to_le_bytes());
            }
            let malformed = Request::decode(&bytes, 64).is_err();
            let status = rig.backend.handle(&bytes);
            prop_assert_eq!(malformed, status == Status::Malformed);
        }
        holds(&mut rig);
    }
}
