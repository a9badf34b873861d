//! Format and lints.

use crate::process;
use crate::repo::Repo;

/// Packages outside the workspace, which cargo does not reach from the root.
pub(crate) const APART: &[&str] = &["fuzz/Cargo.toml", "tests/nostd/Cargo.toml"];

/// Everything is formatted.
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

/// Clippy has nothing to say, with every target and feature.
pub(crate) fn clippy(repo: &Repo) -> anyhow::Result<String> {
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

/// The documentation builds without a warning, such as a broken link.
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
