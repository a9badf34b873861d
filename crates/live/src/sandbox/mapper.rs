//! The mapping thread: it makes the calls that the daemon has written on the board, each of which
//! the supervisor sees and lets through.
//!
//! It is a thread of its own so that a device that waits for its disk holds up no unmap. It shares
//! the device's memory, so it is not trusted: whoever takes it over can ask for calls that are
//! refused, or for none, and either ends the process.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

use super::control_region::{BATCH, ControlRegion};
use super::filter;
use super::sys::{confine, end, make, request_calls};

/// Starts the thread, confined, as `work`; the supervisor's end. Once in a process.
pub(super) fn start(
    board: &'static ControlRegion,
    work: fn(&ControlRegion) -> !,
) -> io::Result<OwnedFd> {
    // Once it is confined the thread may not even wake another one.
    static LISTENER: AtomicI32 = AtomicI32::new(NONE);
    const NONE: i32 = -1;
    const FAILED: i32 = -2;
    let program = filter::for_the_mapper();
    thread::spawn(move || {
        let listener = confine(&program, true).ok().flatten();
        let number = listener.map_or(FAILED, IntoRawFd::into_raw_fd);
        LISTENER.store(number, Ordering::Release);
        work(board)
    });
    loop {
        match LISTENER.load(Ordering::Acquire) {
            NONE => thread::yield_now(),
            FAILED => return Err(io::ErrorKind::PermissionDenied.into()),
            // SAFETY: the thread has given it up, and to nobody else.
            number => return Ok(unsafe { OwnedFd::from_raw_fd(number) }),
        }
    }
}

/// Does as the board says until nobody listens.
pub fn follow(board: &ControlRegion) -> ! {
    let (mut done, mut failed) = (0, 0);
    loop {
        let Ok(count) = usize::try_from(request_calls(done, failed)) else {
            end(0);
        };
        (done, failed) = (0, 0);
        for at in 0..count.min(BATCH) {
            let Some(call) = board.call(at) else {
                end(1);
            };
            // SAFETY: the daemon writes down windows only, and the kernel refuses one that is
            // taken.
            failed = unsafe { make(&call) };
            if failed != 0 {
                break;
            }
            done += 1;
        }
    }
}
