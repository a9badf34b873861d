//! The Python module: builds its wheel, installs it into a clean environment, and runs its tests,
//! the examples of its documents and the notebook. Of the network, it needs the packages of pip.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use crate::process;
use crate::product;
use crate::repo::Repo;

/// Directory of the crate.
const CRATE: &str = "crates/python";

/// The builder of wheels.
const MATURIN: &str = "maturin==1.16.0";

/// The acceptance of the wheel: one expression, with Polars alone beside it.
const ACCEPTANCE: &str =
    "import ringfence, polars as pl; print(pl.DataFrame(ringfence.compare('sample').rows))";

/// Builds the wheel, installs it and runs its tests. Returns the summary of pytest.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<String> {
    let directory = repo.target_directory()?.join("python");
    let wheel = build(repo, &directory)?;
    let python = environment(repo, &directory.join("clean"))?;
    // The wheel needs no package.
    pip(repo, &python, &["--no-index", &wheel.to_string_lossy()])?;
    let session = |words: &[&str]| {
        let mut command = process::command(&repo.root.join(CRATE), &python.to_string_lossy());
        command.args(words);
        command
    };
    process::capture(&mut session(&["-c", "import ringfence; ringfence.modes()"]))?;
    let requirements = format!("{CRATE}/tests/requirements.txt");
    pip(repo, &python, &["--requirement", &requirements])?;
    process::show(&mut session(&["-c", ACCEPTANCE]), |_| {})?;
    let mut summary = String::new();
    let mut tests = session(&["-m", "pytest", "--quiet", "-p", "no:cacheprovider"]);
    tests
        .arg("--durations=10")
        .env("RINGFENCE", product::build(repo)?)
        .env("PYTHONDONTWRITEBYTECODE", "1");
    process::show(&mut tests, |line| line.clone_into(&mut summary))?;
    ensure!(summary.contains(" passed"), "pytest ran no test: {summary}");
    Ok(summary)
}

/// Builds the wheel with the profile of tests, whose dependencies are built.
fn build(repo: &Repo, directory: &Path) -> anyhow::Result<PathBuf> {
    let tools = environment(repo, &directory.join("tools"))?;
    pip(repo, &tools, &[MATURIN])?;
    let wheels = directory.join("wheels");
    if wheels.exists() {
        fs::remove_dir_all(&wheels)?;
    }
    process::show(
        process::command(&repo.root.join(CRATE), &tools.to_string_lossy())
            .args(["-m", "maturin", "build", "--quiet", "--locked"])
            .args(["--profile", "dev", "--out"])
            .arg(&wheels),
        |_| {},
    )?;
    let mut found = Vec::new();
    for entry in fs::read_dir(&wheels)? {
        found.push(entry?.path());
    }
    match found.as_slice() {
        [wheel] if wheel.to_string_lossy().contains("-cp310-abi3-") => Ok(wheel.clone()),
        other => bail!("maturin built {other:?}, not one wheel for the stable interface"),
    }
}

/// Creates an environment without any package and returns its interpreter. Its pip is that of the
/// host, so the host needs no package for environments.
fn environment(repo: &Repo, directory: &Path) -> anyhow::Result<PathBuf> {
    process::show(
        process::command(&repo.root, "python3")
            .args(["-m", "venv", "--clear", "--without-pip"])
            .arg(directory),
        |_| {},
    )?;
    Ok(directory.join("bin/python"))
}

/// Installs packages into the environment of `python`.
fn pip(repo: &Repo, python: &Path, packages: &[&str]) -> anyhow::Result<()> {
    process::show(
        process::command(&repo.root, "python3")
            .args(["-m", "pip", "--python"])
            .arg(python)
            .args(["install", "--quiet", "--disable-pip-version-check"])
            .args(["--retries", "10", "--timeout", "30"])
            .args(packages),
        |_| {},
    )
    .with_context(|| format!("install {}", packages.join(" ")))
}
