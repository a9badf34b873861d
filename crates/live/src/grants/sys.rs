//! System calls for confinement that no safe crate here offers: filters with user notification, the
//! supervisor's responses, and the calls of the mapping thread.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use libc::{
    SECCOMP_ADDFD_FLAG_SETFD, SECCOMP_FILTER_FLAG_NEW_LISTENER, SECCOMP_IOCTL_NOTIF_ADDFD,
    SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND, SECCOMP_IOCTL_NOTIF_SET_FLAGS,
    SECCOMP_SET_MODE_FILTER, SECCOMP_USER_NOTIF_FLAG_CONTINUE, seccomp_notif, seccomp_notif_addfd,
    seccomp_notif_resp, sock_filter, sock_fprog,
};
use rustix::mm::{MlockFlags, mlock_with};

use super::call::Call;

/// A system call number that Linux does not use. The mapping thread makes it to report the result
/// of its last batch and to ask for the next one.
pub(crate) const ASK: libc::c_long = 0x3000_0001;

/// A system call that waits for the supervisor's response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeccompNotification {
    /// Notification ID for the response.
    pub(crate) id: u64,
    /// ID of the waiting thread.
    pub(crate) thread: u32,
    /// The requested call. Its registers cannot change while the thread waits.
    pub(crate) call: Call,
}

/// Installs `filter` on the calling thread permanently. Returns the notification listener if
/// `listen` is set.
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
    // SAFETY: `program` and its filter live through the call, which only reads them.
    let got = unsafe { libc::syscall(libc::SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    let number = RawFd::try_from(got).map_err(io::Error::other)?;
    // SAFETY: with this flag the call returns a new descriptor that nothing else owns.
    Ok(listen.then(|| unsafe { OwnedFd::from_raw_fd(number) }))
}

/// Asks the kernel to wake waiting threads on the current CPU
/// (`SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP`). Older kernels reject the request; the error is ignored.
pub(crate) fn set_sync_wakeup(listener: &OwnedFd) {
    const SYNC_WAKE_UP: libc::c_ulong = 1;
    // SAFETY: the argument of this request is an integer.
    let _ = unsafe {
        libc::ioctl(
            listener.as_raw_fd(),
            SECCOMP_IOCTL_NOTIF_SET_FLAGS,
            SYNC_WAKE_UP,
        )
    };
}

/// Waits for the next notification and returns it.
pub(crate) fn receive(listener: &OwnedFd) -> io::Result<SeccompNotification> {
    // SAFETY: the structure consists of integers, for which zero is valid; the kernel requires
    // zeroes.
    let mut notice: seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one such structure, which this function owns.
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

/// Completes a call with `value` without executing it.
pub(crate) fn return_value(listener: &OwnedFd, id: u64, value: i64) -> io::Result<()> {
    respond(listener, id, value, 0)
}

/// Lets the kernel execute a call unchanged.
pub(crate) fn continue_call(listener: &OwnedFd, id: u64) -> io::Result<()> {
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

/// Installs `file` as descriptor `number` in the process whose call waits, replacing any file
/// there.
pub(crate) fn install_fd(
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

/// Reports that `done` calls of the last batch completed and that the next one failed with `errno`,
/// if that is not 0. Returns the number of calls to make now; negative if the supervisor has gone.
pub fn request_calls(done: u64, errno: u64) -> i64 {
    // SAFETY: Linux does not implement this call; it returns the supervisor's answer or an error.
    unsafe { libc::syscall(ASK, done, errno) }
}

/// Makes a call of the batch. Returns its error number, or 0.
///
/// # Safety
/// The call must map or unmap memory that holds no Rust object: the windows (`windows.rs`).
pub unsafe fn make(call: &Call) -> u64 {
    let [a, b, c, d, e, f] = call.arguments;
    // SAFETY: the caller upholds the contract of this function.
    let result = unsafe { libc::syscall(call.number, a, b, c, d, e, f) };
    if result != -1 {
        return 0;
    }
    // SAFETY: the location belongs to this thread.
    let errno = unsafe { *libc::__errno_location() };
    u64::from(errno.cast_unsigned())
}

/// Ignores SIGXFSZ: a write beyond the file-size limit then fails with EFBIG and does not kill the
/// process.
pub(crate) fn ignore_file_size_signal() -> io::Result<()> {
    // SAFETY: `SIG_IGN` installs no handler.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if before == libc::SIG_ERR {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Keeps the pages of a mapping in memory from their first access on.
pub(crate) fn lock_on_access(start: u64, bytes: u64) -> io::Result<()> {
    let at = usize::try_from(start).map_err(io::Error::other)?;
    let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
    let at = std::ptr::without_provenance_mut(at);
    // SAFETY: the kernel checks the range, and locking has no effect that a program can observe.
    unsafe { mlock_with(at, bytes, MlockFlags::ONFAULT) }?;
    Ok(())
}

/// Closes all descriptors except those in `keep`.
pub(crate) fn close_all_but(keep: &[RawFd]) -> io::Result<()> {
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
    // SAFETY: the process is starting and uses no descriptor outside `keep`.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Enlarges the heap by at least `bytes` and prevents trimming. Allocations within it then make no
/// system calls.
pub(crate) fn keep_heap(bytes: usize) {
    let top = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    for (what, value) in [
        (libc::M_MMAP_MAX, 0),
        (libc::M_ARENA_MAX, 1),
        (libc::M_TOP_PAD, 0),
        (libc::M_TRIM_THRESHOLD, libc::c_int::MAX),
    ] {
        // SAFETY: it sets a parameter; no other thread of this process allocates yet.
        unsafe { libc::mallopt(what, value) };
    }
    drop(std::hint::black_box(Vec::<u8>::with_capacity(
        usize::try_from(top).unwrap_or(0),
    )));
}

/// Exits the process at once, without flushing buffers.
pub fn end(code: i32) -> ! {
    // SAFETY: none of this program's code runs afterwards.
    unsafe { libc::_exit(code) }
}
