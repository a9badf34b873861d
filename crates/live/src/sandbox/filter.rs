//! What each of the process's two threads may ask of the kernel, as programs for seccomp.
//!
//! | thread | may |
//! |---|---|
//! | the device's | read and write its socket, read, write and flush its image, ask the time, end |
//! | the mapping one | ask for work; map and unmap, each of which the supervisor sees first; end |
//!
//! Everything else ends the process. Arguments are compared where they are registers; nothing here
//! depends on memory that the process could change meanwhile.

use std::os::fd::RawFd;

use libc::{SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_USER_NOTIF, sock_filter};

use super::sys::ASK;
use crate::seccomp::{Rule, program};

const fn allow_on(number: libc::c_long, descriptor: RawFd) -> Rule {
    Rule::allow(number).with(0, descriptor.cast_unsigned())
}

const fn show(number: libc::c_long) -> Rule {
    Rule::act(number, SECCOMP_RET_USER_NOTIF)
}

/// The device's thread, with these descriptors.
pub(super) fn for_the_device(socket: RawFd, image: RawFd) -> Vec<sock_filter> {
    let rules = [
        allow_on(libc::SYS_read, socket),
        allow_on(libc::SYS_write, socket),
        allow_on(libc::SYS_pread64, image),
        allow_on(libc::SYS_pwrite64, image),
        allow_on(libc::SYS_fdatasync, image),
        // Where the clock cannot be read without the kernel.
        Rule::allow(libc::SYS_clock_gettime),
        // The end of the handler of faults.
        Rule::allow(libc::SYS_rt_sigreturn),
        Rule::allow(libc::SYS_exit_group),
        // The heap is as large as it gets: an allocation that asks for more fails.
        Rule::act(
            libc::SYS_brk,
            SECCOMP_RET_ERRNO | libc::ENOMEM.cast_unsigned(),
        ),
    ];
    program(&rules, SECCOMP_RET_KILL_PROCESS)
}

/// The mapping thread.
pub(super) fn for_the_mapper() -> Vec<sock_filter> {
    let rules = [
        show(ASK),
        show(libc::SYS_mmap),
        show(libc::SYS_munmap),
        Rule::allow(libc::SYS_exit_group),
    ];
    program(&rules, SECCOMP_RET_KILL_PROCESS)
}
