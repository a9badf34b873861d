//! The command `ringfence` as documents and guests run it: optimised, with everything in it.

use std::fs;
use std::path::PathBuf;

use crate::process;
use crate::repo::Repo;

/// What is built of it, and of the test that counts its instructions: of packages that are chosen
/// together the features are the same, so nothing is built twice.
pub(crate) const SELECTION: [&str; 8] = [
    "--release",
    "--all-features",
    "--package",
    "ringfence-cli",
    "--package",
    "ringfence-lab",
    "--test",
    "callgrind",
];

/// Builds it, and the test.
pub(crate) fn build_all(repo: &Repo) -> anyhow::Result<String> {
    process::show(
        process::command(&repo.root, "cargo")
            .args(["test", "--quiet", "--no-run"])
            .args(SELECTION),
        |_| {},
    )?;
    build(repo).map(|_| String::new())
}

/// Builds it; where it is.
pub(crate) fn build(repo: &Repo) -> anyhow::Result<PathBuf> {
    process::show(
        process::command(&repo.root, "cargo")
            .args(["build", "--quiet", "--bin", "ringfence"])
            .args(SELECTION),
        |_| {},
    )?;
    // A copy: `cargo run` in a document may put a build with other features in its place.
    let target = repo.target_directory()?;
    let directory = target.join("documents");
    fs::create_dir_all(&directory)?;
    let command = directory.join("ringfence");
    // The one before may be running.
    let new = directory.join("ringfence.new");
    fs::copy(target.join("release/ringfence"), &new)?;
    fs::rename(new, &command)?;
    Ok(command)
}
