//! Eventfds that a client has handed over, signalled without waiting.
//!
//! Whoever writes to an eventfd waits while its counter is full. Neither `O_NONBLOCK` nor a look
//! beforehand helps against a client that lies: the flag is the descriptor's description's, and
//! that and the counter are the client's as well, who takes the one away and fills the other up
//! between any two instructions of ours. A device that waits there is one that the daemon's end
//! waits for. The kernel itself signals eventfds without waiting, at the end of asynchronous I/O,
//! and leaves a full counter full. So a signal is an asynchronous read of nothing (io_submit(2),
//! `IOCB_FLAG_RESFD`).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// `IOCB_CMD_PREAD` (Linux, include/uapi/linux/aio_abi.h).
const IOCB_CMD_PREAD: u16 = 0;
/// `IOCB_FLAG_RESFD`: an eventfd hears of the end.
const IOCB_FLAG_RESFD: u32 = 1;
/// Ends that the kernel keeps until they are taken; it makes room for some more.
const MAX_EVENTS: libc::c_long = 64;
/// Times that others may fill what was emptied.
const ATTEMPTS: usize = 8;

/// `struct iocb`. `key` and `rw_flags` change places where the highest byte comes first; both are
/// zero.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    operation: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

/// What asynchronous I/O takes: the process's context, as the kernel has them, and a file to read
/// nothing from.
struct AioContext {
    context: libc::c_ulong,
    dev_null: File,
}

impl AioContext {
    /// The one that there is; none where the host offers no asynchronous I/O.
    fn get() -> Option<&'static Self> {
        static ONE: OnceLock<Option<AioContext>> = OnceLock::new();
        ONE.get_or_init(|| Self::new().ok()).as_ref()
    }

    fn new() -> io::Result<Self> {
        let nothing = File::open("/dev/null")?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the call writes a context's number where its second argument points, and that
        // lives longer than the call.
        if unsafe { libc::syscall(libc::SYS_io_setup, MAX_EVENTS, &raw mut context) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            context,
            dev_null: nothing,
        })
    }

    /// Whether it was signalled.
    fn signal(&self, event: &OwnedFd) -> bool {
        let mut request = Iocb {
            operation: IOCB_CMD_PREAD,
            file: self.dev_null.as_raw_fd().cast_unsigned(),
            flags: IOCB_FLAG_RESFD,
            resfd: event.as_raw_fd().cast_unsigned(),
            ..Iocb::default()
        };
        let one: libc::c_long = 1;
        for _ in 0..ATTEMPTS {
            let mut list = [&raw mut request];
            // SAFETY: the list has one pointer, to a request that lives longer than the call, which
            // alone uses both. The request names no buffer, as it reads no bytes.
            let sent =
                unsafe { libc::syscall(libc::SYS_io_submit, self.context, one, list.as_mut_ptr()) };
            if sent == 1 {
                return true;
            }
            if io::Error::last_os_error().raw_os_error() != Some(libc::EAGAIN) {
                return false;
            }
            self.reap();
        }
        false
    }

    /// Nobody wants to know how it ended.
    fn reap(&self) {
        let mut ends = [IoEvent::default(); MAX_EVENTS as usize];
        let at_once = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let none: libc::c_long = 0;
        // SAFETY: the call writes at most `MAX_EVENTS` ends where its fourth argument points, which
        // has room for so many, and reads a time; both live longer than the call. Any bytes are an
        // `IoEvent`.
        let _ = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                none,
                MAX_EVENTS,
                ends.as_mut_ptr(),
                &raw const at_once,
            )
        };
    }
}

/// Opens what signals take, before the process may open nothing any more.
pub(crate) fn prepare() {
    let _ = AioContext::get();
}

/// Signals an eventfd. Never waits: a counter that is full is signalled already.
pub(crate) fn signal(event: &OwnedFd) {
    if !AioContext::get().is_some_and(|asynchronous| asynchronous.signal(event)) {
        signal_if_there_is_room(event);
    }
}

/// Where there is no asynchronous I/O, a client could make this wait.
fn signal_if_there_is_room(event: &OwnedFd) {
    let mut ready = [PollFd::new(event, PollFlags::OUT)];
    if matches!(poll(&mut ready, Some(&Timespec::default())), Ok(1)) {
        // An error says that the client has closed or changed it; then nobody waits for it.
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }
}

/// Anything else, such as a pipe or a file, could be made to block or to grow.
pub(crate) fn is_eventfd(fd: &OwnedFd) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .is_ok_and(|target| target.as_os_str() == "anon_inode:[eventfd]")
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn count(event: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    /// More than the kernel keeps ends of, by several threads.
    #[test]
    fn every_signal_arrives() {
        const EACH: u64 = 3000;
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..EACH).for_each(|_| signal(&event)));
            }
        });
        assert_eq!(count(&event), 3 * EACH);
        for _ in 0..EACH {
            signal_if_there_is_room(&event);
        }
        assert_eq!(count(&event), EACH);
    }

    #[test]
    fn asynchronous_io_is_used_where_there_is_some() {
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        match AioContext::get() {
            Some(asynchronous) => assert!(asynchronous.signal(&event) && count(&event) == 1),
            None => println!("not tried: this host has no asynchronous I/O"),
        }
    }
}
