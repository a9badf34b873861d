//! The fault queue and its interrupt.

use ringfence_riommu_device::register;
use ringfence_types::{Access, FaultReason};

use crate::rig::{DISK, MEMORY, QUEUE, QUEUE_SHIFT, READ, Rig, cached, riova};

const ENTRIES: u64 = 1 << QUEUE_SHIFT;

#[test]
fn a_fault_is_written_to_the_queue_and_raises_one_interrupt() {
    let mut rig = Rig::started(&cached());
    rig.map(0, 2, 0x8000, 64, READ);
    let _ = rig.access(riova(0, 2, 60), 8, Access::Read);
    assert!(rig.device.take_interrupt());
    assert!(!rig.device.take_interrupt());
    // Byte 64 is the first one beyond the buffer; reason 12.
    assert_eq!(rig.load(QUEUE), [2 << 30 | 64, 0x0c00_0020]);
    let _ = rig.access(riova(0, 2, 0), 8, Access::Write);
    assert!(
        !rig.device.take_interrupt(),
        "the driver has not read the first"
    );
    let faults = rig.take_faults();
    assert_eq!(faults.len(), 2);
    assert_eq!(faults[1].device(), DISK);
    assert_eq!(faults[1].iova(), riova(0, 2, 0));
    assert_eq!(faults[1].access(), Access::Write);
    assert_eq!(faults[1].reason(), 11);
    let _ = rig.access(riova(0, 3, 0), 8, Access::Read);
    assert!(rig.device.take_interrupt());
}

/// An entry that was written between the driver's last look and its write to FQ_HEAD.
#[test]
fn entries_behind_the_head_raise_the_interrupt_again() {
    let mut rig = Rig::started(&cached());
    let _ = rig.access(riova(0, 0, 0), 4, Access::Read);
    assert!(rig.device.take_interrupt());
    let _ = rig.access(riova(0, 1, 0), 4, Access::Read);
    rig.device.write(register::FQ_HEAD, 4, 1);
    assert!(rig.device.take_interrupt());
    rig.device.write(register::FQ_HEAD, 4, 2);
    assert!(!rig.device.take_interrupt());
}

#[test]
fn a_full_queue_loses_faults_until_the_driver_reads() {
    let mut rig = Rig::started(&cached());
    for _ in 0..1_000_000 {
        assert!(rig.access(riova(0, 0, 0), 4, Access::Read).is_err());
    }
    assert_eq!(rig.tail(), ENTRIES);
    assert_eq!(rig.status(), register::OVERFLOW.into());
    assert_eq!(rig.take_faults().len(), ENTRIES as usize);
    rig.device
        .write(register::STS, 4, register::OVERFLOW.into());
    let _ = rig.access(riova(0, 1, 0), 4, Access::Read);
    assert_eq!(rig.take_faults().len(), 1);
    assert_eq!(rig.status(), 0);
}

/// The indices count beyond 2^32.
#[test]
fn indices_wrap() {
    let mut rig = Rig::started(&cached());
    let mut state = rig.device.save();
    (state.head, state.tail) = (u32::MAX, u32::MAX);
    rig.device.restore(&state).unwrap();
    for slot in 0..3 {
        let _ = rig.access(riova(0, slot, 0), 4, Access::Read);
    }
    assert_eq!(rig.tail(), 2);
    let iovas: Vec<_> = rig.take_faults().iter().map(|fault| fault.iova()).collect();
    assert_eq!(iovas, [0, 1, 2].map(|slot| riova(0, slot, 0)));
}

#[test]
fn a_queue_outside_memory_stops_recording() {
    for base in [MEMORY, !0xfff] {
        let mut rig = Rig::started(&cached());
        let control = rig.device.read(register::CTRL, 4);
        rig.device
            .write(register::CTRL, 4, register::TRANSLATE.into());
        rig.device.write(register::FQ, 8, base | QUEUE_SHIFT);
        rig.device.write(register::CTRL, 4, control);
        let stopped = rig.access(riova(0, 0, 0), 4, Access::Read);
        assert_eq!(stopped.unwrap_err().reason, FaultReason::NotPresent);
        assert_eq!(rig.status(), register::QUEUE_ERROR.into());
        assert_eq!(rig.tail(), 0);
        assert!(rig.device.take_interrupt());
        let recording = rig.device.read(register::CTRL, 4);
        assert_eq!(recording & u64::from(register::RECORD_FAULTS), 0);
    }
}

/// The driver gives the queue another address, and switches recording on again.
#[test]
fn a_driver_restarts_a_queue_that_stopped() {
    let mut rig = Rig::started(&cached());
    let control = rig.device.read(register::CTRL, 4);
    let write = |rig: &mut Rig, offset, bytes, value| rig.device.write(offset, bytes, value);
    write(&mut rig, register::CTRL, 4, register::TRANSLATE.into());
    write(&mut rig, register::FQ, 8, MEMORY | QUEUE_SHIFT);
    write(&mut rig, register::CTRL, 4, control);
    let _ = rig.access(riova(0, 0, 0), 4, Access::Read);
    assert!(rig.device.take_interrupt());
    let _ = rig.access(riova(0, 1, 0), 4, Access::Read);
    assert!(!rig.device.take_interrupt(), "it records no more");
    write(&mut rig, register::STS, 4, register::QUEUE_ERROR.into());
    write(&mut rig, register::FQ, 8, QUEUE | QUEUE_SHIFT);
    write(&mut rig, register::FQ_HEAD, 4, 0);
    write(&mut rig, register::CTRL, 4, control);
    let _ = rig.access(riova(0, 2, 0), 4, Access::Read);
    assert!(rig.device.take_interrupt());
    let faults = rig.take_faults();
    assert_eq!((faults.len(), rig.status()), (1, 0));
    assert_eq!(faults[0].iova(), riova(0, 2, 0));
}

#[test]
fn without_their_bits_there_are_no_records_and_no_interrupts() {
    let mut rig = Rig::started(&cached());
    let no_interrupt = register::TRANSLATE | register::RECORD_FAULTS;
    rig.device.write(register::CTRL, 4, no_interrupt.into());
    let _ = rig.access(riova(0, 0, 0), 4, Access::Read);
    assert_eq!((rig.tail(), rig.device.take_interrupt()), (1, false));
    let no_records = register::TRANSLATE | register::INTERRUPT;
    rig.device.write(register::CTRL, 4, no_records.into());
    let _ = rig.access(riova(0, 0, 0), 4, Access::Read);
    assert_eq!((rig.tail(), rig.device.take_interrupt()), (1, false));
}
