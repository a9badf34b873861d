//! The tests of the workspace: test programs are built together and run by kind.
//!
//! Separate runs of `cargo test` would build everything twice, because `--lib` selects other
//! features of the same libraries than `--test '*'`.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::output;
use crate::process;
use crate::product;
use crate::repo::Repo;
use crate::summary::Summary;

/// Selects all test programs: the default selection of `cargo test`, and the tests of examples.
const SELECTION: [&str; 7] = [
    "--workspace",
    "--all-features",
    "--lib",
    "--bins",
    "--examples",
    "--test",
    "*",
];

/// Sources of the programs that replay for minutes without optimisation, in the order of their
/// paths. They run optimised, on the libraries of the command.
const REPLAYS: [&str; 3] = [
    "crates/attack/tests/cells.rs",
    "crates/attack/tests/matrix.rs",
    "crates/experiments/src/lib.rs",
];

/// Selects these programs. With the package of the command, the libraries have the features that
/// they have in [`product::build`], and are not built again.
const REPLAY_SELECTION: [&str; 12] = [
    "--release",
    "--package",
    "ringfence-cli",
    "--package",
    "ringfence-attack",
    "--package",
    "ringfence-experiments",
    "--lib",
    "--test",
    "cells",
    "--test",
    "matrix",
];

/// Location of tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Next to the code that they test.
    Unit,
    /// In separate files, which see only the public interface.
    Outside,
}

/// A program that contains tests.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    kind: Kind,
    /// Its root source file.
    source: PathBuf,
    /// Directory of its package, in which it runs.
    package: PathBuf,
    path: PathBuf,
}

impl Program {
    fn is_replay(&self, root: &Path) -> bool {
        let is_its = |source: &&str| self.source == root.join(source);
        REPLAYS.iter().any(is_its)
    }
}

/// Builds all test programs.
pub(crate) fn build(repo: &Repo) -> anyhow::Result<String> {
    Ok(format!("{} programs", programs(repo, &SELECTION)?.len()))
}

/// Runs the programs of one kind that are not replays. A suite without any test that ran has
/// failed.
pub(crate) fn run(repo: &Repo, kind: Kind) -> anyhow::Result<String> {
    let mut programs = programs(repo, &SELECTION)?;
    programs.retain(|program| program.kind == kind && !program.is_replay(&repo.root));
    // Tests of the command replay traces, so they run the optimised one.
    let ringfence = match kind {
        Kind::Unit => None,
        Kind::Outside => Some(product::build(repo)?),
    };
    run_each(&repo.root, &programs, ringfence.as_deref())
}

/// Builds and runs the replays, all of [`REPLAYS`].
pub(crate) fn run_replays(repo: &Repo) -> anyhow::Result<String> {
    let mut programs = programs(repo, &REPLAY_SELECTION)?;
    programs.retain(|program| program.is_replay(&repo.root));
    ensure!(
        programs.len() == REPLAYS.len(),
        "built {programs:?}, not the programs of {REPLAYS:?}"
    );
    run_each(&repo.root, &programs, None)
}

fn run_each(root: &Path, programs: &[Program], ringfence: Option<&Path>) -> anyhow::Result<String> {
    let mut summary = Summary::default();
    let mut failed = Vec::new();
    for program in programs {
        let name = program.source.strip_prefix(root);
        output::line(&format!(
            "     Running {}",
            name.unwrap_or(&program.source).display()
        ));
        let path = program.path.to_string_lossy();
        let mut command = process::command(&program.package, &path);
        command.env("CARGO_MANIFEST_DIR", &program.package);
        command.envs(ringfence.map(|path| ("RINGFENCE", path)));
        // A failure of one program does not hide another.
        if let Err(error) = process::show(&mut command, |line| summary.add_line(line)) {
            failed.push(format!("{error:#}"));
        }
    }
    if !failed.is_empty() {
        bail!("{summary}: {}", failed.join("; "));
    }
    summary.ensure_some_ran()?;
    Ok(summary.to_string())
}

fn programs(repo: &Repo, selection: &[&str]) -> anyhow::Result<Vec<Program>> {
    let mut messages = Vec::new();
    let mut command = process::command(&repo.root, "cargo");
    command
        .args(["test", "--no-run"])
        .args(selection)
        .arg("--message-format=json-render-diagnostics");
    process::observe(&mut command, |line| messages.push(line.to_owned()))?;
    let mut programs = Vec::new();
    for message in json_lines(&messages) {
        programs.extend(program(&serde_json::from_str(message)?)?);
    }
    programs.sort_by(|one, other| one.source.cmp(&other.source));
    Ok(programs)
}

