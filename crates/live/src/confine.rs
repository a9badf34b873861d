//! Privileges that the daemon drops once its sockets, files and devices are open.
//!
//! Each thread that serves a client confines itself: it has no capabilities, can gain none, and can
//! make only the system calls that serving needs. It cannot open a file, start a process or bind a
//! socket to a name. It can signal the sandboxed process of its device, whose descriptor is open
//! already, and no other process. Only the program's own code is executable. A call
//! outside the list fails with `EPERM`, so a library that tries a new system call falls back as on
//! an old kernel. An attacker who controls the thread gains nothing from that error code.

use std::io;

use libc::{SECCOMP_RET_ERRNO, sock_filter};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getpid, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::CapabilitySet;

use crate::event;
use crate::grants::sys;
use crate::privileges;
use crate::seccomp::{Rule, program};

/// Size limit of the daemon's own files, such as a log.
const FILE_SIZE_LIMIT: u64 = 1 << 30;
/// Core dump limit. 1 byte prevents core files, and unlike 0 also stops pipes to a core handler
/// (core(5)).
const CORE_BYTES: u64 = 1;

const fn allow(number: libc::c_long) -> Rule {
    Rule::allow(number)
}

const fn fcntl(command: libc::c_int) -> Rule {
    allow(libc::SYS_fcntl).with(1, command.cast_unsigned())
}

const fn ioctl(request: libc::Ioctl) -> Rule {
    // The kernel uses only the lower 32 bits.
    allow(libc::SYS_ioctl).with(1, request as u32)
}

const EXECUTABLE: u32 = libc::PROT_EXEC.cast_unsigned();

/// System calls of a serving thread.
const SERVING: &[Rule] = &[
    // Files that are already open.
    allow(libc::SYS_read),
    allow(libc::SYS_write),
    allow(libc::SYS_readv),
    allow(libc::SYS_writev),
    allow(libc::SYS_pread64),
    allow(libc::SYS_preadv2),
    allow(libc::SYS_pwrite64),
    allow(libc::SYS_lseek),
    allow(libc::SYS_close),
    allow(libc::SYS_fstat),
    allow(libc::SYS_fstatfs),
    allow(libc::SYS_newfstatat),
    allow(libc::SYS_statx),
    fcntl(libc::F_DUPFD_CLOEXEC),
    fcntl(libc::F_GETFD),
    fcntl(libc::F_GETFL),
    fcntl(libc::F_GET_SEALS),
    fcntl(libc::F_ADD_SEALS),
    allow(libc::SYS_dup),
    allow(libc::SYS_fsync),
    allow(libc::SYS_fdatasync),
    allow(libc::SYS_ftruncate),
    allow(libc::SYS_fallocate),
    // Other requests could make a descriptor signal any process of the user, or type into a
    // terminal.
    ioctl(libc::FIONBIO),
    ioctl(libc::SECCOMP_IOCTL_NOTIF_RECV),
    ioctl(libc::SECCOMP_IOCTL_NOTIF_SEND),
    ioctl(libc::SECCOMP_IOCTL_NOTIF_ADDFD),
    // AArch64 and RISC-V have neither `poll`, `readlink` nor `unlink`, only their successors.
    #[cfg(target_arch = "x86_64")]
    allow(libc::SYS_poll),
    allow(libc::SYS_ppoll),
    // `is_eventfd` reads the name of a descriptor.
    #[cfg(target_arch = "x86_64")]
    allow(libc::SYS_readlink),
    allow(libc::SYS_readlinkat),
    // Interrupts: see event.rs.
    allow(libc::SYS_io_submit),
    allow(libc::SYS_io_getevents),
    allow(libc::SYS_eventfd2),
    allow(libc::SYS_timerfd_create),
    allow(libc::SYS_timerfd_settime),
    // Clients. Datagrams of a link carry the peer's address.
    allow(libc::SYS_accept4),
    allow(libc::SYS_sendto),
    allow(libc::SYS_sendmsg),
    allow(libc::SYS_recvfrom),
    allow(libc::SYS_recvmsg),
    allow(libc::SYS_getsockopt),
    allow(libc::SYS_setsockopt),
    allow(libc::SYS_getsockname),
    allow(libc::SYS_getpeername),
    allow(libc::SYS_shutdown),
    // Guest memory and the heap, never executable.
    allow(libc::SYS_mmap).without(2, EXECUTABLE),
    allow(libc::SYS_mprotect).without(2, EXECUTABLE),
    allow(libc::SYS_munmap),
    allow(libc::SYS_mremap),
    allow(libc::SYS_madvise),
    allow(libc::SYS_brk),
    allow(libc::SYS_mlock),
    allow(libc::SYS_munlock),
    allow(libc::SYS_memfd_create),
    allow(libc::SYS_membarrier),
    // Threads of this process, such as those of a vhost-user session. clone3 takes its flags from
    // memory, which a filter cannot read; libraries fall back to clone on `ENOSYS`.
    allow(libc::SYS_clone).having(0, libc::CLONE_THREAD.cast_unsigned()),
    Rule::act(
        libc::SYS_clone3,
        SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned(),
    ),
    allow(libc::SYS_futex),
    allow(libc::SYS_set_robust_list),
    allow(libc::SYS_rseq),
    allow(libc::SYS_gettid),
    allow(libc::SYS_getpid),
    // Calls that never fail, so callers do not check for errors.
    allow(libc::SYS_getuid),
    allow(libc::SYS_geteuid),
    allow(libc::SYS_getgid),
    allow(libc::SYS_getegid),
    allow(libc::SYS_getcpu),
    allow(libc::SYS_sched_yield),
    allow(libc::SYS_sched_getaffinity),
    allow(libc::SYS_sigaltstack),
    allow(libc::SYS_rt_sigprocmask),
    allow(libc::SYS_rt_sigaction),
    allow(libc::SYS_rt_sigreturn),
    allow(libc::SYS_restart_syscall),
    allow(libc::SYS_prctl).with(0, libc::PR_SET_NAME.cast_unsigned()),
    allow(libc::SYS_exit),
    allow(libc::SYS_exit_group),
    // Clocks and random numbers.
    allow(libc::SYS_clock_gettime),
    allow(libc::SYS_clock_nanosleep),
    allow(libc::SYS_nanosleep),
    allow(libc::SYS_getrandom),
    // Ending a device's process.
    allow(libc::SYS_pidfd_send_signal),
    allow(libc::SYS_waitid),
    allow(libc::SYS_wait4),
];

