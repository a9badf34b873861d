//! Reads and writes of registers.

use ringfence_riommu_device::{Config, RiommuDevice, State, UndefinedBits, register};
use ringfence_types::RequesterId;

use crate::rig::{DISK, QUEUE, READ, Rig, cached, riova};

#[test]
fn identity_and_capabilities() {
    let devices = [7, 3, 0x20].map(RequesterId::new);
    for (config, prefetch) in [(Config::default(), 0), (cached(), 1 << 24)] {
        let device = RiommuDevice::new(&config, &devices).unwrap();
        assert_eq!(device.read(0x00, 4), 0x474e_4952);
        assert_eq!(device.read(0x04, 4), 0x0001_0000);
        assert_eq!(device.read(0x08, 8), 3 | 12 << 16 | prefetch);
        let listed = [0x400, 0x404, 0x408, 0x40c].map(|at| device.read(at, 4));
        assert_eq!(listed, [3, 7, 0x20, 0]);
    }
}

/// Reserved bits of each writable register read as 0.
#[test]
fn writable_bits() {
    let mut rig = Rig::new(&cached());
    let cases = [
        (register::ROOT, 8, 0xffff_ffff_ffff_f000),
        (register::FQ, 8, 0xffff_ffff_ffff_f00c),
        (register::CTRL, 4, 0b111),
        (register::FQ_HEAD, 4, 0xffff_ffff),
    ];
    for (offset, bytes, readable) in cases {
        rig.device.write(offset, bytes, u64::MAX);
        assert_eq!(rig.device.read(offset, bytes), readable, "{offset:#x}");
    }
    for offset in [
        register::ID,
        register::VERSION,
        register::FQ_TAIL,
        register::DEV,
    ] {
        let before = rig.device.read(offset, 4);
        rig.device.write(offset, 4, u64::MAX);
        assert_eq!(rig.device.read(offset, 4), before, "{offset:#x}");
    }
    assert_eq!(rig.device.read(register::INV, 8), 0);
}

/// Every other offset and size reads 0, and changes nothing.
#[test]
fn accesses_that_match_no_register_do_nothing() {
    let mut rig = Rig::started(&cached());
    let state = rig.device.save();
    let registers = [
        (register::ID, 4),
        (register::VERSION, 4),
        (register::CAP, 8),
        (register::ROOT, 8),
        (register::CTRL, 4),
        (register::STS, 4),
        (register::INV, 8),
        (register::FQ, 8),
        (register::FQ_HEAD, 4),
        (register::FQ_TAIL, 4),
        (register::DEV, 4),
    ];
    for offset in (0..register::BAR_BYTES + 64).chain([u64::MAX]) {
        for bytes in [0, 1, 2, 3, 4, 8, 16, u64::MAX] {
            if registers.contains(&(offset, bytes)) {
                continue;
            }
            assert_eq!(rig.device.read(offset, bytes), 0, "{offset:#x} {bytes}");
            rig.device.write(offset, bytes, u64::MAX);
            assert_eq!(rig.device.save(), state, "{offset:#x} {bytes}");
        }
    }
    assert_eq!(rig.device.read(register::DEV, 4), DISK.get().into());
}

/// The device would write entries to the old address otherwise.
#[test]
fn the_queue_is_fixed_while_faults_are_recorded() {
    let mut rig = Rig::started(&cached());
    let before = rig.device.read(register::FQ, 8);
    rig.device.write(register::FQ, 8, QUEUE + 0x1000);
    assert_eq!(rig.device.read(register::FQ, 8), before);
}

#[test]
fn saved_registers_are_restored() {
    let mut rig = Rig::started(&cached());
    rig.map(0, 0, 0x8000, 64, READ);
    assert!(rig.reads(riova(0, 1, 0), 4).is_err());
    assert!(rig.device.take_interrupt());
    let state = rig.device.save();
    let mut other = RiommuDevice::new(&cached(), &[DISK]).unwrap();
    other.restore(&state).unwrap();
    assert_eq!(other.save(), state);
    rig.device = other;
    assert_eq!(rig.reads(riova(0, 0, 0), 4), Ok(0x8000));
    let _ = rig.reads(riova(0, 1, 0), 4);
    assert!(!rig.device.take_interrupt(), "raised before the hand-over");
    assert_eq!(rig.take_faults().len(), 2);
}

/// Bits that no register defines, in the state of a hostile process.
#[test]
fn undefined_bits_are_not_restored() {
    let mut device = RiommuDevice::new(&cached(), &[DISK]).unwrap();
    let valid = State {
        root: !0xfff,
        control: 0b111,
        status: 0b111,
        fault_queue: !0xfff | 12,
        head: u32::MAX,
        tail: 5,
        raised: true,
    };
    device.restore(&valid).unwrap();
    assert_eq!(device.save(), valid);
    type Change = (&'static str, fn(&mut State));
    let cases: [Change; 6] = [
        ("ROOT", |state| state.root |= 0x800),
        ("CTRL", |state| state.control |= 8),
        ("STS", |state| state.status |= 8),
        ("FQ", |state| state.fault_queue |= 0x800),
        ("FQ", |state| state.fault_queue |= 0x10),
        ("FQ", |state| state.fault_queue |= 1),
    ];
    for (register, change) in cases {
        let mut state = valid;
        change(&mut state);
        assert_eq!(device.restore(&state), Err(UndefinedBits { register }));
        assert_eq!(device.save(), valid, "unchanged");
    }
}
