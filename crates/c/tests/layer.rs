//! The tokens of the mapping layer, and failures of its ports.
#![allow(
    clippy::macro_metavars_in_unsafe,
    reason = "each test keeps the promise of C programs"
)]

mod support;

use std::cell::{Cell, RefCell};
use std::ptr;
use std::rc::Rc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread;

use ringfence::*;
use support::{Machine, NIC, PAGE, attach, map, unmap};

#[test]
fn tokens_end_with_their_mapping() {
    let machine = Machine::new();
    let mut dma = machine.layer(DmaPolicy::Strict);
    let at = attach(dma);
    let mapping = map(dma, &at, 0x1234, 7);
    assert_eq!(machine.translate(&at, mapping.iova), Some(0x1234));
    for wrong in [0, mapping.token + 1, mapping.token | 1 << 63, at.token + 1] {
        assert_eq!(unmap(dma, wrong).0, Status::StaleToken);
        assert_eq!(
            c!(ringfence_dma_end_burst(dma, wrong, 0)),
            Status::StaleToken
        );
        assert_eq!(
            c!(ringfence_dma_detach(dma, wrong, true)),
            Status::StaleToken
        );
    }
    assert_eq!(unmap(dma, mapping.token), (Status::Ok, 7));
    assert_eq!(machine.translate(&at, mapping.iova), None);
    assert_eq!(unmap(dma, mapping.token), (Status::StaleToken, u64::MAX));
    // The next mapping uses the slot; the old token does not name it.
    let next = map(dma, &at, 0x2000, 8);
    assert_eq!(next.token as u32, mapping.token as u32);
    assert_eq!(unmap(dma, mapping.token).0, Status::StaleToken);
    let mut unused = DmaMapping { token: 5, iova: 5 };
    for (attachment, bytes, direction, expected) in [
        (at.token + 1, 1, 0, Status::StaleToken),
        (at.token, 0, 0, Status::InvalidArgument),
        (at.token, u64::MAX, 0, Status::InvalidArgument),
        (at.token, 1, 3, Status::InvalidArgument),
        (at.token, 1 << 40, 0, Status::Exhausted),
    ] {
        let status = c!(ringfence_dma_map(
            dma,
            attachment,
            8,
            bytes,
            direction,
            0,
            &mut unused
        ));
        assert_eq!((status, unused.token), (expected, 5));
    }
    let mut other = at;
    let status = c!(ringfence_dma_attach(dma, NIC, 0xffff_ffff, &mut other));
    assert_eq!(status, Status::AlreadyAttached);
    let status = c!(ringfence_dma_attach(dma, 1, 0, &mut other));
    assert_eq!(status, Status::InvalidArgument);
    assert_eq!(
        c!(ringfence_dma_detach(dma, at.token, false)),
        Status::MappingsLive
    );
    assert_eq!(c!(ringfence_dma_detach(dma, at.token, true)), Status::Ok);
    assert_eq!(
        c!(ringfence_dma_detach(dma, at.token, true)),
        Status::StaleToken
    );
    // The detach has ended the mapping, and its unmap returns the buffer.
    assert_eq!(unmap(dma, next.token), (Status::Ok, 8));
    assert_eq!(unmap(dma, next.token).0, Status::StaleToken);
    assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
    assert!(machine.all_frames_are_back());
}

#[test]
fn a_failed_invalidation_keeps_the_buffer_until_a_retry_succeeds() {
    for (submit, poll) in [(1, 1), (-1, 1), (0, -1), (0, 2), (0, 0)] {
        let machine = Machine::new();
        let mut dma = machine.layer(DmaPolicy::Strict);
        let at = attach(dma);
        let mapping = map(dma, &at, 0x3000, 9);
        assert!(machine.translate(&at, mapping.iova).is_some());
        machine.submit_result.set(submit);
        machine.poll_result.set(poll);
        for _ in 0..3 {
            assert_eq!(unmap(dma, mapping.token), (Status::Invalidation, u64::MAX));
        }
        // The device still reaches the buffer, and the layer still keeps it.
        assert!(machine.translate(&at, mapping.iova).is_some());
        assert_eq!(
            c!(ringfence_dma_detach(dma, at.token, true)),
            Status::Invalidation
        );
        assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Invalidation);
        assert!(!dma.is_null());
        machine.submit_result.set(0);
        machine.poll_result.set(1);
        assert_eq!(unmap(dma, mapping.token), (Status::Ok, 9));
        assert!(machine.translate(&at, mapping.iova).is_none());
        assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
        assert!(machine.all_frames_are_back());
    }
}

