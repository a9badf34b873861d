//! `trace record` on an arm64 kernel behind an SMMUv3: the command, built for arm64 and linked
//! statically, records in the guest. It must see exactly the events of an instance of tracefs that
//! the guest's init script sets up by hand.
//!
//! `RINGFENCE_ARM64` names the command. `cargo xtask targets` builds it and runs this test.

use ringfence_guest_harness::archive_with_command;
use ringfence_qemu_judge::Board;
use ringfence_qemu_judge::linux::{Guest, LinuxMachine};

/// The recorded program reads 100 blocks from an NVMe disk, and each is mapped and unmapped.
const LEAST_EVENTS: usize = 400;

/// Returns the events in order, without their times: process, CPU, flags, and what happened.
fn events(trace: &str) -> Vec<String> {
    let lines = trace.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (before, event) = line.split_once(": ").unwrap();
            let (process, _time) = before.rsplit_once(' ').unwrap();
            format!("{}: {event}", process.trim())
        })
        .collect()
}

#[test]
#[ignore = "needs the command for arm64: `cargo xtask targets`"]
fn arm64_records_its_own_mappings() {
    let command = std::env::var_os("RINGFENCE_ARM64").expect("RINGFENCE_ARM64 names the command");
    let machine = LinuxMachine {
        architecture: "arm64",
        board: Board::ArmVirt,
        arguments: &[
            "-machine",
            "virt,iommu=smmuv3,gic-version=3,memory-backend=ram",
            "-cpu",
            "max,pauth=off",
        ],
        parameters: "console=ttyAMA0",
        archive: &archive_with_command(&std::fs::read(command).unwrap()),
    };
    let guest = Guest::run(&machine).unwrap();
    println!("{}", guest.console().join("\n"));
    let recordings = guest.recordings().unwrap();
    let (command, control) = (events(&recordings.command), events(&recordings.control));
    println!(
        "{} events by the command, {} by hand",
        command.len(),
        control.len()
    );
    assert!(command.len() >= LEAST_EVENTS, "{} events", command.len());
    assert_eq!(command, control);
}
