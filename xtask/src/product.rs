//! The command `ringfence` as documents and guests run it: optimised.

use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use crate::process;
use crate::repo::Repo;

/// Packages of the command, and the test that counts its instructions. Cargo unifies the features
/// of packages that are selected together, so nothing is built twice. Neither package has
/// development dependencies, which would be optimised.
pub(crate) const SELECTION: [&str; 7] = [
    "--release",
    "--package",
    "ringfence-cli",
    "--package",
    "ringfence-tests",
    "--test",
    "callgrind",
];

/// Builds the command and the test.
pub(crate) fn build_all(repo: &Repo) -> anyhow::Result<String> {
    process::show(
        process::command(&repo.root, "cargo")
            .args(["test", "--quiet", "--no-run"])
            .args(SELECTION),
        |_| {},
    )?;
    build(repo).map(|_| String::new())
}

/// Held while the command is built and copied, because background steps do that too.
static BUILDING: Mutex<()> = Mutex::new(());

/// Builds the command and returns its path.
pub(crate) fn build(repo: &Repo) -> anyhow::Result<PathBuf> {
    // A panic of another thread leaves nothing that the next build does not replace.
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    process::show(
        process::command(&repo.root, "cargo")
            .args(["build", "--quiet", "--bin", "ringfence"])
            .args(SELECTION),
        |_| {},
    )?;
    // Copy the binary: `cargo run` in a document may replace it.
    let target = repo.target_directory()?;
    let directory = target.join("documents");
    fs::create_dir_all(&directory)?;
    let command = directory.join("ringfence");
    // The previous copy may be running, so rename instead of overwriting.
    let new = directory.join("ringfence.new");
    let built = target.join("release/ringfence");
    // A running copy starts its own path again, which a replacement would take away: an equal copy
    // stays.
    let bytes = fs::read(&built)?;
    if fs::read(&command).is_ok_and(|previous| previous == bytes) {
        return Ok(command);
    }
    fs::copy(built, &new)?;
    fs::rename(new, &command)?;
    Ok(command)
}