#[test]
fn a_burst_withholds_its_buffers() {
    let machine = Machine::new();
    let mut dma = machine.layer(DmaPolicy::Burst);
    let at = attach(dma);
    let mappings: Vec<_> = (0..9).map(|i| map(dma, &at, i * PAGE, i)).collect();
    for mapping in &mappings[..8] {
        assert_eq!(unmap(dma, mapping.token), (Status::Withheld, u64::MAX));
        for _ in 0..2 {
            assert_eq!(unmap(dma, mapping.token).0, Status::AlreadyUnmapped);
        }
    }
    // The ninth exceeds `burst_most`, and stays mapped.
    assert_eq!(unmap(dma, mappings[8].token).0, Status::BurstFull);
    assert_eq!(machine.translate(&at, mappings[8].iova), Some(8 * PAGE));
    assert!(machine.released.borrow().is_empty());
    machine.poll_result.set(-1);
    assert_eq!(
        c!(ringfence_dma_end_burst(dma, at.token, 2)),
        Status::Invalidation
    );
    // The burst was invalidated in parts of four: the first part has been released.
    assert_eq!(*machine.released.borrow(), [0, 1, 2, 3]);
    machine.poll_result.set(1);
    assert_eq!(c!(ringfence_dma_end_burst(dma, at.token, 2)), Status::Ok);
    assert_eq!(*machine.released.borrow(), [0, 1, 2, 3, 4, 5, 6, 7]);
    for mapping in &mappings[..8] {
        assert_eq!(unmap(dma, mapping.token).0, Status::StaleToken);
    }
    assert_eq!(unmap(dma, mappings[8].token).0, Status::Withheld);
    // Destroy ends the burst.
    assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
    assert_eq!(machine.released.borrow().last(), Some(&8));
    assert_eq!(machine.disconnects.get(), 1);
    assert!(machine.all_frames_are_back());
}

#[test]
fn a_callback_cannot_enter_its_own_layer() {
    let machine = Machine::new();
    let mut dma = machine.layer(DmaPolicy::Strict);
    let at = attach(dma);
    let mapping = map(dma, &at, 0x1000, 1);
    machine.reenter.set(dma);
    assert_eq!(unmap(dma, mapping.token), (Status::Ok, 1));
    assert_eq!(machine.reentered.get(), Some(Status::Busy));
    machine.reenter.set(ptr::null());
    assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
}

#[test]
fn a_released_buffer_may_be_mapped_again_in_the_callback() {
    let machine = Machine::new();
    let mut dma = machine.layer(DmaPolicy::Burst);
    let at = attach(dma);
    let mapping = map(dma, &at, 0x1000, 1);
    assert_eq!(unmap(dma, mapping.token).0, Status::Withheld);
    machine.reenter_released.set(dma);
    let status = c!(ringfence_dma_end_burst(dma, at.token, 2));
    assert_eq!(status, Status::Ok);
    // The callback used a token that never existed, so the layer was entered.
    assert_eq!(machine.reentered.get(), Some(Status::StaleToken));
    machine.reenter_released.set(ptr::null());
    assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
}

/// Attaches another device, as a callback or another thread.
fn attach_other(dma: *const Dma) -> Status {
    let mut at = DmaAttachment {
        token: 0,
        root: 0,
        domain: 0,
        reserved: [0; 3],
    };
    c!(ringfence_dma_attach(dma, NIC + 1, 0xffff_ffff, &mut at))
}

