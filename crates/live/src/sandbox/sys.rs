//! The system calls of confinement that no safe crate here offers: filters that notify, the
//! supervisor's side of them, and what the mapping thread does.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use libc::{
    SECCOMP_ADDFD_FLAG_SETFD, SECCOMP_FILTER_FLAG_NEW_LISTENER, SECCOMP_IOCTL_NOTIF_ADDFD,
    SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND, SECCOMP_IOCTL_NOTIF_SET_FLAGS,
    SECCOMP_SET_MODE_FILTER, SECCOMP_USER_NOTIF_FLAG_CONTINUE, seccomp_notif, seccomp_notif_addfd,
    seccomp_notif_resp, sock_filter, sock_fprog,
};

use super::call::Call;

/// A system call that no kernel has: by it the mapping thread says what became of its last work,
/// and asks for more.
pub(super) const ASK: libc::c_long = 0x3000_0001;

/// A system call that waits for the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SeccompNotification {
    /// What to answer under.
    pub(super) id: u64,
    /// Who waits.
    pub(super) thread: u32,
    /// What it wants: registers, which nobody can change while it waits.
    pub(super) call: Call,
}

/// Puts the calling thread under `filter`, for good. With `listen`, the supervisor's end comes
/// back.
pub(crate) fn confine(filter: &[sock_filter], listen: bool) -> io::Result<Option<OwnedFd>> {
    let program = sock_fprog {
        len: u16::try_from(filter.len()).map_err(io::Error::other)?,
        filter: filter.as_ptr().cast_mut(),
    };
    let flags = if listen {
        SECCOMP_FILTER_FLAG_NEW_LISTENER
    } else {
        0
    };
    // SAFETY: `program` and the filter that it points to live through the call, which only reads
    // them.
    let got = unsafe { libc::syscall(libc::SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    let number = RawFd::try_from(got).map_err(io::Error::other)?;
    // SAFETY: with this flag the call returns a descriptor that is new and nobody else's.
    Ok(listen.then(|| unsafe { OwnedFd::from_raw_fd(number) }))
}

/// Whoever waits is woken on this processor at once. Older kernels know nothing of it.
pub(super) fn set_sync_wakeup(listener: &OwnedFd) {
    const SYNC_WAKE_UP: libc::c_ulong = 1;
    // SAFETY: this request takes a number.
    let _ = unsafe {
        libc::ioctl(
            listener.as_raw_fd(),
            SECCOMP_IOCTL_NOTIF_SET_FLAGS,
            SYNC_WAKE_UP,
        )
    };
}

/// The next call that waits; waits for one.
pub(super) fn receive(listener: &OwnedFd) -> io::Result<SeccompNotification> {
    // SAFETY: it consists of integers, for which zero is a value; the kernel wants zeroes.
    let mut notice: seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one such structure, which is ours.
    check(unsafe {
        libc::ioctl(
            listener.as_raw_fd(),
            SECCOMP_IOCTL_NOTIF_RECV,
            &raw mut notice,
        )
    })?;
    Ok(SeccompNotification {
        id: notice.id,
        thread: notice.pid,
        call: Call {
            number: notice.data.nr.into(),
            arguments: notice.data.args,
        },
    })
}

/// Lets a call return `value` without being made.
pub(super) fn return_value(listener: &OwnedFd, id: u64, value: i64) -> io::Result<()> {
    respond(listener, id, value, 0)
}

/// Has a call made as it stands.
pub(super) fn continue_call(listener: &OwnedFd, id: u64) -> io::Result<()> {
    respond(listener, id, 0, SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32)
}

fn respond(listener: &OwnedFd, id: u64, val: i64, flags: u32) -> io::Result<()> {
    let mut response = seccomp_notif_resp {
        id,
        val,
        error: 0,
        flags,
    };
    // SAFETY: the kernel reads one such structure.
    check(unsafe {
        libc::ioctl(
            listener.as_raw_fd(),
            SECCOMP_IOCTL_NOTIF_SEND,
            &raw mut response,
        )
    })
}

/// Gives the process whose call waits `file` under `number`, in place of what it had there.
pub(super) fn install_fd(
    listener: &OwnedFd,
    id: u64,
    file: BorrowedFd<'_>,
    number: u32,
) -> io::Result<()> {
    let mut gift = seccomp_notif_addfd {
        id,
        flags: SECCOMP_ADDFD_FLAG_SETFD as u32,
        srcfd: file.as_raw_fd().cast_unsigned(),
        newfd: number,
        newfd_flags: libc::O_CLOEXEC.cast_unsigned(),
    };
    // SAFETY: the kernel reads one such structure; the descriptor in it is open.
    check(unsafe {
        libc::ioctl(
            listener.as_raw_fd(),
            SECCOMP_IOCTL_NOTIF_ADDFD,
            &raw mut gift,
        )
    })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Says that `done` calls of the last work were made, and that the next one failed with `errno`
/// unless that is 0; how many are to be made now. Negative where nobody listens any more.
pub fn request_calls(done: u64, errno: u64) -> i64 {
    // SAFETY: no kernel has this call; its answer is the supervisor's, or an error.
    unsafe { libc::syscall(ASK, done, errno) }
}

/// Makes a call that the supervisor has written down; its error number, or 0.
///
/// # Safety
/// It must map or unmap memory that nothing of Rust's lies in: the windows (`windows.rs`).
pub unsafe fn make(call: &Call) -> u64 {
    let [a, b, c, d, e, f] = call.arguments;
    // SAFETY: the caller's promise.
    let result = unsafe { libc::syscall(call.number, a, b, c, d, e, f) };
    if result != -1 {
        return 0;
    }
    // SAFETY: it is this thread's own.
    let errno = unsafe { *libc::__errno_location() };
    u64::from(errno.cast_unsigned())
}

/// A write beyond the limit of a file's size fails, and does not end the process.
pub(crate) fn ignore_file_size_signal() -> io::Result<()> {
    // SAFETY: it installs no handler; the signal is thrown away.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if before == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Closes all descriptors but these.
pub(super) fn close_all_but(keep: &[RawFd]) -> io::Result<()> {
    let mut keep: Vec<u32> = keep.iter().map(|fd| fd.cast_unsigned()).collect();
    keep.sort_unstable();
    let mut first = 0;
    for kept in keep {
        if first < kept {
            close_range(first, kept.saturating_sub(1))?;
        }
        first = kept.saturating_add(1);
    }
    close_range(first, u32::MAX)
}

fn close_range(first: u32, last: u32) -> io::Result<()> {
    // SAFETY: the process is at its beginning: it uses no descriptor but those that are kept.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Makes the heap at least `bytes` larger and keeps it so: allocations within that ask nothing of
/// the kernel.
pub(super) fn keep_heap(bytes: usize) {
    let top = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    for (what, value) in [
        (libc::M_MMAP_MAX, 0),
        (libc::M_ARENA_MAX, 1),
        (libc::M_TOP_PAD, 0),
        (libc::M_TRIM_THRESHOLD, libc::c_int::MAX),
    ] {
        // SAFETY: it sets a number; no other thread of this process allocates yet.
        unsafe { libc::mallopt(what, value) };
    }
    drop(std::hint::black_box(Vec::<u8>::with_capacity(
        usize::try_from(top).unwrap_or(0),
    )));
}

/// Ends the process. What it was writing is lost.
pub fn end(code: i32) -> ! {
    // SAFETY: nothing of ours runs afterwards.
    unsafe { libc::_exit(code) }
}
