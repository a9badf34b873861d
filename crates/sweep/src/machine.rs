//! The machine that runs a task.

use std::fs;

use crate::digest;

/// The machine that runs a task. Cycles of different machines do not compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// 16 hexadecimal digits: a digest of the machine id, the host name and the CPU. It does not
    /// reveal them.
    pub id: String,
    /// Model name of the CPU.
    pub cpu: String,
    /// Instruction set, as in `std::env::consts::ARCH`.
    pub arch: &'static str,
    /// `release` or `debug`.
    pub build: &'static str,
}

/// Number of digits of an id.
const DIGITS: usize = 16;

impl Machine {
    /// Returns this machine. Reads `/etc/machine-id`, `/proc/sys/kernel/hostname` and
    /// `/proc/cpuinfo`; a file that is missing counts as empty.
    pub fn this() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let info = read("/proc/cpuinfo");
        let cpu = info.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == "model name").then(|| value.trim().to_owned())
        });
        let cpu = cpu.unwrap_or_else(|| "unknown".into());
        let host = read("/proc/sys/kernel/hostname");
        let mut id = digest::of_bytes(
            format!(
                "ringfence machine\n{}\n{host}\n{cpu}",
                read("/etc/machine-id")
            )
            .as_bytes(),
        );
        id.truncate(DIGITS);
        Self {
            id,
            cpu,
            arch: std::env::consts::ARCH,
            build: if cfg!(debug_assertions) {
                "debug"
            } else {
                "release"
            },
        }
    }
}
