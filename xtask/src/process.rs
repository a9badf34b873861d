//! Running other programs.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// How much debug information cargo has made of what is not optimised.
const DEBUG: &str = "CARGO_PROFILE_DEV_DEBUG";

/// A command that runs in `directory`, free of what cargo told this program about itself.
pub(crate) fn command(directory: &Path, program: &str) -> Command {
    let mut command = Command::new(program);
    command.current_dir(directory);
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
    if std::env::var_os(DEBUG).is_none() {
        // What fails here is read about, not debugged: names and lines. The rest would take three tenths of the time of building tests.
        command.env(DEBUG, "line-tables-only");
    }
    command
}

/// The command as a person would type it.
pub(crate) fn shown(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Whether `program` can be run at all.
pub(crate) fn available(program: &str, argument: &str) -> bool {
    Command::new(program)
        .arg(argument)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs `command` quietly and returns its standard output; a failure carries its standard error.
pub(crate) fn capture(command: &mut Command) -> anyhow::Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| shown(command))?;
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

/// Runs `command` with its output shown; standard output is also handed line by line to `observe`.
pub(crate) fn show(command: &mut Command, mut observe: impl FnMut(&str)) -> anyhow::Result<()> {
    println!("$ {}", shown(command));
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| shown(command))?;
    let stdout = child.stdout.take().context("standard output is piped")?;
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        observe(&line);
    }
    std::io::stdout().flush()?;
    let status = child.wait()?;
    if !status.success() {
        bail!("{}: {status}", shown(command));
    }
    Ok(())
}
