//! Formatting, lints and documentation.

use crate::process;
use crate::repo::Repo;

/// Packages outside the workspace, which cargo does not process from the root.
pub(crate) const APART: &[&str] = &[BARE_METAL, "fuzz/Cargo.toml", "tests/nostd/Cargo.toml"];

/// The example for kernels, which a test of `ringfence-qemu-judge` builds and boots.
const BARE_METAL: &str = "examples/bare-metal/Cargo.toml";

/// Checks that all packages are formatted.
pub(crate) fn format(repo: &Repo) -> anyhow::Result<String> {
    let check = ["--check"];
    process::show(
        process::command(&repo.root, "cargo")
            .args(["fmt", "--all", "--"])
            .args(check),
        |_| {},
    )?;
    for manifest in APART {
        process::show(
            process::command(&repo.root, "cargo")
                .args(["fmt", "--manifest-path", manifest, "--"])
                .args(check),
            |_| {},
        )?;
    }
    Ok(String::new())
}

/// Checks that clippy reports nothing, with every target and feature, and in the example for
/// kernels.
pub(crate) fn clippy(repo: &Repo) -> anyhow::Result<String> {
    process::show(
        process::command(&repo.root, "cargo")
            .args(["clippy", "--quiet", "--manifest-path", BARE_METAL])
            .arg("--target-dir")
            .arg(repo.target_directory()?.join("bare-metal"))
            .args(["--", "-D", "warnings"]),
        |_| {},
    )?;
    process::show(
        process::command(&repo.root, "cargo").args([
            "clippy",
            "--quiet",
            "--workspace",
            "--all-targets",
            "--all-features",
            "--",
            "-D",
            "warnings",
        ]),
        |_| {},
    )?;
    Ok(String::new())
}

/// Checks that the documentation builds without a warning, such as a broken link.
pub(crate) fn rustdoc(repo: &Repo) -> anyhow::Result<String> {
    process::show(
        process::command(&repo.root, "cargo")
            .args([
                "doc",
                "--quiet",
                "--workspace",
                "--all-features",
                "--no-deps",
            ])
            .env("RUSTDOCFLAGS", "-D warnings"),
        |_| {},
    )?;
    Ok(String::new())
}
