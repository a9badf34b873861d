//! Finds the QEMU that judges: the one that `QEMU_ROOT` names, or the one in the target directory.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;

const ROOT_VARIABLE: &str = "QEMU_ROOT";
/// Another directory with the Linux guests.
const LINUX_VARIABLE: &str = "QEMU_LINUX";
const CACHE: &str = "qemu-judge/root";

/// The unpacked packages of QEMU. Its programs run with their own dynamic loader and libraries.
#[derive(Debug, Clone)]
pub struct Emulator {
    root: PathBuf,
}

impl Emulator {
    /// Finds QEMU.
    ///
    /// # Errors
    /// QEMU was not fetched.
    pub fn find() -> anyhow::Result<Self> {
        let root = match std::env::var_os(ROOT_VARIABLE) {
            Some(root) => Some(root.into()),
            None => in_target_directory()?,
        };
        let emulator = root.map(|root| Self { root });
        let emulator = emulator.filter(|found| found.program("qemu-system-x86_64").is_file());
        emulator.with_context(|| {
            format!(
                "QEMU is missing: run `cargo run -p ringfence-guest-harness --example fetch_qemu`, \
                 or set {ROOT_VARIABLE} to a directory with the unpacked packages"
            )
        })
    }

    /// Returns a command that starts `program`, such as `qemu-system-x86_64`.
    pub(crate) fn command(&self, program: &str) -> Command {
        self.complete(Command::new(self.loader()), program)
    }

    /// Returns a command that starts `program` and ends it after `limit`.
    pub fn command_within(&self, limit: Duration, program: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", &limit.as_secs().to_string()]);
        command.arg(self.loader());
        self.complete(command, program)
    }

    /// Returns the directory with the Linux guest of an architecture, beside the root. It may not
    /// exist: `cargo run -p ringfence-guest-harness --example fetch_linux`.
    pub(crate) fn linux(&self, architecture: &str) -> PathBuf {
        let directory = std::env::var_os(LINUX_VARIABLE).map(PathBuf::from);
        let beside = || self.root.with_file_name("linux");
        directory.unwrap_or_else(beside).join(architecture)
    }

    fn loader(&self) -> PathBuf {
        self.root.join("usr/lib64/ld-linux-x86-64.so.2")
    }

    /// Adds the arguments of the dynamic loader, and directories of `program`.
    fn complete(&self, mut command: Command, program: &str) -> Command {
        let libraries = self.root.join("usr/lib/x86_64-linux-gnu");
        command.args([
            OsString::from("--library-path"),
            libraries.clone().into(),
            self.program(program).into(),
            "-L".into(),
            self.root.join("usr/share/qemu").into(),
            "-L".into(),
            self.root.join("usr/share/seabios").into(),
        ]);
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        command
    }

    fn program(&self, name: &str) -> PathBuf {
        self.root.join("usr/bin").join(name)
    }
}

/// Returns the cache in the target directory that this program lies in.
fn in_target_directory() -> anyhow::Result<Option<PathBuf>> {
    let program = std::env::current_exe()?;
    let mut caches = program.ancestors().map(|directory| directory.join(CACHE));
    Ok(caches.find(|cache| cache.is_dir()))
}