#[test]
fn a_callback_below_destroy_cannot_use_the_layer() {
    let machine = Machine::new();
    let mut dma = machine.layer(DmaPolicy::Burst);
    let at = attach(dma);
    let mapping = map(dma, &at, 0x1000, 1);
    let live = map(dma, &at, 0x2000, 2);
    assert_eq!(unmap(dma, mapping.token).0, Status::Withheld);
    let found = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&found);
    let hook = move || {
        let mut again = dma;
        let destroyed = c!(ringfence_dma_destroy(&mut again));
        let statuses = [attach_other(dma), unmap(dma, live.token).0, destroyed];
        seen.borrow_mut().extend(statuses);
        assert!(!again.is_null());
    };
    *machine.on_released.borrow_mut() = Some(Box::new(hook));
    assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
    assert!(dma.is_null());
    assert_eq!(*found.borrow(), [Status::Busy; 3]);
    assert_eq!(*machine.released.borrow(), [1]);
    assert!(machine.all_frames_are_back());
}

#[test]
fn a_destroy_that_fails_opens_the_layer_again() {
    let machine = Machine::new();
    let mut dma = machine.layer(DmaPolicy::Burst);
    let at = attach(dma);
    machine.poll_result.set(-1);
    assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Invalidation);
    machine.poll_result.set(1);
    let mapping = map(dma, &at, 0x1000, 1);
    assert_eq!(unmap(dma, mapping.token).0, Status::Withheld);
    assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
    assert!(machine.all_frames_are_back());
}

#[test]
fn a_callback_cannot_destroy_the_layer_that_calls_it() {
    let machine = Machine::new();
    let mut dma = machine.layer(DmaPolicy::Burst);
    let at = attach(dma);
    for cookie in 0..2 {
        let mapping = map(dma, &at, 0x1000, cookie);
        assert_eq!(unmap(dma, mapping.token).0, Status::Withheld);
    }
    let statuses = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&statuses);
    let hook = move || {
        let mut below = dma;
        seen.borrow_mut()
            .push(c!(ringfence_dma_destroy(&mut below)));
    };
    *machine.on_released.borrow_mut() = Some(Box::new(hook));
    let status = c!(ringfence_dma_end_burst(dma, at.token, 2));
    assert_eq!(status, Status::Ok);
    assert_eq!(*statuses.borrow(), [Status::Busy; 2]);
    *machine.on_released.borrow_mut() = None;
    // The layer still works.
    let mapping = map(dma, &at, 0x2000, 9);
    assert_eq!(unmap(dma, mapping.token).0, Status::Withheld);
    assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
    assert!(machine.all_frames_are_back());
}

#[test]
fn a_call_from_another_thread_is_busy_and_changes_nothing() {
    let machine = Machine::new();
    let mut dma = machine.layer(DmaPolicy::Strict);
    let at = attach(dma);
    let mapping = map(dma, &at, 0x1000, 1);
    let statuses = Rc::new(Cell::new(None));
    let seen = Rc::clone(&statuses);
    let hook = move || {
        let shared = AtomicPtr::new(dma);
        let other = || {
            let dma = shared.load(Ordering::Relaxed);
            let mut destroyed = dma;
            let destroy = c!(ringfence_dma_destroy(&mut destroyed));
            assert!(!destroyed.is_null());
            [attach_other(dma), unmap(dma, mapping.token).0, destroy]
        };
        seen.set(thread::scope(|scope| scope.spawn(other).join().ok()));
    };
    *machine.on_submit.borrow_mut() = Some(Box::new(hook));
    assert_eq!(unmap(dma, mapping.token), (Status::Ok, 1));
    assert_eq!(statuses.get(), Some([Status::Busy; 3]));
    *machine.on_submit.borrow_mut() = None;
    assert_eq!(c!(ringfence_dma_destroy(&mut dma)), Status::Ok);
    assert!(machine.all_frames_are_back());
}
