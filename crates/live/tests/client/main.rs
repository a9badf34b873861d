//! A scripted client, mostly hostile, that tests the protocol, the devices and the sockets without
//! QEMU.
#![allow(missing_docs)]

mod assigned;
mod bus_master;
mod disk;
mod guest;
mod handover;
mod hostile;
mod interrupts;
mod links;
mod memory;
mod net;
mod options;
mod private;
mod pviommu;
mod pviommu_driver;
mod pviommu_rings;
mod rig;
mod rings;
mod sockets;
mod translated;
mod vhost_user;

/// Environment variable of a process that [`alone`] started.
const ALONE: &str = "RF_ALONE";

/// Returns a command that runs only the ignored test `name`.
fn process_of(name: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command
}

/// Runs the ignored test `name` in its own process, where it must pass.
fn alone(name: &str) {
    passes(process_of(name).env(ALONE, "1"));
}

/// Runs a command of [`process_of`], whose test must pass.
fn passes(command: &mut std::process::Command) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Returns true in a process that [`alone`] started.
fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}
