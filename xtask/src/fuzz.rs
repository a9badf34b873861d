//! The fuzz targets: under libFuzzer where a nightly toolchain is installed, and everywhere as a plain random run
//! of the same functions over the same corpora.

use anyhow::{Context, bail};

use crate::process;
use crate::repo::Repo;
use crate::summary::Summary;

const MANIFEST: &str = "fuzz/Cargo.toml";
const CORPUS: &str = "fuzz/corpus";

/// The names of all targets, from the files that hold them.
pub(crate) fn targets(repo: &Repo) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(repo.root.join("fuzz/fuzz_targets"))? {
        let path = entry?.path();
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        names.push(
            stem.context("a fuzz target's name is not UTF-8")?
                .to_owned(),
        );
    }
    names.sort();
    if names.is_empty() {
        bail!("there is no fuzz target");
    }
    Ok(names)
}

/// Replays every corpus through its target and checks that it reaches what it is meant to reach.
pub(crate) fn corpora(repo: &Repo) -> anyhow::Result<String> {
    let mut summary = Summary::default();
    process::show(
        process::command(&repo.root, "cargo")
            .args(["test", "--quiet", "--release", "--no-default-features"])
            .args(["--manifest-path", MANIFEST, "--target-dir"])
            .arg(repo.target_directory()?.join("fuzz")),
        |line| summary.add_line(line),
    )?;
    summary.ensure_some_ran()?;
    Ok(summary.to_string())
}

/// Mutates the corpus of `target` at random for `seconds`, on the stable toolchain.
pub(crate) fn random(repo: &Repo, target: &str, seconds: u64) -> anyhow::Result<String> {
    let mut last = String::new();
    process::show(
        process::command(&repo.root, "cargo")
            .args(["run", "--quiet", "--release", "--no-default-features"])
            .args(["--manifest-path", MANIFEST, "--target-dir"])
            .arg(repo.target_directory()?.join("fuzz"))
            .args(["--example", "random", "--", target, &seconds.to_string()]),
        |line| line.clone_into(&mut last),
    )?;
    Ok(last)
}

/// Runs `target` under libFuzzer for `seconds`. Inputs it finds stay in the target directory: what belongs in the
/// committed corpus is chosen by hand (docs/FUZZ.md).
pub(crate) fn libfuzzer(repo: &Repo, target: &str, seconds: u64) -> anyhow::Result<String> {
    let directory = repo.target_directory()?;
    let found = directory.join("fuzz-corpus").join(target);
    std::fs::create_dir_all(&found)?;
    process::show(
        process::command(&repo.root, "cargo")
            // Set by the cargo that started this program; it would override `+nightly`.
            .env_remove("RUSTUP_TOOLCHAIN")
            // What is fuzzed holds no unsafe code, so the address sanitizer would find nothing and cost ten times the speed.
            .args([
                "+nightly",
                "fuzz",
                "run",
                "--sanitizer=none",
                "--target-dir",
            ])
            .arg(directory.join("libfuzzer"))
            .arg(target)
            .arg(&found)
            .arg(repo.root.join(CORPUS).join(target))
            .arg("--")
            .arg(format!("-max_total_time={seconds}"))
            .args(["-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1"]),
        |_| {},
    )?;
    Ok(String::new())
}
