//! System calls that each of the process's two threads may make, as seccomp programs.
//!
//! | thread | permitted |
//! |---|---|
//! | device | read and write its socket; read, write and flush its image; read the clock; exit |
//! | mapping | ask for work; map and unmap, each checked by the supervisor first; exit |
//!
//! Any other call kills the process. The filters compare register arguments only, so nothing that
//! they check lies in memory that the process could change after the check.

use std::os::fd::RawFd;

use libc::{SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_USER_NOTIF, sock_filter};

use crate::grants::sys::ASK;
use crate::seccomp::{Rule, program};

const fn allow_on(number: libc::c_long, descriptor: RawFd) -> Rule {
    Rule::allow(number).with(0, descriptor.cast_unsigned())
}

const fn show(number: libc::c_long) -> Rule {
    Rule::act(number, SECCOMP_RET_USER_NOTIF)
}

/// Filter of the device's thread, which may use these two descriptors.
pub(super) fn for_the_device(socket: RawFd, image: RawFd) -> Vec<sock_filter> {
    let rules = [
        allow_on(libc::SYS_read, socket),
        allow_on(libc::SYS_write, socket),
        allow_on(libc::SYS_pread64, image),
        allow_on(libc::SYS_pwrite64, image),
        allow_on(libc::SYS_fdatasync, image),
        // Needed on hosts whose vDSO cannot read the clock.
        Rule::allow(libc::SYS_clock_gettime),
        // Return from the fault handler.
        Rule::allow(libc::SYS_rt_sigreturn),
        Rule::allow(libc::SYS_exit_group),
        // The heap cannot grow: larger allocations fail.
        Rule::act(
            libc::SYS_brk,
            SECCOMP_RET_ERRNO | libc::ENOMEM.cast_unsigned(),
        ),
    ];
    program(&rules, SECCOMP_RET_KILL_PROCESS)
}

/// Filter of the mapping thread.
pub(super) fn for_the_mapper() -> Vec<sock_filter> {
    let rules = [
        show(ASK),
        show(libc::SYS_mmap),
        show(libc::SYS_munmap),
        Rule::allow(libc::SYS_exit_group),
    ];
    program(&rules, SECCOMP_RET_KILL_PROCESS)
}
