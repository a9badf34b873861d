//! The mapping thread. It makes the calls that the daemon has written to the control region; the
//! supervisor checks each before the kernel executes it.
//!
//! A separate thread lets unmaps proceed while the device waits for its disk. It shares the
//! device's memory, so it is not trusted. An attacker in control of it can make calls that the
//! supervisor rejects, or none; either ends the process.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

use super::filter;
use crate::grants::control_region::{BATCH, ControlRegion};
use crate::grants::sys::{confine, end, make, request_calls};

/// Starts the thread, confined, with `work` as its body. Returns the supervisor's seccomp listener.
/// May be called once per process.
pub(super) fn start(
    control: &'static ControlRegion,
    work: fn(&ControlRegion) -> !,
) -> io::Result<OwnedFd> {
    // A confined thread cannot make futex calls, so the caller polls this atomic.
    static LISTENER: AtomicI32 = AtomicI32::new(NONE);
    const NONE: i32 = -1;
    const FAILED: i32 = -2;
    let program = filter::for_the_mapper();
    thread::spawn(move || {
        let listener = confine(&program, true).ok().flatten();
        let number = listener.map_or(FAILED, IntoRawFd::into_raw_fd);
        LISTENER.store(number, Ordering::Release);
        work(control)
    });
    loop {
        match LISTENER.load(Ordering::Acquire) {
            NONE => thread::yield_now(),
            FAILED => return Err(io::ErrorKind::PermissionDenied.into()),
            // SAFETY: the thread gave up the descriptor and passed it to no other code.
            number => return Ok(unsafe { OwnedFd::from_raw_fd(number) }),
        }
    }
}

/// Executes batches from the control region. Exits the process when the supervisor has closed its
/// listener.
pub fn follow(control: &ControlRegion) -> ! {
    let (mut done, mut failed) = (0, 0);
    loop {
        let Ok(count) = usize::try_from(request_calls(done, failed)) else {
            end(0);
        };
        (done, failed) = (0, 0);
        for at in 0..count.min(BATCH) {
            let Some(call) = control.call(at) else {
                end(1);
            };
            // SAFETY: the daemon writes calls for windows only, and the kernel rejects an `mmap`
            // over an existing mapping.
            failed = unsafe { make(&call) };
            if failed != 0 {
                break;
            }
            done += 1;
        }
    }
}
