//! `guest run` keeps the guest's files in a new directory that no other user can prepare or write
//! to. A script replaces QEMU.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::{Scratch, program, stderr};

/// Answers as a QEMU that is fit; then tells of the directory that it was given, and does as $THEN
/// says.
const QEMU: &str = r#"#!/bin/sh
case "$*" in *vfio-user-pci,help*) echo "vfio-user-pci options:"; exit 0 ;; esac
for word; do case $word in file:*/status) status=${word#file:} ;; esac; done
dir=${status%/status}
stat -c '%a %F' "$dir" >"$HERE/told"
stat -c '%a %F' "$dir/disk.img" >>"$HERE/told"
echo "$dir" >"$HERE/where"
case $THEN in
    done) echo "status 0" >"$status" ;;
    wait) echo ready >"$HERE/fifo"; exec sleep 600 ;;
esac
"#;

const CACHE: [&str; 2] = ["--cache", "cache"];

struct Rig(Scratch);

impl Rig {
    /// None where the tools of `guest run` are not installed.
    fn new() -> Option<Self> {
        let busybox = ["/usr/bin/busybox", "/bin/busybox"];
        if !busybox.iter().any(|path| Path::new(path).is_file()) {
            return None;
        }
        let scratch = Scratch::new("guest");
        for dir in [
            "bin",
            "tmp",
            "papers",
            "cache",
            "kernel/usr/lib/modules/6.12",
        ] {
            fs::create_dir_all(scratch.path(dir)).unwrap();
        }
        let qemu = scratch.file("bin/qemu-system-x86_64", QEMU.as_bytes());
        fs::set_permissions(qemu, fs::Permissions::from_mode(0o755)).unwrap();
        scratch.file("kernel/vmlinuz", b"");
        scratch.file("papers/thesis.tex", b"precious");
        let fifo = scratch.path("fifo");
        assert!(Command::new("mkfifo").arg(fifo).status().unwrap().success());
        Some(Self(scratch))
    }

    /// `guest run` by a process for whose number another user has planted links.
    fn command(&self, then: &str, options: &[&str]) -> Command {
        let mut path = OsString::from(self.0.path("bin"));
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap());
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "umask 0; for name in ringfence ringfence-x21; do ln -s ../papers tmp/$name-$$; done; \
            exec \"$@\"",
            "sh",
        ]);
        command.arg(program());
        command.args(["guest", "run", "--timeout", "30", "--kernel", "./kernel"]);
        command.args(options).args(["--", "true"]);
        command.current_dir(self.0.path("."));
        command
            .env("PATH", path)
            .env("THEN", then)
            .env("TMPDIR", self.0.path("tmp"));
        command.env("HERE", self.0.path("."));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, then: &str) -> Output {
        self.command(then, &CACHE).output().unwrap()
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.0.path(name)).unwrap()
    }

    /// Returns the names in the directory for temporary files, except the planted links.
    fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path("tmp"))
            .unwrap()
            .map(Result::unwrap);
        let entries = entries.filter(|entry| !entry.file_type().unwrap().is_symlink());
        entries
            .map(|entry| entry.file_name().into_string().unwrap())
            .collect()
    }

    #[track_caller]
    fn papers_are_there(&self) {
        assert_eq!(self.read("papers/thesis.tex"), "precious");
        assert_eq!(fs::read_dir(self.0.path("papers")).unwrap().count(), 1);
    }
}

#[test]
fn a_guests_directory_is_new_private_and_removed() {
    let Some(rig) = Rig::new() else { return };
    let output = rig.run("done");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let told = rig.read("told");
    assert!(told.starts_with("700 directory\n"), "{told}");
    assert!(told.contains("regular file"), "{told}");
    assert_eq!(rig.left(), [""; 0]);
    rig.papers_are_there();
}

#[test]
fn a_failed_guest_leaves_its_console_and_nothing_else() {
    let Some(rig) = Rig::new() else { return };
    let output = rig.run("fail");
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let directory = rig.read("where");
    let name = Path::new(directory.trim()).file_name().unwrap();
    assert_eq!(rig.left(), [name.to_str().unwrap()]);
    rig.papers_are_there();
}

#[test]
fn a_signal_removes_a_guests_directory() {
    let Some(rig) = Rig::new() else { return };
    for signal in ["TERM", "INT"] {
        let mut child = rig.command("wait", &CACHE).spawn().unwrap();
        assert_eq!(rig.read("fifo"), "ready\n");
        assert_eq!(rig.left().len(), 1);
        let killed = Command::new("kill")
            .args(["-s", signal, &child.id().to_string()])
            .status();
        assert!(killed.unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(130), "{signal}");
        assert_eq!(rig.left(), [""; 0], "{signal}");
    }
    rig.papers_are_there();
}

#[test]
fn directories_that_others_can_write_to_are_refused() {
    let Some(rig) = Rig::new() else { return };
    let shared = rig.0.path("shared");
    fs::create_dir(&shared).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o1777)).unwrap();
    for options in [
        &["--cache", "cache", "--dir", shared.as_str()][..],
        &["--cache", &shared],
    ] {
        let output = rig.command("done", options).output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{options:?}: {text}");
        assert!(
            text.contains("other users can write to the directory"),
            "{text}"
        );
    }
    assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
    let serve = crate::ringfence(&["serve", "--rng", "--dir", &shared]);
    assert!(
        stderr(&serve).contains("other users can write"),
        "{}",
        stderr(&serve)
    );
}