/// Further system calls of the main thread: it waits for a signal and removes the sockets.
const ENDING: &[Rule] = &[
    allow(libc::SYS_pipe2),
    #[cfg(target_arch = "x86_64")]
    allow(libc::SYS_unlink),
    allow(libc::SYS_unlinkat),
];

fn filter(more: &[Rule]) -> Vec<sock_filter> {
    // The process can signal only itself, for example to abort.
    let own = allow(libc::SYS_tgkill).with(0, getpid().as_raw_nonzero().get().cast_unsigned());
    let rules = [SERVING, more, &[own]].concat();
    program(&rules, SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned())
}

/// Confines the calling thread, which serves a client, and the threads that it starts. They keep
/// those capabilities of `kept` that the thread has.
///
/// # Errors
/// The kernel refused; the thread must not serve.
pub(crate) fn serving_thread(_: Prepared, kept: CapabilitySet) -> io::Result<()> {
    privileges::drop_all_but(kept)?;
    sys::confine(&filter(&[]), false).map(drop)
}

/// Drops the privileges of the calling thread and of the programs that it starts. For a process
/// that still has to start a program.
///
/// # Errors
/// The kernel refused.
pub fn drop_privileges() -> io::Result<()> {
    privileges::drop_all()
}

/// Confines the main thread of a process that serves devices. Other processes of the user cannot
/// inspect the process, it leaves no core dump, and it cannot start programs. No file grows beyond
/// `file_bytes` or 1 GiB, whichever is larger.
///
/// # Errors
/// The kernel refused.
pub fn serving_process(file_bytes: u64) -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    sys::ignore_file_size_signal()?;
    limit(Resource::Fsize, file_bytes.max(FILE_SIZE_LIMIT))?;
    limit(Resource::Core, CORE_BYTES)?;
    privileges::drop_all()?;
    sys::confine(&filter(ENDING), false).map(drop)
}

fn limit(resource: Resource, most: u64) -> io::Result<()> {
    let now = getrlimit(resource);
    let at_most = |limit: Option<u64>| Some(limit.map_or(most, |limit| limit.min(most)));
    let limit = Rlimit {
        current: at_most(now.current),
        maximum: at_most(now.maximum),
    };
    Ok(setrlimit(resource, limit)?)
}

/// Proof of [`prepare`], without which no thread is confined.
#[derive(Clone, Copy)]
pub(crate) struct Prepared(());

/// Opens and reads what a confined thread could not open later, and caches it for the process.
pub(crate) fn prepare() -> Prepared {
    event::prepare();
    let _ = rustix::param::page_size();
    Prepared(())
}

/// Lets this process lock as much memory as a guest has. Returns the capability that its threads
/// must keep for that. The set is empty if the process can raise its limit (`CAP_SYS_RESOURCE`),
/// which a container may forbid.
pub(crate) fn allow_locking() -> CapabilitySet {
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    // Without either privilege the limit remains, and mapping a page beyond it fails.
    match setrlimit(Resource::Memlock, unlimited) {
        Ok(()) => CapabilitySet::empty(),
        Err(_) => CapabilitySet::IPC_LOCK,
    }
}

#[cfg(test)]
mod tests;
