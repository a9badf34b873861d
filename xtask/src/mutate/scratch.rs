//! A copy of the tree in which mutants are built and tested.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::outcome::MutantOutcome;
use super::patch::{Mutation, TestCommand};
use crate::process;
use crate::repo::Repo;
use crate::summary::Summary;

/// Maximum time of a build, or of the unmodified suite.
const LIMIT: Duration = Duration::from_secs(600);

/// A copy of the tree with a separate target directory, shared by all mutants. Both stay for the
/// next run, which rebuilds only changed files.
pub(super) struct Scratch {
    tree: PathBuf,
    target: PathBuf,
}

impl Scratch {
    pub(super) fn prepare(repo: &Repo, directory: &Path) -> anyhow::Result<Self> {
        let scratch = Self {
            tree: directory.join("tree"),
            target: directory.join("target"),
        };
        fs::create_dir_all(&scratch.tree)?;
        // Without a repository here, git would find one in a parent directory and apply patches
        // there.
        if !scratch.tree.join(".git").exists() {
            process::capture(process::command(&scratch.tree, "git").args(["init", "--quiet"]))?;
        }
        let files = repo.files()?;
        for old in Repo::at(scratch.tree.clone()).files()? {
            if files.binary_search(&old).is_err() {
                fs::remove_file(scratch.tree.join(old))?;
            }
        }
        for path in &files {
            scratch.restore(repo, path)?;
        }
        Ok(scratch)
    }

    /// Restores a file from the repository; does not write it if it is already equal.
    fn restore(&self, repo: &Repo, path: &Path) -> anyhow::Result<()> {
        let copy = self.tree.join(path);
        let wanted = match fs::read(repo.root.join(path)) {
            Ok(wanted) => wanted,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                // The patch created the file.
                return fs::remove_file(copy).map_err(Into::into);
            }
            Err(error) => return Err(error.into()),
        };
        if fs::read(&copy).is_ok_and(|present| present == wanted) {
            return Ok(());
        }
        if let Some(directory) = copy.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(copy, wanted)?;
        Ok(())
    }

    /// Applies the mutation, runs its tests for at most `limit`, and reverts the mutation.
    pub(super) fn fate(
        &self,
        repo: &Repo,
        mutation: &Mutation,
        limit: Duration,
    ) -> anyhow::Result<MutantOutcome> {
        // Use the patch of the copy, because the repository may change during the run.
        let patch = self.tree.join(&mutation.path);
        let touched = process::capture(
            process::command(&self.tree, "git")
                .args(["apply", "--numstat", "-z"])
                .arg(&patch),
        );
        let applied =
            process::capture(process::command(&self.tree, "git").arg("apply").arg(&patch));
        let (Ok(touched), Ok(_)) = (touched, applied) else {
            return Ok(MutantOutcome::DoesNotApply);
        };
        let fate = self.run_mutant(&mutation.kill, limit);
        for entry in touched.split('\0').filter(|entry| !entry.is_empty()) {
            // Added lines, removed lines, path.
            let path = entry
                .splitn(3, '\t')
                .nth(2)
                .context("git apply --numstat")?;
            self.restore(repo, Path::new(path))?;
        }
        fate
    }

    fn run_mutant(&self, kill: &TestCommand, limit: Duration) -> anyhow::Result<MutantOutcome> {
        // A mutant that does not compile says nothing about the tests.
        if !self.builds(kill)? {
            return Ok(MutantOutcome::DoesNotBuild);
        }
        Ok(MutantOutcome::of(
            &self.cargo_test(&kill.arguments(), limit)?,
        ))
    }

    /// Returns the time of the tests on the unmodified copy; `None` if they fail or no test runs.
    pub(super) fn time_unmodified(
        &self,
        command: &TestCommand,
    ) -> anyhow::Result<Option<Duration>> {
        if !self.builds(command)? {
            return Ok(None);
        }
        let start = Instant::now();
        let output = self.cargo_test(&command.arguments(), LIMIT)?;
        let time = start.elapsed();
        let mut summary = Summary::default();
        let stdout = String::from_utf8_lossy(&output.stdout);
        stdout.lines().for_each(|line| summary.add_line(line));
        let sound = output.status.success() && summary.ensure_some_ran().is_ok();
        if !sound {
            eprint!("{stdout}{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(sound.then_some(time))
    }

    /// Builds the tests. Prints the error output of a failure.
    fn builds(&self, command: &TestCommand) -> anyhow::Result<bool> {
        let output = self.cargo_test(&command.build_only(), LIMIT)?;
        if !output.status.success() {
            eprint!("{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(output.status.success())
    }

    fn cargo_test(&self, arguments: &[&str], limit: Duration) -> anyhow::Result<Output> {
        process::command(&self.tree, "timeout")
            .args(["--kill-after=10", &limit.as_secs().to_string()])
            .args(["cargo", "test", "--quiet"])
            .args(arguments)
            .env("CARGO_TARGET_DIR", &self.target)
            // Mutants are not debugged, and debug information would dominate their build time.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            // A persisted failure of a property test would modify the copy.
            .env("PROPTEST_FAILURE_PERSISTENCE", "off")
            .stdin(Stdio::null())
            .output()
            .context("timeout cargo test")
    }
}
