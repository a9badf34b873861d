//! Checks the statements of the virtio-iommu specification on QEMU's device and on Ringfence's.

mod options;
mod qemu;
mod report;
mod ringfence;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use ringfence_virtio_iommu_conformance::{STATEMENTS, Setup, Statement, Subject};

use report::{Column, Format};

/// Checks the statements of virtio 1.3, section 5.13, on virtio-iommu devices.
///
/// The exit status is 0 if each device satisfies all applicable statements of level MUST, SHOULD
/// and text, 1 if one fails, and 2 if a device cannot be tested.
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
    let mut output = std::io::stdout().lock();
    if arguments.list {
        write!(output, "{}", report::list(&statements))?;
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
    write!(output, "{}", report::render(format, &statements, &columns)).context("output")?;
    Ok(columns.iter().all(|column| column.conforms(&statements)))
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
    let make = |setup: &Setup| -> Result<Box<dyn Subject>, String> {
        Ok(match device {
            Device::Qemu => {
                let started = qemu::Qemu::start(&arguments.qemu, setup);
                Box::new(started.map_err(|error| error.to_string())?)
            }
            Device::Ringfence => Box::new(ringfence::Direct::new(setup)),
        })
    };
    let verdicts = statements.iter().map(|statement| statement.run(&make));
    Ok(Column {
        name,
        verdicts: verdicts.collect(),
    })
}
