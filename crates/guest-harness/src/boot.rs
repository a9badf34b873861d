//! Boots a guest and runs one command in it.

use std::ffi::OsString;
use std::fs;
use std::io;
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

/// The program that starts the others.
const GUARD: &str = "setpriv";
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
        GUARD,
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
        .arg("-serial")
        .arg(file(&console))
        .args(["-chardev", "stdio,id=command,signal=off"])
        .args(["-serial", "chardev:command"])
        .arg("-serial")
        .arg(file(&status))
        .stdin(Stdio::inherit());
    let ended = command.status().map_err(not_started)?;
    let reported = fs::read(&status).unwrap_or_default();
    status_of(&String::from_utf8_lossy(&reported)).ok_or_else(|| {
        let text = fs::read(&console).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        GuestError::NoStatus {
            last: text.lines().last().unwrap_or("").trim().to_owned(),
            console,
            ended,
            out_of_time: matches!(ended.code(), Some(OUT_OF_TIME | KILLED)),
        }
    })
}

/// Returns QEMU's name of a character device that writes to `path`.
fn file(path: &Path) -> OsString {
    let mut name = OsString::from("file:");
    name.push(path);
    name
}

/// Returns the error of a command that did not start.
fn not_started(source: io::Error) -> GuestError {
    match source.kind() {
        io::ErrorKind::NotFound => GuestError::Missing {
            program: "setpriv or timeout",
            package: "util-linux and coreutils",
        },
        _ => GuestError::Io {
            path: GUARD.into(),
            source,
        },
    }
}

/// Returns the exit code in the lines that the guest wrote to its status port.
fn status_of(text: &str) -> Option<u8> {
    text.lines()
        .find_map(|line| line.trim().strip_prefix("status ")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn the_status_is_found_among_other_lines() {
        for (text, status) in [
            ("status 0\n", Some(0)),
            ("status 255\r\n", Some(255)),
            ("  status 4  ", Some(4)),
            ("\u{fffd}noise\nstatus 7\n", Some(7)),
            ("status x\nstatus 3\nstatus 5\n", Some(3)),
            ("", None),
            ("status ", None),
            ("status -1", None),
            ("status 256", None),
            ("the status 1", None),
        ] {
            assert_eq!(status_of(text), status, "{text:?}");
        }
    }

    #[test]
    fn only_a_program_that_does_not_exist_is_missing() {
        let missing = not_started(io::ErrorKind::NotFound.into());
        assert!(matches!(missing, GuestError::Missing { .. }), "{missing}");
        for kind in [io::ErrorKind::PermissionDenied, io::ErrorKind::OutOfMemory] {
            let error = not_started(kind.into());
            let GuestError::Io { source, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!(source.kind(), kind);
        }
    }

    #[test]
    fn a_path_need_not_be_unicode() {
        let path = Path::new(std::ffi::OsStr::from_bytes(b"/a\xff/console.log"));
        assert_eq!(file(path).as_bytes(), b"file:/a\xff/console.log");
    }

    #[test]
    fn the_error_has_the_exit_status_of_qemu() {
        for (status, out_of_time, told) in [
            (
                1 << 8,
                false,
                "the guest ended without the command's exit code (exit status: 1)",
            ),
            (
                124 << 8,
                true,
                "the guest exceeded its time limit (--timeout) (exit status: 124)",
            ),
        ] {
            let error = GuestError::NoStatus {
                console: "console.log".into(),
                last: "last".to_owned(),
                ended: ExitStatus::from_raw(status),
                out_of_time,
            };
            assert_eq!(
                error.to_string(),
                format!("{told}; its console is console.log: last")
            );
        }
    }
}
