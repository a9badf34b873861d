//! Boots a guest and runs one command in it.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use ringfence_live::qemu::QemuArgs;

use crate::{GuestError, Qemu};

/// The parts of a guest, and its limits.
#[derive(Clone, Debug)]
pub struct Boot<'a> {
    /// Arguments of the virtual machine; its sockets must be served already.
    pub machine: &'a QemuArgs,
    /// The QEMU program.
    pub qemu: &'a Qemu,
    /// Path of the kernel image.
    pub kernel: &'a Path,
    /// The initramfs archive, as the kernel unpacks it.
    pub initramfs: &'a [u8],
    /// The kernel command line: [`QemuArgs::kernel_line`] and any additions.
    pub kernel_line: &'a str,
    /// Longest run time of the guest.
    pub limit: Duration,
}

/// Exit code of `timeout` on expiry.
const OUT_OF_TIME: i32 = 124;
/// Exit code if `timeout` had to send SIGKILL.
const KILLED: i32 = 137;

/// Boots the guest, runs the command with this process's input and output, and returns its exit
/// code. The console log is `console.log` in the machine's directory.
///
/// # Errors
/// [`GuestError`], for example if the guest reported no exit code.
pub fn boot(boot: &Boot<'_>) -> Result<u8, GuestError> {
    let dir = &boot.machine.dir;
    let initrd = dir.join("initramfs.cpio");
    let console = dir.join("console.log");
    let status = dir.join("status");
    let save = |path, bytes| {
        let saved = boot.machine.access.write(path, bytes);
        saved.map_err(GuestError::io(path))
    };
    save(&initrd, boot.initramfs)?;
    save(&status, b"")?;
    let devices = boot.machine.device_arguments();
    let devices = devices.map_err(|(path, source)| GuestError::Io { path, source })?;
    let seconds = boot.limit.as_secs().max(1).to_string();
    // QEMU ends if the guest hangs, or if this process ends.
    let guards = [
        "setpriv",
        "--pdeathsig",
        "TERM",
        "timeout",
        "--foreground",
        "--kill-after=5",
        &seconds,
    ];
    let mut command = boot.qemu.command(&guards);
    command
        .args(devices)
        .args(["-display", "none", "-kernel"])
        .arg(boot.kernel)
        .arg("-initrd")
        .arg(&initrd)
        .args(["-append", boot.kernel_line])
        .args(["-serial", &format!("file:{}", console.display())])
        .args(["-chardev", "stdio,id=command,signal=off"])
        .args(["-serial", "chardev:command"])
        .args(["-serial", &format!("file:{}", status.display())])
        .stdin(Stdio::inherit());
    let ended = command.status().map_err(|_| GuestError::Missing {
        program: "setpriv or timeout",
        package: "util-linux and coreutils",
    })?;
    let status_text = fs::read_to_string(&status).unwrap_or_default();
    status_text
        .lines()
        .find_map(|line| line.trim().strip_prefix("status ")?.parse().ok())
        .ok_or_else(|| {
            let text = fs::read(&console).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            GuestError::NoStatus {
                last: text.lines().last().unwrap_or("").trim().to_owned(),
                console,
                out_of_time: matches!(ended.code(), Some(OUT_OF_TIME | KILLED)),
            }
        })
}
