//! Executable documents: runs the commands shown in README.md and docs/*.md and compares their
//! output.
//!
//! A block fenced as `console` is a session in the root of the repository. A line that begins with
//! `$ ` is a command for bash. The lines up to the next command are its standard output. Without
//! such lines, only the exit status is checked. `...` on its own line matches any number of lines,
//! and `[..]` any text within a line. `? 2` as the last line means that the command exits with 2.
//! Other blocks (`sh`, `text`) are not run.

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::output;
use crate::process;
use crate::product;
use crate::repo::Repo;
use crate::rules;
use crate::violation::Violation;

/// Maximum run time of a shown command; longer than the documents promise.
const LIMIT_SECONDS: u32 = 600;

/// A command, and its output and exit status in the document.
#[derive(Debug, Default, PartialEq, Eq)]
struct ShownCommand {
    line: usize,
    command: String,
    output: Vec<String>,
    status: i32,
}

/// Runs every shown command.
pub(crate) fn run(repo: &Repo) -> anyhow::Result<String> {
    let mut sessions: Vec<(PathBuf, ShownCommand)> = Vec::new();
    for path in repo.files()? {
        let document = path == Path::new("README.md")
            || path.starts_with("docs") && path.extension().is_some_and(|e| e == "md");
        if document {
            let shown = parse(&repo.read(&path)?);
            sessions.extend(shown.into_iter().map(|shown| (path.clone(), shown)));
        }
    }
    anyhow::ensure!(!sessions.is_empty(), "no document shows a command");
    let path = search_path(repo)?;
    let mut found = Vec::new();
    for (document, shown) in &sessions {
        output::line(&format!("$ {}", shown.command));
        if let Err(reason) = execute(repo, shown, Some(&path)) {
            found.push(Violation::error(
                document,
                shown.line,
                format!("{reason:#}"),
            ));
        }
    }
    rules::verdict(&found)?;
    Ok(format!("{} commands", sessions.len()))
}

/// Builds the command line tool and puts its directory first on the path.
fn search_path(repo: &Repo) -> anyhow::Result<std::ffi::OsString> {
    let command = product::build(repo)?;
    let directory = command.parent().context("no directory")?.to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    Ok(std::env::join_paths(
        std::iter::once(directory).chain(std::env::split_paths(&path)),
    )?)
}

