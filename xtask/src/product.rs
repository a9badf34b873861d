//! The command `ringfence` as documents and guests run it: optimised, with everything in it.

use std::fs;
use std::path::PathBuf;

use crate::process;
use crate::repo::Repo;

/// Builds it; where it is.
pub(crate) fn build(repo: &Repo) -> anyhow::Result<PathBuf> {
    process::show(
        process::command(&repo.root, "cargo").args([
            "build",
            "--quiet",
            "--release",
            "--all-features",
            "--package",
            "ringfence-cli",
        ]),
        |_| {},
    )?;
    // A copy: `cargo run` in a document may put a build with other features in its place.
    let target = repo.target_directory()?;
    let directory = target.join("documents");
    fs::create_dir_all(&directory)?;
    let command = directory.join("ringfence");
    fs::copy(target.join("release/ringfence"), &command)?;
    Ok(command)
}
