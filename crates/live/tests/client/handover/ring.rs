//! Hand-over of the ring IOMMU. Its mappings are in the guest's memory, and no process keeps them.

use ringfence_live::daemon::{Daemon, Disk, EndReason, Iommu, VfioUserDevices};
use ringfence_live::handover::{
    DeviceState, FunctionState, HandOverTimeouts, PlainState, RiommuState, SavedDevices, StateError,
};
use ringfence_riommu_device::register;

use super::guest::{DATA, Dir, ENDPOINT, Guest, Remote, counted, end, serving};
use super::refused::Second;
use crate::rig::{RAM_BYTES, longs, words};

const ROOT: u64 = 0x9_0000;
const CONTEXTS: u64 = 0x9_1000;
/// The disk's rDEVICE, and its rRING behind it.
const DEVICE: u64 = 0x9_2000;
/// The only slot of that ring.
const SLOT: u64 = 0x9_3000;
const FAULTS: u64 = 0x9_4000;

/// Starts a guest. The slot contains all of memory, so the disk's addresses are guest-physical.
fn boot(dir: &Dir) -> Guest {
    let mut guest = Guest::boot_untranslated(dir);
    guest.iommu = Remote::connect(&dir.0.join("riommu.sock"), &guest.ram);
    guest.poke(ROOT, &longs(&[CONTEXTS | 1, 0]));
    let context = CONTEXTS + u64::from(ENDPOINT) * 16;
    guest.poke(context, &longs(&[DEVICE | 0xd, 1 << 8]));
    guest.poke(DEVICE, &longs(&[DEVICE + 16, 1, SLOT, 1]));
    map(&guest, RAM_BYTES);
    guest.iommu.master(true);
    guest.iommu.set(register::FQ, &longs(&[FAULTS | 4]));
    guest.iommu.set(register::ROOT, &longs(&[ROOT]));
    guest.iommu.set(register::CTRL, &words(&[7]));
    // The disk's driver starts again, and accepts that addresses are translated.
    guest.begin(1 << 33);
    guest
}

/// Makes the first bytes of memory the buffer of the slot.
fn map(guest: &Guest, bytes: u64) {
    guest.poke(SLOT, &longs(&[0, bytes | 3 << 30 | 1 << 32]));
}

fn invalidate(guest: &mut Guest) {
    guest.iommu.set(register::INV, &longs(&[2 << 32]));
}

fn ring_daemon(dir: &Dir) -> Daemon {
    let devices = VfioUserDevices {
        iommu: Iommu::Ring,
        disk: Some(Disk::new(dir.0.join("disk.img"))),
        entropy: true,
        ..VfioUserDevices::default()
    };
    serving(dir, &devices.into(), HandOverTimeouts::default())
}

fn taken(dir: &Dir, first: Daemon) -> Daemon {
    let (second, _) = Daemon::take_over(here!(&dir.0), 0).unwrap();
    assert_eq!(first.join().unwrap(), EndReason::HandedOver);
    second
}

#[test]
fn a_guest_continues_behind_the_ring_iommu() {
    let dir = Dir::new("ring");
    let mut daemon = ring_daemon(&dir);
    let mut guest = boot(&dir);
    guest.read(3);
    // A fault that the driver has not read yet: the buffer ends before the request's data.
    map(&guest, DATA);
    invalidate(&mut guest);
    guest.offer(1);
    guest.disk.ring(0);
    guest.disk.register(0x14, 1);
    assert_eq!(guest.peek(0x9000, 1), [1], "an error");
    guest.forget_interrupts();
    map(&guest, RAM_BYTES);
    invalidate(&mut guest);
    let registers = |guest: &mut Guest| {
        [
            (register::ROOT, 8),
            (register::CTRL, 4),
            (register::STS, 4),
            (register::FQ, 8),
            (register::FQ_TAIL, 4),
        ]
        .map(|(offset, bytes)| guest.iommu.register(offset, bytes))
    };
    let before = registers(&mut guest);
    for round in 0..20 {
        // A request without its doorbell.
        guest.offer(round % 8);
        daemon = taken(&dir, daemon);
        guest.disk.ring(0);
        guest.has_read(round % 8);
        guest.read(8 + round % 8);
        assert_eq!(registers(&mut guest), before);
    }
    assert_eq!(guest.peek(FAULTS + 8, 2), [0x20, 0], "the disk");
    end(daemon);
    assert!(!dir.0.join("riommu.sock").exists());
}

/// The first process has a copy of a slot that the driver has cleared. The second one has none.
#[test]
fn cached_entries_stay_behind() {
    let dir = Dir::new("ring-cached");
    let first = ring_daemon(&dir);
    let mut guest = boot(&dir);
    guest.read(3);
    guest.poke(SLOT + 8, &longs(&[0]));
    guest.read(4);
    let second = taken(&dir, first);
    guest.offer(5);
    guest.disk.ring(0);
    assert_eq!(guest.disk.register(0x14, 1)[0] & 64, 64, "it needs a reset");
    assert!(counted(&second, "riommu", "faults") > 0);
    assert_eq!(counted(&second, "blk", "unit_hits"), 0);
    end(second);
}

/// State that no function has, from a hostile process.
#[test]
fn impossible_states_of_the_ring_iommu_are_refused() {
    let dir = Dir::new("ring-lies");
    let first = ring_daemon(&dir);
    let mut guest = boot(&dir);
    fn state(saved: &mut SavedDevices) -> &mut RiommuState {
        let DeviceState::Ring(state) = &mut saved.devices[0].state else {
            panic!("the first device");
        };
        state
    }
    fn registers(saved: &mut SavedDevices) -> &mut PlainState {
        let FunctionState::Plain(state) = &mut saved.devices[0].function else {
            panic!("not a virtio device");
        };
        state
    }
    type Lie = (&'static str, fn(&mut SavedDevices));
    let cases: [Lie; 7] = [
        ("ROOT", |saved| state(saved).registers.root |= 1),
        ("CTRL", |saved| state(saved).registers.control |= 8),
        ("STS", |saved| state(saved).registers.status |= 8),
        ("FQ", |saved| state(saved).registers.fault_queue |= 0x20),
        ("configuration space", |saved| {
            registers(saved).config[0] ^= 1
        }),
        ("vectors", |saved| registers(saved).vectors.push(None)),
        // A function of another kind, in a state that no stream can carry.
        ("IOMMU", |saved| {
            saved.devices[1].state = DeviceState::Ring(*state(saved))
        }),
    ];
    for (what, change) in cases {
        let (bytes, fds) = Second::connect(&dir).copy();
        let mut saved = SavedDevices::decode(&bytes, fds).unwrap();
        change(&mut saved);
        let refused = Daemon::rehearse(here!(&dir.0), saved).map(|_| ());
        assert!(
            matches!(refused, Err(StateError::Register { what: why }) if why == what),
            "{what}: {refused:?}"
        );
        guest.read(1);
    }
    end(first);
}
