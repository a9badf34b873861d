//! Start and end of a unit.

use ringfence_pgtable::TableError;
use ringfence_smmu_v3::{Interrupts, Register, UnitError};
use ringfence_types::{FrameSource, Invalidation};

use crate::model::{
    ABORT, CMDQ_BASE, CMDQEN, CR0, CR0ACK, CR1, CR2, EVENTQ_BASE, EVENTQEN, GBPA, GERROR, GERRORN,
    IRQ_CTRL, Processor, SMMUEN, STRTAB_BASE,
};
use crate::rig::{COHERENT, DEVICE, DOMAIN, IOVA, PA, Rig, STREAM_TABLE, invalidate, one};

#[test]
fn registers_after_the_start() {
    let rig = Rig::new();
    let _unit = rig.unit();
    let read = |offset| rig.model.register(offset);
    assert_eq!(read(CR0), SMMUEN | EVENTQEN | CMDQEN);
    assert_eq!(read(CR1), 0xd75);
    assert_eq!(read(CR2), 2);
    assert_eq!(read(GBPA), ABORT);
    assert_eq!(read(IRQ_CTRL), 0);
    assert_eq!(read(STRTAB_BASE), STREAM_TABLE);
    assert_eq!(read(CMDQ_BASE) & 0x1f, 8);
    assert_eq!(read(EVENTQ_BASE) & 0x1f, 7);
    // Neither BTM nor ATS.
    let rig = Rig::without(COHERENT);
    let _unit = rig.unit();
    assert_eq!(rig.model.register(CR1), 0);
}

/// BTM makes the unit ignore the CPUs' invalidations; ATS makes it check translated accesses.
#[test]
fn features_that_need_registers() {
    let [idr0, rest @ ..] = crate::rig::IDENTIFICATION;
    let [idr1, idr3, idr5] = rest;
    let mut rig = Rig::with([idr0 | 1 << 5 | 1 << 10 | 1 << 13, idr1, idr3, idr5]);
    rig.options.interrupts = Interrupts::Wired;
    rig.model.set(0x68, 0x1234);
    rig.model.set(0xb0, 0x5678);
    let _unit = rig.unit();
    assert_eq!(rig.model.register(CR2), 0b110);
    assert_eq!(rig.model.register(CR0), 0b11101);
    assert_eq!(rig.model.register(IRQ_CTRL), 0b101);
    // No message-signalled interrupts.
    assert_eq!(rig.model.register(0x68), 0);
    assert_eq!(rig.model.register(0xb0), 0);
}

/// Whatever firmware left: the unit runs, with errors pending and full caches.
#[test]
fn a_running_unit_is_taken_over() {
    let rig = Rig::new();
    let mut earlier = rig.unit();
    let table = rig.stage1(DOMAIN);
    rig.map(&table, IOVA, PA, 1);
    earlier.attach(DEVICE, DOMAIN, &one(&table)).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
    drop(earlier);
    rig.model.raise(0x1fd);
    rig.model.set(IRQ_CTRL, 7);
    rig.model.set(GBPA, 0x0011_0000);
    let mut unit = rig.unit();
    assert_eq!(rig.access(DEVICE, IOVA), None);
    assert_eq!(rig.model.register(GERROR), rig.model.register(GERRORN));
    // Other fields of GBPA stay.
    assert_eq!(rig.model.register(GBPA), 0x0011_0000 | ABORT);
    // The new table of the same domain is used.
    let new = rig.stage1(DOMAIN);
    rig.map(&new, IOVA, PA + 0x1000, 1);
    unit.attach(DEVICE, DOMAIN, &one(&new)).unwrap();
    assert_eq!(rig.access(DEVICE, IOVA), Some(PA + 0x1000));
}

/// No access passes between reset and the first attach.
#[test]
fn accesses_are_blocked_from_start_to_end() {
    let rig = Rig::new();
    assert_eq!(rig.access(DEVICE, IOVA), Some(IOVA));
    let unit = rig.unit();
    assert_eq!(rig.access(DEVICE, IOVA), None);
    unit.disable().unwrap();
    assert_eq!(rig.model.register(CR0), 0);
    assert_eq!(rig.access(DEVICE, IOVA), None);
    assert_eq!(rig.frames.in_use(), 0);
}

#[test]
fn a_register_that_does_not_confirm_is_a_time_out() {
    for (offset, register) in [
        (GBPA, Register::Gbpa),
        (CR0, Register::Cr0),
        (IRQ_CTRL, Register::IrqCtrl),
    ] {
        let rig = Rig::new();
        rig.model
            .set(offset + if offset == GBPA { 0 } else { 4 }, 1 << 31 | 7);
        rig.model.change().stuck.push(offset);
        let error = rig.start().map(drop);
        assert_eq!(error, Err(UnitError::TimedOut { register }));
        assert_eq!(rig.frames.in_use(), 0);
    }
}

/// The unit stops, but does not start.
#[test]
fn a_failed_start_frees_all_frames() {
    let rig = Rig::new();
    rig.model.change().stuck.push(CR0);
    let register = Register::Cr0;
    assert_eq!(rig.start().map(drop), Err(UnitError::TimedOut { register }));
    // CR0ACK is still what it was, so nothing uses the frames.
    assert_eq!(rig.model.register(CR0ACK), 0);
    assert_eq!(rig.frames.in_use(), 0);

    let rig = Rig::new();
    rig.model.change().processor = Processor::Manual;
    assert!(matches!(
        rig.start().map(drop),
        Err(UnitError::Invalidation(_))
    ));
    assert_eq!(rig.model.register(CR0), 0);
    assert_eq!(rig.frames.in_use(), 0);
    assert_eq!(rig.access(DEVICE, IOVA), None);
}

#[test]
fn a_start_without_frames() {
    for free in 0..2 {
        let rig = Rig::new();
        let mut frames = Vec::new();
        while let Ok(frame) = rig.frames.alloc_zeroed() {
            frames.push(frame);
        }
        for frame in frames.drain(..free) {
            rig.frames.free(frame);
        }
        let in_use = rig.frames.in_use();
        assert_eq!(
            rig.start().map(drop),
            Err(UnitError::Table(TableError::OutOfFrames))
        );
        assert_eq!(rig.frames.in_use(), in_use);
    }
}

/// A unit that does not stop may still use its memory, so nothing is freed.
#[test]
fn a_unit_that_does_not_stop_is_returned() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    unit.pass_through(DEVICE).unwrap();
    let frames = rig.frames.in_use();
    rig.model.change().stuck.push(CR0);
    let Err((mut unit, error)) = unit.disable() else {
        panic!("the unit did not stop");
    };
    assert_eq!(
        error,
        UnitError::TimedOut {
            register: Register::Cr0
        }
    );
    assert_eq!(rig.frames.in_use(), frames);
    rig.model.change().stuck.clear();
    invalidate(&mut unit, Invalidation::Global);
    unit.disable().unwrap();
    assert_eq!(rig.frames.in_use(), 0);
}
