//! Other architectures: the core crates on a 32-bit and a big-endian CPU, and the command on arm64
//! and riscv64. Debian has the standard libraries; its compiler of the same version runs from the
//! target directory. QEMU emulates the CPUs (docs/decisions/0046-other-architectures.md).

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::ensure;

use crate::process;
use crate::repo::Repo;
use crate::rules::CORE;
use crate::summary::Summary;
use crate::{guest, install};

/// An architecture of Linux.
struct Target {
    /// The target triple of Rust.
    name: &'static str,
    /// Debian's name of the architecture.
    debian: &'static str,
    /// Prefix of the compiler's name, and name of the directory with the C library.
    gnu: &'static str,
    /// The emulator of user programs.
    emulator: &'static str,
    /// Packages whose tests do not build: `vm-memory` or `congee`, which they use, needs 64-bit
    /// addresses.
    untested: &'static [&'static str],
}

const I686: Target = Target {
    name: "i686-unknown-linux-gnu",
    debian: "i386",
    gnu: "i686-linux-gnu",
    emulator: "qemu-i386",
    untested: &["virtio-iommu", "pviommu"],
};
const S390X: Target = Target {
    name: "s390x-unknown-linux-gnu",
    debian: "s390x",
    gnu: "s390x-linux-gnu",
    emulator: "qemu-s390x",
    untested: &[],
};
const ARM64: Target = Target {
    name: "aarch64-unknown-linux-gnu",
    debian: "arm64",
    gnu: "aarch64-linux-gnu",
    emulator: "qemu-aarch64",
    untested: &[],
};
const RISCV64: Target = Target {
    name: "riscv64gc-unknown-linux-gnu",
    debian: "riscv64",
    gnu: "riscv64-linux-gnu",
    emulator: "qemu-riscv64",
    untested: &[],
};

/// Crates without the standard library that are not core crates.
const MORE: &[&str] = &["papers"];
/// Crates whose tests run in `cargo xtask test`: those that are short under emulation and whose
/// subject is the layout of bytes.
const BRIEF: &[&str] = &["types", "firmware", "amd-vi", "smmu-v3"];
/// A trace that comes with the sources.
const TRACE: &str = "crates/trace/tests/data/nvme-6.12.trace.zst";

/// Checks all crates that are `no_std` on both architectures, and runs the tests of a few.
pub(crate) fn core(repo: &Repo) -> anyhow::Result<String> {
    check_and_test(repo, BRIEF)
}

/// Runs the tests of all crates that are `no_std`, and the command.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<bool> {
    install::cross(repo)?;
    guest::fetch_judge(repo)?;
    println!("{}", check_and_test(repo, &[CORE, MORE].concat())?);
    for target in [ARM64, RISCV64] {
        let command = build_command(repo, &target)?;
        for arguments in [&["modes"][..], &["trace", "info", TRACE]] {
            let mut emulated = process::command(&repo.root, target.emulator);
            process::show(emulated.arg(&command).args(arguments), |_| {})?;
        }
        if target.debian == ARM64.debian {
            record(repo, &command)?;
        }
    }
    Ok(true)
}

fn check_and_test(repo: &Repo, tested: &[&str]) -> anyhow::Result<String> {
    let mut notes = Vec::new();
    for target in [I686, S390X] {
        let compiler = fetch(repo, &target)?;
        let mut check = cargo(repo, &compiler, &target)?;
        check.args(["check", "--quiet", "--lib"]);
        packages(&mut check, &[CORE, MORE].concat());
        process::show(&mut check, |_| {})?;
        let built = |name: &&str| !target.untested.contains(name);
        let tested: Vec<&str> = tested.iter().copied().filter(built).collect();
        let mut test = cargo(repo, &compiler, &target)?;
        test.args(["test", "--quiet", "--no-fail-fast", "--lib", "--tests"]);
        packages(&mut test, &tested);
        let mut summary = Summary::default();
        process::show(&mut test, |line| summary.add_line(line))?;
        summary.ensure_some_ran()?;
        notes.push(format!("{}: {summary}", target.debian));
    }
    Ok(notes.join("; "))
}

/// Returns the path of the compiler for `target`. Fetches it once.
fn fetch(repo: &Repo, target: &Target) -> anyhow::Result<PathBuf> {
    let cache = repo.target_directory()?.join("rust");
    let mut command = process::command(&repo.root, "cargo");
    command.args(["run", "--quiet", "--package", "ringfence-guest-harness"]);
    command.args(["--example", "fetch_rust", "--"]);
    process::show(command.arg(&cache).arg(target.debian), |_| {})?;
    let compiler = cache.join("rustc");
    ensure!(compiler.is_file(), "{} is missing", compiler.display());
    Ok(compiler)
}

/// Returns a command that builds for `target` and runs the results under emulation.
fn cargo(repo: &Repo, compiler: &Path, target: &Target) -> anyhow::Result<Command> {
    let mut command = process::command(&repo.root, "cargo");
    let variable = target.name.to_uppercase().replace('-', "_");
    command
        .env("RUSTC", compiler)
        .env(
            "CARGO_TARGET_DIR",
            repo.target_directory()?.join("rust/build"),
        )
        .env("CARGO_BUILD_TARGET", target.name)
        // Emulation of code that is not optimised takes several times as long.
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1")
        .env("CARGO_INCREMENTAL", "0")
        .env(
            format!("CARGO_TARGET_{variable}_LINKER"),
            format!("{}-gcc", target.gnu),
        )
        .env(
            format!("CARGO_TARGET_{variable}_RUNNER"),
            format!("{} -L /usr/{}", target.emulator, target.gnu),
        )
        .env_remove("RUSTC_WRAPPER");
    Ok(command)
}

fn packages(command: &mut Command, names: &[&str]) {
    for name in names {
        command.args(["--package", &format!("ringfence-{name}")]);
    }
}

/// Builds the command without dynamic libraries, so that a guest without any can run it.
fn build_command(repo: &Repo, target: &Target) -> anyhow::Result<PathBuf> {
    let compiler = fetch(repo, target)?;
    let mut build = cargo(repo, &compiler, target)?;
    let variable = target.name.to_uppercase().replace('-', "_");
    build.env(
        format!("CARGO_TARGET_{variable}_RUSTFLAGS"),
        "-C target-feature=+crt-static",
    );
    build.args(["build", "--quiet", "--release", "--package"]);
    process::show(build.args(["ringfence-cli", "--bin", "ringfence"]), |_| {})?;
    let directory = repo.target_directory()?.join("rust/build");
    Ok(directory.join(target.name).join("release/ringfence"))
}

/// Runs `trace record` in an arm64 guest.
fn record(repo: &Repo, command: &Path) -> anyhow::Result<()> {
    let mut test = process::command(&repo.root, "cargo");
    test.env("RINGFENCE_ARM64", command);
    test.args(["test", "--package", "ringfence-qemu-judge", "--test"]);
    test.args(["linux_record", "--", "--ignored", "--nocapture"]);
    let mut summary = Summary::default();
    process::show(&mut test, |line| summary.add_line(line))?;
    summary.ensure_some_ran()
}