/// Returns the messages of cargo among `lines`, and shows the others: a background step also
/// receives standard error.
fn json_lines(lines: &[String]) -> impl Iterator<Item = &str> {
    lines.iter().map(String::as_str).filter(|line| {
        let is_message = line.starts_with('{');
        if !is_message {
            output::line(line);
        }
        is_message
    })
}

/// Returns the program that a message of cargo names; `None` if it has no tests.
fn program(message: &Value) -> anyhow::Result<Option<Program>> {
    let (Some(path), Some(true)) = (
        message["executable"].as_str(),
        message["profile"]["test"].as_bool(),
    ) else {
        return Ok(None);
    };
    let text = |value: &Value| value.as_str().map(PathBuf::from);
    let manifest = text(&message["manifest_path"]).context("no manifest")?;
    Ok(Some(Program {
        kind: match message["target"]["kind"][0].as_str() {
            Some("test") => Kind::Outside,
            _ => Kind::Unit,
        },
        source: text(&message["target"]["src_path"]).context("no source")?,
        package: manifest
            .parent()
            .map(Path::to_owned)
            .context("no package")?,
        path: path.into(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn artifact(kind: &str, test: bool, executable: Option<&str>) -> Value {
        json!({
            "reason": "compiler-artifact",
            "manifest_path": "/r/crates/a/Cargo.toml",
            "target": { "kind": [kind], "name": "a", "src_path": "/r/crates/a/tests/a.rs" },
            "profile": { "test": test },
            "executable": executable,
        })
    }

    #[test]
    fn a_program_that_fails_fails_the_suite_and_hides_no_other() {
        let directory = tempfile::tempdir().unwrap().keep();
        let program = |name: &str, text: &str| {
            let path = directory.join(name);
            // Another process writes the file. If this process opened it for writing, a thread that
            // forks could keep it open, and executing it would fail.
            let mut command = process::command(&directory, "sh");
            let write = r#"printf '#!/bin/sh\n%s\n' "$1" >"$0" && chmod 755 "$0""#;
            command.args(["-c", write]).arg(&path).arg(text);
            process::capture(&mut command).unwrap();
            Program {
                kind: Kind::Unit,
                source: path.clone(),
                package: directory.clone(),
                path,
            }
        };
        let result = "test result: ok. 2 passed; 0 failed; 0 ignored";
        let bad = program(
            "bad",
            "echo 'test result: FAILED. 1 passed; 1 failed'; exit 101",
        );
        let good = program("good", &format!("echo '{result}'"));
        let here = program(
            "here",
            &format!("[ $PWD = $CARGO_MANIFEST_DIR ] && echo '{result}'"),
        );
        let empty = program(
            "empty",
            "echo 'test result: ok. 0 passed; 0 failed; 0 ignored'",
        );
        let run =
            |programs: &[Program]| run_each(&directory, programs, None).map_err(|e| e.to_string());
        let error = run(&[bad, good]).unwrap_err();
        assert!(error.starts_with("3 passed, 1 failed: "), "{error}");
        assert!(error.ends_with("/bad: exit status: 101"), "{error}");
        assert_eq!(run(&[here]).as_deref(), Ok("2 passed"));
        assert!(run(&[empty]).is_err());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn standard_error_among_the_messages_is_no_message() {
        let lines = [
            "{\"reason\":\"a\"}",
            "    Finished `test` profile",
            "",
            "{}",
        ];
        let lines = lines.map(str::to_owned);
        let messages: Vec<_> = json_lines(&lines).collect();
        assert_eq!(messages, ["{\"reason\":\"a\"}", "{}"]);
    }

    #[test]
    fn programs_with_tests_are_recognised() {
        let found = |message: &Value| program(message).unwrap();
        let one = found(&artifact("test", true, Some("/t/a-1"))).unwrap();
        assert_eq!(one.kind, Kind::Outside);
        assert_eq!(one.package, Path::new("/r/crates/a"));
        assert_eq!(one.path, Path::new("/t/a-1"));
        for kind in ["lib", "bin", "example"] {
            let one = found(&artifact(kind, true, Some("/t/a-2"))).unwrap();
            assert_eq!(one.kind, Kind::Unit, "{kind}");
        }
        // A library, a program that tests start, and the end of the messages.
        assert_eq!(found(&artifact("lib", false, None)), None);
        assert_eq!(found(&artifact("bin", false, Some("/t/a"))), None);
        let end = json!({ "reason": "build-finished", "success": true });
        assert_eq!(found(&end), None);
    }
}
