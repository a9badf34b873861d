//! What each of the process's two threads may ask of the kernel, as programs for seccomp.
//!
//! | thread | may |
//! |---|---|
//! | the device's | read and write its socket, read, write and flush its image, ask the time, end |
//! | the mapping one | ask for work; map and unmap, each of which the supervisor sees first; end |
//!
//! Everything else ends the process. Arguments are compared where they are registers; nothing here depends on memory that the process could
//! change meanwhile.

use std::os::fd::RawFd;

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO,
    SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_USER_NOTIF, sock_filter,
};

use super::sys::ASK;

/// `AUDIT_ARCH_X86_64`: a system call of another architecture has other numbers.
const ARCH: u32 = 0xc000_003e;
/// Offsets in `struct seccomp_data`.
const AT_NUMBER: u32 = 0;
const AT_ARCH: u32 = 4;
/// The lower half, which is all that the kernel takes of a descriptor.
const AT_FIRST_ARGUMENT: u32 = 16;

/// A system call that does not end the process.
struct Rule {
    number: libc::c_long,
    /// With this first argument only.
    descriptor: Option<RawFd>,
    action: u32,
}

const fn allow(number: libc::c_long) -> Rule {
    Rule {
        number,
        descriptor: None,
        action: SECCOMP_RET_ALLOW,
    }
}

const fn allow_on(number: libc::c_long, descriptor: RawFd) -> Rule {
    Rule {
        number,
        descriptor: Some(descriptor),
        action: SECCOMP_RET_ALLOW,
    }
}

const fn show(number: libc::c_long) -> Rule {
    Rule {
        number,
        descriptor: None,
        action: SECCOMP_RET_USER_NOTIF,
    }
}

/// The device's thread, with these descriptors.
pub(super) fn for_the_device(socket: RawFd, image: RawFd) -> Vec<sock_filter> {
    program(&[
        allow_on(libc::SYS_read, socket),
        allow_on(libc::SYS_write, socket),
        allow_on(libc::SYS_pread64, image),
        allow_on(libc::SYS_pwrite64, image),
        allow_on(libc::SYS_fdatasync, image),
        // Where the clock cannot be read without the kernel.
        allow(libc::SYS_clock_gettime),
        // The end of the handler of faults.
        allow(libc::SYS_rt_sigreturn),
        allow(libc::SYS_exit_group),
        // The heap is as large as it gets: an allocation that asks for more fails.
        Rule {
            number: libc::SYS_brk,
            descriptor: None,
            action: SECCOMP_RET_ERRNO | libc::ENOMEM as u32,
        },
    ])
}

/// The mapping thread.
pub(super) fn for_the_mapper() -> Vec<sock_filter> {
    program(&[
        show(ASK),
        show(libc::SYS_mmap),
        show(libc::SYS_munmap),
        allow(libc::SYS_exit_group),
    ])
}

fn program(rules: &[Rule]) -> Vec<sock_filter> {
    let load = |offset| statement(BPF_LD | BPF_W | BPF_ABS, offset);
    let end = |action| statement(BPF_RET | BPF_K, action);
    let kill = || end(SECCOMP_RET_KILL_PROCESS);
    let mut program = vec![load(AT_ARCH), equal(ARCH, 1, 0), kill(), load(AT_NUMBER)];
    for rule in rules {
        let number = u32::try_from(rule.number).unwrap_or(u32::MAX);
        match rule.descriptor {
            None => program.extend([equal(number, 0, 1), end(rule.action)]),
            Some(descriptor) => program.extend([
                equal(number, 0, 4),
                load(AT_FIRST_ARGUMENT),
                equal(descriptor.cast_unsigned(), 0, 1),
                end(rule.action),
                kill(),
            ]),
        }
    }
    program.push(kill());
    program
}

fn statement(code: u32, k: u32) -> sock_filter {
    jump(code, k, 0, 0)
}

/// Skips `yes` instructions if the loaded word is `value`, else `no`.
fn equal(value: u32, yes: u8, no: u8) -> sock_filter {
    jump(BPF_JMP | BPF_JEQ | BPF_K, value, yes, no)
}

fn jump(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    // All codes are below 256.
    let code = (code & 0xffff) as u16;
    sock_filter { code, jt, jf, k }
}
