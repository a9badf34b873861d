//! The no_std check: a program for this host that links the core crates without the standard
//! library.
//!
//! If one of them used std, the program would have two panic handlers and would not link.

use crate::process;
use crate::repo::Repo;

const MANIFEST: &str = "tests/nostd/Cargo.toml";

/// Builds the program and runs it; its exit status is 0 if every crate works.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<String> {
    let target = repo.target_directory()?.join("nostd");
    process::show(
        process::command(&repo.root, "cargo")
            .args(["run", "--quiet", "--release", "--manifest-path", MANIFEST])
            .arg("--target-dir")
            .arg(target),
        |_| {},
    )?;
    Ok(String::new())
}
