//! Tests of the limits on a confined thread.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;

use super::*;

/// Linux's value from `asm-generic/fcntl.h`.
const F_SETSIG: libc::c_int = 10;
/// Linux's value from `asm-generic/sockios.h`.
const FIOSETOWN: libc::c_ulong = 0x8901;

fn confined<T: Send + 'static>(does: impl FnOnce() -> T + Send + 'static) -> T {
    let does = || {
        serving_thread(prepare(), CapabilitySet::empty()).unwrap();
        does()
    };
    thread::spawn(does).join().unwrap()
}

#[test]
fn a_serving_thread_opens_starts_and_names_nothing() {
    let errors = confined(|| {
        let connected = UnixStream::connect("/nowhere");
        [
            ("open", File::open("/etc/passwd").err()),
            ("create", File::create("/tmp/rf-confined").err()),
            ("program", Command::new("/bin/true").spawn().err()),
            ("connect", connected.err()),
            ("remove", fs::remove_file("/tmp/rf-confined").err()),
            (
                "chmod",
                rustix::fs::chmod("/tmp", rustix::fs::Mode::empty())
                    .err()
                    .map(Into::into),
            ),
        ]
    });
    for (what, error) in errors {
        let error: io::Error = error.unwrap_or_else(|| panic!("{what} succeeds"));
        assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{what}");
    }
}

#[test]
fn a_serving_thread_serves() {
    confined(|| {
        let (mut ours, mut theirs) = (
            rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap(),
            vec![0_u8; 4 << 20],
        );
        theirs.fill(1);
        rustix::io::write(&mut ours, &1u64.to_ne_bytes()).unwrap();
        // A new thread inherits the confinement.
        let opened = thread::spawn(|| File::open("/etc/passwd").err()).join();
        assert!(opened.unwrap().is_some());
    });
}

/// Returns the error code of a raw call if it failed.
fn error_of(result: libc::c_long) -> Option<i32> {
    (result < 0).then(|| io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

#[test]
fn a_serving_thread_signals_no_other_process() {
    let mut other = Command::new("/bin/sleep").arg("600").spawn().unwrap();
    let number = i32::try_from(other.id()).unwrap();
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let errors = confined(move || {
        let socket = ours.as_raw_fd();
        let mut owner = number;
        // SAFETY: none of these calls writes to the memory of this process.
        unsafe {
            [
                error_of(libc::syscall(
                    libc::SYS_tgkill,
                    number,
                    number,
                    libc::SIGKILL,
                )),
                error_of(libc::fcntl(socket, libc::F_SETOWN, number).into()),
                error_of(libc::fcntl(socket, F_SETSIG, libc::SIGKILL).into()),
                error_of(libc::ioctl(socket, FIOSETOWN, &raw mut owner).into()),
            ]
        }
    });
    let ended = other.try_wait().unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(errors, [Some(libc::EPERM); 4]);
    assert_eq!(ended, None);
}

#[test]
fn a_serving_thread_types_nothing_into_its_terminal() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let errors = confined(move || {
        let letter = b'x';
        let socket = ours.as_raw_fd();
        // SAFETY: the call reads one byte.
        let typed = unsafe { libc::ioctl(socket, libc::TIOCSTI, &raw const letter) };
        let nonblocking = theirs.set_nonblocking(true).err();
        (error_of(typed.into()), nonblocking.is_none())
    });
    // The kernel itself returns ENOTTY for a socket, so EPERM comes from the filter.
    assert_eq!(errors, (Some(libc::EPERM), true));
}

#[test]
fn a_serving_thread_starts_threads_and_no_processes() {
    let errors = confined(|| {
        let (clone, mut arguments) = (libc::SIGCHLD, [0_u64; 11]);
        arguments[4] = libc::SIGCHLD as u64;
        // SAFETY: a process that starts here ends at once.
        let errors = unsafe {
            [
                error_of(alone(libc::syscall(libc::SYS_clone, clone, 0, 0, 0, 0))),
                error_of(alone(libc::syscall(
                    libc::SYS_clone3,
                    arguments.as_ptr(),
                    size_of_val(&arguments),
                ))),
            ]
        };
        let thread = thread::spawn(|| 7).join().unwrap();
        (errors, thread)
    });
    assert_eq!(errors, ([Some(libc::EPERM), Some(libc::ENOSYS)], 7));
}

/// Ends a process that was just started; returns the call's result in the parent.
fn alone(got: libc::c_long) -> libc::c_long {
    if got == 0 {
        sys::end(0);
    }
    if let Ok(child @ 1..) = i32::try_from(got) {
        // SAFETY: the call writes no status.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    }
    got
}
