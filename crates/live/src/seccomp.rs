//! Filter programs for seccomp(2): the system calls that a thread may make.
//!
//! A rule compares registers only. It never reads memory behind a pointer argument, which another
//! thread could change after the check.

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, SECCOMP_RET_ALLOW,
    SECCOMP_RET_KILL_PROCESS, sock_filter,
};

/// `AUDIT_ARCH_X86_64` and the like (`linux/audit.h`): the architecture of this program. Other
/// architectures use other system call numbers.
const ARCH: u32 = if cfg!(target_arch = "x86_64") {
    0xc000_003e
} else if cfg!(target_arch = "aarch64") {
    0xc000_00b7
} else if cfg!(target_arch = "riscv64") {
    0xc000_00f3
} else {
    panic!("no value of this architecture")
};
/// Offsets in `struct seccomp_data`.
const AT_NUMBER: u32 = 0;
const AT_ARCH: u32 = 4;
const AT_ARGUMENTS: u32 = 16;

/// A system call and the filter's action for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    number: libc::c_long,
    condition: Condition,
    action: u32,
}

/// A condition on the lower 32 bits of an argument. The kernel uses only these for descriptors and
/// flags.
#[derive(Clone, Copy, Debug)]
enum Condition {
    Always,
    Equals { argument: u32, value: u32 },
    Lacks { argument: u32, bits: u32 },
    Has { argument: u32, bits: u32 },
}

impl Rule {
    /// Allows the call.
    pub(crate) const fn allow(number: libc::c_long) -> Self {
        Self::act(number, SECCOMP_RET_ALLOW)
    }

    /// Applies `action` to the call.
    pub(crate) const fn act(number: libc::c_long, action: u32) -> Self {
        Self {
            number,
            condition: Condition::Always,
            action,
        }
    }

    /// Restricts the rule to calls whose argument number `argument`, from 0, equals `value`.
    pub(crate) const fn with(mut self, argument: u32, value: u32) -> Self {
        self.condition = Condition::Equals { argument, value };
        self
    }

    /// Restricts the rule to calls whose argument number `argument`, from 0, has one of `bits` set.
    pub(crate) const fn having(mut self, argument: u32, bits: u32) -> Self {
        self.condition = Condition::Has { argument, bits };
        self
    }

    /// Restricts the rule to calls whose argument number `argument`, from 0, has none of `bits`
    /// set.
    pub(crate) const fn without(mut self, argument: u32, bits: u32) -> Self {
        self.condition = Condition::Lacks { argument, bits };
        self
    }
}

/// Builds the program for these rules. The first rule that matches a call decides. `otherwise` is
/// the action for every other call. A call of another architecture kills the process.
pub(crate) fn program(rules: &[Rule], otherwise: u32) -> Vec<sock_filter> {
    let load = |offset| statement(BPF_LD | BPF_W | BPF_ABS, offset);
    let end = |action| statement(BPF_RET | BPF_K, action);
    let argument = |argument: u32| load(AT_ARGUMENTS.saturating_add(argument.saturating_mul(8)));
    let mut program = vec![
        load(AT_ARCH),
        equal(ARCH, 1, 0),
        end(SECCOMP_RET_KILL_PROCESS),
        load(AT_NUMBER),
    ];
    for rule in rules {
        let number = u32::try_from(rule.number).unwrap_or(u32::MAX);
        let (at, fits) = match rule.condition {
            Condition::Always => {
                program.extend([equal(number, 0, 1), end(rule.action)]);
                continue;
            }
            Condition::Equals { argument, value } => (argument, equal(value, 0, 1)),
            Condition::Has { argument, bits } => {
                (argument, jump(BPF_JMP | BPF_JSET | BPF_K, bits, 0, 1))
            }
            Condition::Lacks { argument, bits } => {
                (argument, jump(BPF_JMP | BPF_JSET | BPF_K, bits, 1, 0))
            }
        };
        program.extend([
            equal(number, 0, 4),
            argument(at),
            fits,
            end(rule.action),
            // A later rule may match the call.
            load(AT_NUMBER),
        ]);
    }
    program.push(end(otherwise));
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
    // All opcodes are below 256.
    let code = (code & 0xffff) as u16;
    sock_filter { code, jt, jf, k }
}
