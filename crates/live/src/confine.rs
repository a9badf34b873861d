//! What the daemon gives up once its sockets, files and devices are open.
//!
//! Each thread that serves somebody confines itself: it has no capabilities, can gain none, and
//! asks the kernel for nothing but what serving takes. It opens no file, starts no process, names
//! no socket, signals no other process, and has no memory that can be executed but the program's. A
//! call that is not in the list fails with `EPERM`: the library that makes a new one goes on as it
//! does on a kernel without it, and a thread that was taken over gains nothing by the difference.

use std::io;

use libc::{SECCOMP_RET_ERRNO, sock_filter};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getpid, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::CapabilitySet;

use crate::event;
use crate::privileges;
use crate::sandbox::sys;
use crate::seccomp::{Rule, program};

/// Files of the daemon's own, a log for example, may become so long.
const FILE_SIZE_LIMIT: u64 = 1 << 30;
/// A limit of 1 byte keeps core dumps from files and from programs that take them (core(5)).
const CORE_BYTES: u64 = 1;

const fn allow(number: libc::c_long) -> Rule {
    Rule::allow(number)
}

const fn fcntl(command: libc::c_int) -> Rule {
    allow(libc::SYS_fcntl).with(1, command.cast_unsigned())
}

const fn ioctl(request: libc::Ioctl) -> Rule {
    // The kernel takes no more of it.
    allow(libc::SYS_ioctl).with(1, request as u32)
}

/// Calls of a thread that serves.
const SERVING: &[Rule] = &[
    // Descriptors that are open.
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
    // Of the others, some send signals to any process of the user, and some type into a terminal.
    ioctl(libc::FIONBIO),
    ioctl(libc::SECCOMP_IOCTL_NOTIF_RECV),
    ioctl(libc::SECCOMP_IOCTL_NOTIF_SEND),
    ioctl(libc::SECCOMP_IOCTL_NOTIF_ADDFD),
    allow(libc::SYS_poll),
    allow(libc::SYS_ppoll),
    // An eventfd is known by the name of its descriptor.
    allow(libc::SYS_readlink),
    allow(libc::SYS_readlinkat),
    // Interrupts: see event.rs.
    allow(libc::SYS_io_submit),
    allow(libc::SYS_io_getevents),
    allow(libc::SYS_eventfd2),
    allow(libc::SYS_timerfd_create),
    allow(libc::SYS_timerfd_settime),
    // Clients. A link's datagrams name the other side.
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
    // Memory: the guest's and the heap. None of it is executed.
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
    // Threads of this process, such as a vhost-user session's. The flags of the newer call lie in
    // memory: libraries use the older one where that is missing.
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
    // Calls that cannot fail, and whose callers do not look: user and processor.
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
    // Time and chance.
    allow(libc::SYS_clock_gettime),
    allow(libc::SYS_clock_nanosleep),
    allow(libc::SYS_nanosleep),
    allow(libc::SYS_getrandom),
    // The end of a device's process.
    allow(libc::SYS_pidfd_send_signal),
    allow(libc::SYS_waitid),
    allow(libc::SYS_wait4),
];

/// What the first thread needs beside that: it waits for a signal, and removes the sockets.
const ENDING: &[Rule] = &[
    allow(libc::SYS_pipe2),
    allow(libc::SYS_unlink),
    allow(libc::SYS_unlinkat),
];

const EXECUTABLE: u32 = libc::PROT_EXEC.cast_unsigned();

fn filter(more: &[Rule]) -> Vec<sock_filter> {
    // Signals reach this process alone: the one that aborts it, for example.
    let own = allow(libc::SYS_tgkill).with(0, getpid().as_raw_nonzero().get().cast_unsigned());
    let rules = [SERVING, more, &[own]].concat();
    program(&rules, SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned())
}

/// Confines the calling thread, which serves somebody, and the threads that it starts. They keep
/// those capabilities of `kept` that the thread has.
///
/// # Errors
/// The kernel refuses: such a thread must not serve.
pub(crate) fn serving_thread(kept: CapabilitySet) -> io::Result<()> {
    privileges::drop_all_but(kept)?;
    sys::confine(&filter(&[]), false).map(drop)
}

/// Takes the privileges of the calling thread, and of programs that it starts: for a process that
/// still has one to start.
///
/// # Errors
/// The kernel refuses.
pub fn drop_privileges() -> io::Result<()> {
    privileges::drop_all()
}

/// Confines the first thread of a process whose devices are served, and bounds what the process can
/// do: other processes of the user cannot look into it, it leaves no core dump, and no file grows
/// beyond `file_bytes` or 1 GiB. It can start no program any more.
///
/// # Errors
/// The kernel refuses.
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

/// Looks at what the kernel tells once, before the process may ask no more.
pub(crate) fn prepare() {
    event::prepare();
    let _ = rustix::param::page_size();
}

/// Lets this process lock as much memory as a guest has. Returns the capability that its threads
/// have to keep for that: none if the process can raise its limit (`CAP_SYS_RESOURCE`), which a
/// container may not let it.
pub(crate) fn allow_locking() -> CapabilitySet {
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    // Without either privilege the limit stays, and the map of a page beyond it is refused.
    match setrlimit(Resource::Memlock, unlimited) {
        Ok(()) => CapabilitySet::empty(),
        Err(_) => CapabilitySet::IPC_LOCK,
    }
}

#[cfg(test)]
mod tests;
