//! The example for kernels, `examples/bare-metal`: builds it, boots it in QEMU, and compares its
//! verdicts. Compares the excerpts of the document with its code.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use ringfence_qemu_judge::Emulator;

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/bare-metal");
const DOCUMENT: &str = include_str!("../../../docs/EMBEDDING-KERNEL.md");

/// A boot takes about a second.
const LIMIT: Duration = Duration::from_secs(120);

const UNIT: &str = "intel-iommu";
const DEVICE: &str = "iommu-testdev,addr=5";

/// Exit statuses of QEMU: `isa-debug-exit` doubles the value and adds one.
const AS_EXPECTED: i32 = 2 * 16 + 1;
const UNEXPECTED_VERDICT: i32 = 2 * 17 + 1;
const ERROR: i32 = 2 * 18 + 1;

/// The program, built once.
static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bare-metal");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--offline", "--manifest-path"]);
    command.arg(format!("{EXAMPLE}/Cargo.toml"));
    command.arg("--target-dir").arg(&target);
    let status = command.status().unwrap();
    if !status.success() {
        // Not a panic: a mutation that breaks the build must not count as caught by a test.
        std::process::exit(1);
    }
    target.join("debug/ringfence-bare-metal")
});

/// Boots the program on a machine with `devices`. Returns QEMU's exit status and the serial output.
fn boot(devices: &[&str], command_line: &str) -> (Option<i32>, String) {
    let emulator = Emulator::find().unwrap();
    let mut command = emulator.command_within(LIMIT, "qemu-system-x86_64");
    command.args(["-machine", "q35", "-accel", "tcg", "-m", "64M"]);
    command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    command.args(["-serial", "stdio"]);
    command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
    for device in devices {
        command.args(["-device", device]);
    }
    command.arg("-kernel").arg(&*PROGRAM);
    command.args(["-append", command_line]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let log = String::from_utf8_lossy(&output.stderr);
    println!("{devices:?} {command_line}\n{text}{}\n{log}", output.status);
    (output.status.code(), text)
}

/// Returns the contents of the document's blocks that begin with the line `fence`.
fn blocks(fence: &str) -> Vec<String> {
    let mut lines = DOCUMENT.lines();
    let mut found = Vec::new();
    while lines.any(|line| line == fence) {
        let block = lines.by_ref().take_while(|line| *line != "```");
        found.push(block.map(|line| format!("{line}\n")).collect());
    }
    found
}

#[test]
fn three_verdicts() {
    let caching = format!("{UNIT},caching-mode=on");
    for unit in [UNIT, &caching] {
        let (status, text) = boot(&[unit, DEVICE], "");
        // The document shows this output.
        assert_eq!(blocks("```text"), [text]);
        assert_eq!(status, Some(AS_EXPECTED));
    }
}

/// QEMU caches the translation of the first write, so the third verdict is the invalidation's work.
#[test]
fn a_forgotten_invalidation_lets_the_last_write_land() {
    let (status, text) = boot(&[UNIT, DEVICE], "forget-invalidations");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines[2].starts_with("write to an unmapped page: stopped"));
    assert_eq!(lines[3], "write after unmap: landed");
    assert_eq!(status, Some(UNEXPECTED_VERDICT));
}

#[test]
fn machines_without_unit_or_device_end_with_an_error() {
    for (devices, error) in [
        (&[DEVICE][..], "error: no DMAR table\n"),
        (&[UNIT][..], "error: no test device\n"),
    ] {
        let (status, text) = boot(devices, "");
        assert_eq!((status, text.as_str()), (Some(ERROR), error));
    }
}

/// Each excerpt is a part of one file, without its indentation.
#[test]
fn the_document_shows_the_code() {
    let files = std::fs::read_dir(format!("{EXAMPLE}/src")).unwrap();
    let files = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
    let files: Vec<Vec<String>> = files.map(|text| trimmed(&text)).collect();
    let excerpts = blocks("```rust,ignore");
    assert!(excerpts.len() >= 5, "{}", excerpts.len());
    for excerpt in &excerpts {
        let wanted = trimmed(excerpt);
        let is_part = |file: &Vec<String>| file.windows(wanted.len()).any(|part| part == wanted);
        assert!(files.iter().any(is_part), "no file contains\n{excerpt}");
    }
    assert!(DOCUMENT.lines().count() <= 150);
}

fn trimmed(text: &str) -> Vec<String> {
    let lines = text.lines().map(|line| line.trim().to_owned());
    lines.filter(|line| !line.is_empty()).collect()
}
