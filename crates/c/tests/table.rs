//! Tables, and failures of their memory.
#![allow(
    clippy::macro_metavars_in_unsafe,
    reason = "each test keeps the promise of C programs"
)]

mod support;

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;

use ringfence::*;
use support::{BYTES, Machine, PAGE};

#[test]
fn bad_frames_are_returned_and_nothing_is_mapped() {
    let machine = Machine::new();
    let memory = machine.memory_port();
    let mut table = ptr::null_mut();
    for bad in [1, 0x800, BYTES, !0xfff] {
        machine.bad_frame.set(Some(bad));
        let status = c!(ringfence_table_create(&memory, 4, &mut table));
        assert_eq!((status, table), (Status::OutOfFrames, ptr::null_mut()));
        assert!(machine.all_frames_are_back());
    }
    machine.bad_frame.set(None);
    assert_eq!(
        c!(ringfence_table_create(&memory, 4, &mut table)),
        Status::Ok
    );
    // The root was dirty.
    let mut found = Translation {
        phys: 0,
        page_bytes: 0,
        permissions: 0,
        reserved: 0,
    };
    for iova in [0, 0x1000, 1 << 47] {
        assert_eq!(
            c!(ringfence_table_walk(table, iova, &mut found)),
            Status::NotMapped
        );
    }
    // Two frames of three are not enough.
    machine.frames_left.set(2);
    assert_eq!(
        c!(ringfence_table_map(table, 0, 0, PAGE, 3)),
        Status::OutOfFrames
    );
    assert_eq!(machine.frames_left.get(), 2);
    machine.frames_left.set(BYTES / 2 / PAGE - 1);
    for (iova, phys, bytes, permissions, expected) in [
        (1, 0, PAGE, 3, Status::Misaligned),
        (0, 1, PAGE, 3, Status::Misaligned),
        (0, 0, 1, 3, Status::Misaligned),
        (0, 0, 0, 3, Status::InvalidArgument),
        (0, 0, PAGE, 0, Status::InvalidArgument),
        (0, 0, PAGE, 4, Status::InvalidArgument),
        (0, 0, PAGE, 7, Status::InvalidArgument),
        (1 << 48, 0, PAGE, 3, Status::BeyondWidth),
        (0, 1 << 62, PAGE, 3, Status::BeyondWidth),
        (PAGE, 0x5000, 2 * PAGE, 1, Status::Ok),
        (2 * PAGE, 0, PAGE, 3, Status::AlreadyMapped),
    ] {
        let status = c!(ringfence_table_map(table, iova, phys, bytes, permissions));
        assert_eq!(status, expected, "{bytes} bytes at {iova:#x} to {phys:#x}");
    }
    assert_eq!(
        c!(ringfence_table_walk(table, 2 * PAGE + 5, &mut found)),
        Status::Ok
    );
    assert_eq!(
        (found.phys, found.page_bytes, found.permissions),
        (0x6005, PAGE, 1)
    );
    assert_eq!(
        c!(ringfence_table_walk(table, 1 << 48, &mut found)),
        Status::BeyondWidth
    );
    assert_eq!(c!(ringfence_table_unmap(table, 0, PAGE)), Status::NotMapped);
    assert_eq!(c!(ringfence_table_unmap(table, PAGE, 2 * PAGE)), Status::Ok);
    assert_eq!(
        c!(ringfence_table_unmap(table, PAGE, 2 * PAGE)),
        Status::NotMapped
    );
    assert_eq!(c!(ringfence_table_destroy(&mut table)), Status::Ok);
    assert!(machine.all_frames_are_back());
}

thread_local! {
    /// The last write-back, and the number of drains.
    static WRITTEN_BACK: Cell<(u64, u64, u32)> = const { Cell::new((0, 0, 0)) };
}

unsafe extern "C" fn write_back(_: *mut c_void, phys: u64, bytes: u64) {
    WRITTEN_BACK.set((phys, bytes, WRITTEN_BACK.get().2));
}

unsafe extern "C" fn drain(_: *mut c_void) {
    let (phys, bytes, drains) = WRITTEN_BACK.get();
    WRITTEN_BACK.set((phys, bytes, drains + 1));
}

#[test]
fn entries_are_written_back_for_a_walker_that_does_not_snoop() {
    let machine = Machine::new();
    let memory = Memory {
        write_back: Some(write_back),
        drain: Some(drain),
        ..machine.memory_port()
    };
    let mut table = ptr::null_mut();
    for incomplete in [
        Memory {
            write_back: None,
            ..memory
        },
        Memory {
            drain: None,
            ..memory
        },
    ] {
        let status = c!(ringfence_table_create(&incomplete, 4, &mut table));
        assert_eq!(status, Status::NullPointer);
    }
    assert_eq!(
        c!(ringfence_table_create(&memory, 4, &mut table)),
        Status::Ok
    );
    let mut root = 0;
    assert_eq!(c!(ringfence_table_root(table, &mut root)), Status::Ok);
    let (phys, bytes, drains) = WRITTEN_BACK.get();
    assert_eq!((phys, bytes), (root, PAGE));
    assert_eq!(c!(ringfence_table_map(table, 0, 0, PAGE, 3)), Status::Ok);
    assert!(WRITTEN_BACK.get().2 > drains);
    let (_, _, drains) = WRITTEN_BACK.get();
    assert_eq!(c!(ringfence_table_unmap(table, 0, PAGE)), Status::Ok);
    let (leaf, _, now) = WRITTEN_BACK.get();
    assert!(now > drains && leaf != root);
    let mut bytes = 0;
    assert_eq!(c!(ringfence_table_bytes(table, &mut bytes)), Status::Ok);
    assert_eq!(bytes, 4 * PAGE);
    assert_eq!(c!(ringfence_table_destroy(&mut table)), Status::Ok);
    assert!(machine.all_frames_are_back());
}
