//! Runs other programs.

use std::cell::Cell;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;

use anyhow::{Context, anyhow, bail};

use crate::{output, usage};

/// Priority of the programs that a thread runs.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Priority {
    /// That of this program.
    #[default]
    Normal,
    /// Idle CPU time only.
    Lowest,
}

thread_local! {
    static PRIORITY: Cell<Priority> = const { Cell::new(Priority::Normal) };
}

/// Sets the priority of all commands that this thread makes from now on.
pub(crate) fn set_priority(priority: Priority) {
    PRIORITY.set(priority);
}

/// Variables with the seeds of property tests (proptest) and of random schedules (shuttle) that fix
/// none themselves. A run of the steps must not fail by a rare case that no change has caused. A
/// plain `cargo test` tries other cases each time.
const SEEDS: [(&str, &str); 2] = [
    ("PROPTEST_RNG_SEED", "20261129"),
    ("SHUTTLE_RANDOM_SEED", "20261129"),
];

/// Returns a command that runs in `directory` at this thread's priority, without the variables that
/// cargo set for this program, and with the seeds of tests.
pub(crate) fn command(directory: &Path, program: &str) -> Command {
    let mut command = match PRIORITY.get() {
        Priority::Normal => Command::new(program),
        Priority::Lowest => {
            let mut nice = Command::new("nice");
            nice.args(["-n", "19", program]);
            nice
        }
    };
    command.current_dir(directory);
    let unset = SEEDS
        .iter()
        .filter(|(name, _)| std::env::var_os(name).is_none());
    command.envs(unset.copied());
    for (name, _) in std::env::vars_os() {
        let inherited = name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_")
                || name.starts_with("CARGO_MANIFEST_")
                || name == "CARGO_PRIMARY_PACKAGE"
        });
        if inherited {
            command.env_remove(name);
        }
    }
    command
}

/// Returns the command as a person would type it.
pub(crate) fn shown(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Returns true if `program` runs successfully with `argument`.
pub(crate) fn available(program: &str, argument: &str) -> bool {
    Command::new(program)
        .arg(argument)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs `command` and returns its output.
pub(crate) fn collect(command: &mut Command) -> anyhow::Result<Output> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| shown(command))?;
    let mut stderr = child.stderr.take().context("standard error is piped")?;
    let errors = thread::spawn(move || {
        let mut bytes = Vec::new();
        stderr.read_to_end(&mut bytes).map(|_| bytes)
    });
    let mut stdout = Vec::new();
    let mut pipe = child.stdout.take().context("standard output is piped")?;
    pipe.read_to_end(&mut stdout)?;
    let stderr = errors.join().map_err(|_| anyhow!("a reader panicked"))??;
    let status = usage::wait(&mut child)?;
    Ok(Output {
        status,
        stdout,
        stderr,
    })
}

/// Runs `command` quietly and returns its standard output; an error includes its standard error.
pub(crate) fn capture(command: &mut Command) -> anyhow::Result<String> {
    let output = collect(command)?;
    if !output.status.success() {
        bail!(
            "{}: {}\n{}",
            shown(command),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
    }
    String::from_utf8(output.stdout).context("output is not UTF-8")
}

/// Runs `command` and shows its output; passes standard output line by line to `see`.
pub(crate) fn show(command: &mut Command, mut see: impl FnMut(&str)) -> anyhow::Result<()> {
    observe(command, |line| {
        output::line(line);
        see(line);
    })?;
    std::io::stdout().flush()?;
    Ok(())
}

/// Runs `command`, shows its standard error, and passes its standard output line by line to `see`.
/// If this thread keeps its output, `see` receives standard error too. The error of a failed
/// command quotes the lines with failures among those that `see` receives.
pub(crate) fn observe(command: &mut Command, mut see: impl FnMut(&str)) -> anyhow::Result<()> {
    output::line(&format!("$ {}", shown(command)));
    let (reader, writer) = std::io::pipe()?;
    if output::is_kept() {
        command.stderr(writer.try_clone()?);
    }
    let child = command.stdin(Stdio::null()).stdout(writer).spawn();
    // The pipe ends when all copies of its write end are closed.
    command.stdout(Stdio::null()).stderr(Stdio::inherit());
    let mut child = child.with_context(|| shown(command))?;
    let mut failures = String::new();
    for line in BufReader::new(reader).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        if reports_failure(&line) && failures.len() < MAX_FAILURES {
            failures.push_str(&format!("\n    {}", line.trim()));
        }
        see(&line);
    }
    let status = usage::wait(&mut child)?;
    if !status.success() {
        bail!("{}: {status}{failures}", shown(command));
    }
    Ok(())
}

/// Most bytes of quoted lines in an error, but for the last line.
const MAX_FAILURES: usize = 2000;

/// Returns true for the lines in which guest scripts, Rust's test runner, pytest and the check of
/// the page report a failure.
fn reports_failure(line: &str) -> bool {
    let line = line.trim_end();
    let is_start = line.starts_with("FAIL") || line.starts_with("ERROR ");
    is_start || line.ends_with("... FAILED") || line.contains("panicked at")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_quotes_the_failures() {
        let script = "echo 'test a ... ok'; echo 'test b ... FAILED'; echo 'FAIL c (3 s)'; exit 2";
        let mut command = Command::new("sh");
        let error = observe(command.args(["-c", script]), |_| ()).unwrap_err();
        let error = error.to_string();
        assert!(
            error.ends_with("exit status: 2\n    test b ... FAILED\n    FAIL c (3 s)"),
            "{error}"
        );
    }

    #[test]
    fn background_output_is_whole_at_low_priority() {
        let said = thread::spawn(|| {
            output::keep();
            set_priority(Priority::Lowest);
            let mut lines = Vec::new();
            let mut command = command(Path::new("/"), "sh");
            command.args(["-c", "echo out; echo err >&2; nice; exit 3"]);
            let error = show(&mut command, |line| lines.push(line.to_owned())).unwrap_err();
            assert!(error.to_string().ends_with("exit status: 3"), "{error}");
            assert_eq!(lines, ["out", "err", "19"]);
            output::take()
        });
        let said = said.join().unwrap();
        assert!(said.starts_with("$ nice -n 19 sh"), "{said}");
        assert!(said.ends_with("out\nerr\n19\n"), "{said}");
    }
}
