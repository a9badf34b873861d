//! The no_std check: a program for this host that links the core crates and no standard library.
//!
//! If any of them pulled std in, two panic handlers would meet and the program would not build.

use crate::process;
use crate::repo::Repo;

const MANIFEST: &str = "tests/nostd/Cargo.toml";

/// Builds the program and runs it: its exit status says whether every crate did its part.
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