fn execute(
    repo: &Repo,
    shown: &ShownCommand,
    path: Option<&std::ffi::OsString>,
) -> anyhow::Result<()> {
    anyhow::ensure!(
        !shown.command.contains("cargo xtask test"),
        "a document that runs cannot run everything: fence it as `sh`"
    );
    let mut command = process::command(&repo.root, "timeout");
    command
        .arg(LIMIT_SECONDS.to_string())
        .args(["bash", "-euo", "pipefail", "-c", &shown.command]);
    if let Some(path) = path {
        command.env("PATH", path);
    }
    let output = process::collect(&mut command)?;
    let status = output.status.code().unwrap_or(-1);
    let stdout = String::from_utf8_lossy(&output.stdout);
    anyhow::ensure!(
        status == shown.status,
        "`{}` exits with {status} instead of {}\n{}",
        shown.command,
        shown.status,
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    let actual: Vec<&str> = stdout.lines().map(str::trim_end).collect();
    let expected: Vec<&str> = shown.output.iter().map(String::as_str).collect();
    anyhow::ensure!(
        expected.is_empty() || lines_match(&expected, &actual),
        "`{}` prints something else:\n{}",
        shown.command,
        stdout.trim_end()
    );
    Ok(())
}

fn parse(text: &str) -> Vec<ShownCommand> {
    let mut all: Vec<ShownCommand> = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((_, line)) = lines.next() {
        if line.trim_end() != "```console" {
            // Skip other blocks as a whole, so that a fence quoted inside one is not parsed as a
            // fence.
            if line.starts_with("```") {
                lines.by_ref().find(|(_, line)| line.trim_end() == "```");
            }
            continue;
        }
        let mut session: Vec<ShownCommand> = Vec::new();
        while let Some((index, line)) = lines.next().filter(|(_, line)| line.trim_end() != "```") {
            if let Some(first) = line.strip_prefix("$ ") {
                let mut command = first.to_owned();
                while command.ends_with('\\') {
                    let Some((_, more)) = lines.next() else { break };
                    command.push('\n');
                    command.push_str(more);
                }
                session.push(ShownCommand {
                    line: index + 1,
                    command,
                    ..ShownCommand::default()
                });
            } else if let Some(shown) = session.last_mut() {
                shown.output.push(line.trim_end().to_owned());
            }
        }
        for shown in &mut session {
            shown.finish();
        }
        all.append(&mut session);
    }
    all
}

impl ShownCommand {
    /// Removes the exit status from the output, and blank lines that only separate commands.
    fn finish(&mut self) {
        self.drop_blank_end();
        let status = self
            .output
            .last()
            .and_then(|line| line.strip_prefix("? "))
            .and_then(|status| status.parse().ok());
        if let Some(status) = status {
            self.status = status;
            self.output.pop();
            self.drop_blank_end();
        }
    }

    fn drop_blank_end(&mut self) {
        while self.output.last().is_some_and(String::is_empty) {
            self.output.pop();
        }
    }
}

fn lines_match(expected: &[&str], actual: &[&str]) -> bool {
    match expected {
        [] => actual.is_empty(),
        ["...", rest @ ..] => (0..=actual.len()).any(|skip| lines_match(rest, &actual[skip..])),
        [first, rest @ ..] => actual
            .split_first()
            .is_some_and(|(line, more)| line_matches(first, line) && lines_match(rest, more)),
    }
}

fn line_matches(expected: &str, actual: &str) -> bool {
    match expected.split_once("[..]") {
        None => expected == actual,
        Some((before, after)) => actual.strip_prefix(before).is_some_and(|rest| {
            rest.char_indices()
                .map(|(index, _)| index)
                .chain([rest.len()])
                .any(|index| line_matches(after, &rest[index..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_parsed() {
        let text =
            "# T\n```sh\n$ not run\n```\n```console\n$ one\na\n\n$ two \\\n  more\n? 2\n```\n";
        let shown = parse(text);
        assert_eq!(
            shown,
            [
                ShownCommand {
                    line: 6,
                    command: "one".into(),
                    output: vec!["a".into()],
                    status: 0
                },
                ShownCommand {
                    line: 9,
                    command: "two \\\n  more".into(),
                    output: vec![],
                    status: 2
                },
            ]
        );
    }

    #[test]
    fn shown_output_matches_with_its_gaps() {
        for (expected, actual, matches) in [
            (&["a"][..], &["a"][..], true),
            (&["a"], &["b"], false),
            (&["a"], &["a", "b"], false),
            (&["a", "..."], &["a", "b", "c"], true),
            (&["...", "c"], &["a", "b", "c"], true),
            (&["...", "c"], &["a"], false),
            (&["n [..] s"], &["n 12.5 s"], true),
            (&["n [..] s"], &["n 12.5 ms"], false),
            (&["n [..] s"], &["m 12.5 s"], false),
            (&["[..]é[..]"], &["äéü"], true),
        ] {
            assert_eq!(
                lines_match(expected, actual),
                matches,
                "{expected:?} {actual:?}"
            );
        }
    }

    #[test]
    fn commands_are_checked_by_status_and_output() {
        let repo = Repo::find().unwrap();
        for (command, output, status, passes) in [
            ("echo a", "a", 0, true),
            ("echo a", "b", 0, false),
            ("exit 2", "", 2, true),
            ("exit 2", "", 0, false),
            ("false | true", "", 1, true),
            ("true; cargo xtask test", "", 0, false),
        ] {
            let shown = ShownCommand {
                line: 1,
                command: command.into(),
                output: output.lines().map(str::to_owned).collect(),
                status,
            };
            assert_eq!(execute(&repo, &shown, None).is_ok(), passes, "{command}");
        }
    }
}
