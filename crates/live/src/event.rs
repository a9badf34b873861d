//! Eventfds that a client has handed over, signalled without waiting.
//!
//! A write to an eventfd blocks while its counter is full. A blocked device also blocks the
//! daemon's exit. Neither `O_NONBLOCK` nor a poll before the write helps against a hostile client.
//! The flag belongs to the open file description, which the client shares, and so does the counter.
//! The client can clear the flag and fill the counter between any two of our instructions.
//!
//! The kernel itself signals eventfds without blocking, when asynchronous I/O completes, and leaves
//! a full counter unchanged. A signal is therefore an asynchronous read of zero bytes
//! (io_submit(2), `IOCB_FLAG_RESFD`).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A host descriptor that a device waits for.
#[derive(Clone, Copy, Debug)]
pub struct PollSource<'a> {
    /// The descriptor to poll.
    pub fd: BorrowedFd<'a>,
    /// True to wait until the descriptor is readable.
    pub input: bool,
    /// True to wait until the descriptor is writable.
    pub output: bool,
}

impl<'a> PollSource<'a> {
    /// Waits until `fd` is readable.
    pub fn readable(fd: BorrowedFd<'a>) -> Self {
        Self {
            fd,
            input: true,
            output: false,
        }
    }
}

/// `IOCB_CMD_PREAD` (Linux, include/uapi/linux/aio_abi.h).
const IOCB_CMD_PREAD: u16 = 0;
/// `IOCB_FLAG_RESFD`: the kernel signals an eventfd at completion.
const IOCB_FLAG_RESFD: u32 = 1;
/// Completions that the context holds until they are reaped; the kernel allocates room for some
/// more.
const MAX_EVENTS: libc::c_long = 64;
/// Submissions per signal: other threads may fill the completion ring again after each reap.
const ATTEMPTS: usize = 8;

/// `struct iocb`. On big-endian machines `key` and `rw_flags` are swapped; both are zero here.
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

/// `struct io_event` of `linux/aio_abi.h`: one completion.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

/// The process's AIO context, and a file for reads of zero bytes.
struct AioContext {
    context: libc::c_ulong,
    dev_null: File,
}

impl AioContext {
    /// Returns the process's context. `None` if the host has no asynchronous I/O.
    fn get() -> Option<&'static Self> {
        static CONTEXT: OnceLock<Option<AioContext>> = OnceLock::new();
        CONTEXT.get_or_init(|| Self::new().ok()).as_ref()
    }

    fn new() -> io::Result<Self> {
        let dev_null = File::open("/dev/null")?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the call writes a context number where its second argument points; `context`
        // outlives the call.
        if unsafe { libc::syscall(libc::SYS_io_setup, MAX_EVENTS, &raw mut context) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { context, dev_null })
    }

    /// Returns true if the kernel signalled the eventfd.
    fn signal(&self, event: &OwnedFd) -> bool {
        let mut request = Iocb {
            operation: IOCB_CMD_PREAD,
            file: self.dev_null.as_raw_fd().cast_unsigned(),
            flags: IOCB_FLAG_RESFD,
            resfd: event.as_raw_fd().cast_unsigned(),
            ..Iocb::default()
        };
        let count: libc::c_long = 1;
        for _ in 0..ATTEMPTS {
            let mut list = [&raw mut request];
            // SAFETY: the list has one pointer, to a request that outlives the call; only the call
            // uses both. The request names no buffer, as it reads no bytes.
            let submitted = unsafe {
                libc::syscall(libc::SYS_io_submit, self.context, count, list.as_mut_ptr())
            };
            if submitted == 1 {
                return true;
            }
            if io::Error::last_os_error().raw_os_error() != Some(libc::EAGAIN) {
                return false;
            }
            self.reap();
        }
        false
    }

    /// Discards completions; their results are not needed.
    fn reap(&self) {
        let mut completions = [IoEvent::default(); MAX_EVENTS as usize];
        let no_wait = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let min_events: libc::c_long = 0;
        // SAFETY: the call writes at most `MAX_EVENTS` completions where its fourth argument
        // points, which has room for that many. It also reads a time. Both outlive the call, and
        // any bytes are a valid `IoEvent`.
        let _ = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                min_events,
                MAX_EVENTS,
                completions.as_mut_ptr(),
                &raw const no_wait,
            )
        };
    }
}

/// Creates the AIO context, before the process loses the right to open files.
pub(crate) fn prepare() {
    let _ = AioContext::get();
}

/// Signals an eventfd; a full counter counts as signalled. Does not block, except that a hostile
/// client can block the fallback for hosts without asynchronous I/O.
pub(crate) fn signal(event: &OwnedFd) {
    if !AioContext::get().is_some_and(|aio| aio.signal(event)) {
        signal_with_write(event);
    }
}

/// Fallback if asynchronous I/O is missing or fails. A hostile client can make this block.
fn signal_with_write(event: &OwnedFd) {
    let mut ready = [PollFd::new(event, PollFlags::OUT)];
    if matches!(poll(&mut ready, Some(&Timespec::default())), Ok(1)) {
        // On an error the client has closed or replaced the eventfd, so nothing waits for it.
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    }
}

/// Returns true if `fd` is an eventfd. Any other file, such as a pipe, could block a signal or grow
/// without limit.
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

    /// Several threads signal more often than the kernel holds completions.
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
            signal_with_write(&event);
        }
        assert_eq!(count(&event), EACH);
    }

    #[test]
    fn asynchronous_io_is_used_if_the_host_has_it() {
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        match AioContext::get() {
            Some(aio) => assert!(aio.signal(&event) && count(&event) == 1),
            None => println!("not tried: this host has no asynchronous I/O"),
        }
    }
}
