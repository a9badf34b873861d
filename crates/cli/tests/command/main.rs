//! The command as its users meet it: what goes in, what comes out on which stream, and the exit
//! code.

mod attack;
mod bad_input;
mod calibrate_graph;
mod calibrate_host;
mod closed_output;
mod compare;
mod exit_codes;
mod fail_if;
mod families;
mod files;
mod guest_files;
mod hostile;
mod json;
mod judge;
mod large_entries;
mod line_rates;
mod live;
mod other_commands;
mod profiles;
mod report;
mod size;
mod sweep;
mod untrusted;
mod verify;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Returns the command: that of the environment variable RINGFENCE, or the one that cargo has built
/// for these tests. `cargo xtask test` names the optimised one: 14 s instead of 220.
fn program() -> PathBuf {
    std::env::var_os("RINGFENCE")
        .unwrap_or_else(|| env!("CARGO_BIN_EXE_ringfence").into())
        .into()
}

/// Runs the command.
fn ringfence(args: &[&str]) -> Output {
    ringfence_with(args, b"")
}

/// Runs the command with standard input.
fn ringfence_with(args: &[&str], input: &[u8]) -> Output {
    let mut child = Command::new(program())
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that fails early does not read to the end.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[track_caller]
fn succeeded(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", stderr(output));
    stdout(output)
}

/// The one line that an error is.
#[track_caller]
fn failed(output: &Output, code: i32) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert_eq!(text.lines().count(), 1, "one line: {text}");
    assert!(text.starts_with("ringfence: "), "{text}");
    text
}

/// A directory that goes when the test ends.
struct Scratch(tempfile::TempDir);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(tempfile::Builder::new().prefix(name).tempdir().unwrap())
    }

    fn file(&self, name: &str, content: &[u8]) -> String {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.0.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// The root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
