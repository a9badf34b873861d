//! Checks the statements of the virtio-iommu specification on QEMU's device and on Ringfence's.

mod options;
mod qemu;
mod report;
mod ringfence;

use std::cell::Cell;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use ringfence_virtio_iommu_conformance::{STATEMENTS, Setup, Statement, Subject, Verdict};

use report::{Column, Format};

/// Checks the statements of virtio 1.3, section 5.13, on virtio-iommu devices.
///
/// The exit status is 0 if each device satisfies all applicable statements of level MUST, SHOULD
/// and text, 1 if one fails, and 2 if a device cannot be created or tested.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Device to test; repeat it for a table of several.
    #[arg(
        long = "device",
        value_name = "DEVICE",
        required_unless_present = "list"
    )]
    devices: Vec<Device>,
    /// QEMU for RISC-V, version 9 or later: the program, or a directory with Debian's packages,
    /// unpacked.
    #[arg(long, value_name = "PATH", default_value = "qemu-system-riscv64")]
    qemu: PathBuf,
    /// Checks only statements whose ids contain the text.
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Prints the verdicts as JSON.
    #[arg(long, conflicts_with = "markdown")]
    json: bool,
    /// Prints a table in Markdown.
    #[arg(long)]
    markdown: bool,
    /// Lists the statements and tests nothing.
    #[arg(long)]
    list: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// `virtio-iommu-pci` of QEMU, over qtest.
    Qemu,
    /// The crate ringfence-virtio-iommu.
    Ringfence,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Tests the devices. Returns true if all conform.
fn run(arguments: &Arguments) -> anyhow::Result<bool> {
    let wanted = STATEMENTS.iter();
    let statements: Vec<&Statement> = wanted
        .filter(|statement| statement.id.contains(&arguments.only))
        .collect();
    if statements.is_empty() {
        anyhow::bail!(
            "no statement's id contains `{}`: see --list",
            arguments.only
        );
    }
    if arguments.list {
        print(&report::list(&statements))?;
        return Ok(true);
    }
    let columns = arguments.devices.iter();
    let columns: Vec<Column> = columns
        .map(|device| test(*device, arguments, &statements))
        .collect::<anyhow::Result<_>>()?;
    let format = match (arguments.json, arguments.markdown) {
        (true, _) => Format::Json,
        (_, true) => Format::Markdown,
        _ => Format::Text,
    };
    print(&report::render(format, &statements, &columns))?;
    Ok(columns.iter().all(|column| column.conforms(&statements)))
}

/// Writes to standard output. A reader that has closed the pipe (`| head`) is no error.
fn print(text: &str) -> anyhow::Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("standard output"),
    }
}

/// Checks the statements on one device.
fn test(
    device: Device,
    arguments: &Arguments,
    statements: &[&Statement],
) -> anyhow::Result<Column> {
    let name = match device {
        Device::Qemu => {
            // Without a device, every statement would be not applicable.
            qemu::Qemu::start(&arguments.qemu, &qemu::ANY)?;
            format!("QEMU {}", qemu::version(&arguments.qemu)?)
        }
        Device::Ringfence => format!("Ringfence {}", env!("CARGO_PKG_VERSION")),
    };
    let verdicts = verdicts(statements, |setup| {
        Ok(match device {
            Device::Qemu => Box::new(qemu::Qemu::start(&arguments.qemu, setup)?),
            Device::Ringfence => Box::new(ringfence::Direct::new(setup)),
        })
    })?;
    Ok(Column { name, verdicts })
}

/// Checks the statements on devices that `create` returns. A device may lack [`Setup::limits`]: its
/// statements are not applicable.
///
/// # Errors
/// `create` failed without limits.
fn verdicts(
    statements: &[&Statement],
    create: impl Fn(&Setup) -> anyhow::Result<Box<dyn Subject>>,
) -> anyhow::Result<Vec<Verdict>> {
    let failure = Cell::new(None);
    let make = |setup: &Setup| {
        create(setup).map_err(|error| {
            let reason = format!("{error:#}");
            if setup.limits.is_none() {
                failure.set(Some(error));
            }
            reason
        })
    };
    let run = |statement: &&Statement| {
        let verdict = statement.run(&make);
        match failure.take() {
            None => Ok(verdict),
            Some(error) => Err(error.context(format!("{}: cannot create a device", statement.id))),
        }
    };
    statements.iter().map(run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statements(text: &str) -> Vec<&'static Statement> {
        let all = STATEMENTS.iter();
        all.filter(|statement| statement.id.contains(text))
            .collect()
    }

    #[test]
    fn a_device_that_cannot_be_created_does_not_conform() {
        let started = Cell::new(0);
        let found = verdicts(&statements("attach-"), |setup| {
            started.set(started.get() + 1);
            if started.get() < 3 {
                return Ok(Box::new(ringfence::Direct::new(setup)));
            }
            let error = io::Error::from(io::ErrorKind::WouldBlock);
            Err(error).context("cannot start qemu")
        });
        let error = format!("{:#}", found.unwrap_err());
        let cause = format!(
            "cannot create a device: cannot start qemu: {}",
            io::ErrorKind::WouldBlock
        );
        assert!(error.starts_with("attach-"), "{error}");
        assert!(error.ends_with(&cause), "{error}");
        assert_eq!(started.get(), 3, "the run ends");
    }

    #[test]
    fn a_device_may_lack_limits() {
        let statements = statements("caps-");
        let found = verdicts(&statements, |setup| {
            anyhow::ensure!(setup.limits.is_none(), "no caps");
            Ok(Box::new(ringfence::Direct::new(setup)))
        });
        let expected = vec![Verdict::NotApplicable("no caps".into()); statements.len()];
        assert_eq!(found.unwrap(), expected);
    }
}
