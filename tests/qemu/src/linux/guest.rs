//! A Linux guest that uses devices behind an IOMMU and then keeps its mappings.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use ringfence_types::{PhysAddr, PhysRange};
use rustix::fs::MemfdFlags;

use super::monitor::Monitor;
use crate::board::Board;
use crate::emulator::Emulator;
use crate::ram::GuestRam;

/// Size of the RAM.
const RAM: u64 = 512 << 20;
/// Size of each disk; the guest reads and writes the first 16 MiB.
const DISK: u64 = 16 << 20;
/// Capacity for the trace, which the guest writes to a disk.
const RESULTS: u64 = 32 << 20;
/// A guest takes 20 to 80 seconds; on a busy machine longer.
const LIMIT: Duration = Duration::from_secs(480);
/// Devices that the guest uses, each with its slot on bus 0. `{one}` to `{three}` are disks.
const DEVICES: &str = "\
    -drive if=none,id=one,{one} -device nvme,drive=one,serial=one,addr=4 \
    -netdev user,id=n1,restrict=on -device e1000e,netdev=n1,addr=5 \
    -netdev user,id=n2,restrict=on \
    -device virtio-net-pci,netdev=n2,iommu_platform=on,disable-legacy=on,addr=6 \
    -drive if=none,id=two,{two} \
    -device virtio-blk-pci,drive=two,serial=workload,iommu_platform=on,disable-legacy=on,addr=7 \
    -drive if=none,id=three,{three} \
    -device ahci,id=sata,addr=8 -device ide-hd,drive=three,bus=sata.0 \
    -drive if=none,id=results,{results} \
    -device virtio-blk-pci,drive=results,serial=results,disable-legacy=on,addr=9";

/// A machine with an IOMMU.
#[derive(Debug, Clone, Copy)]
pub struct LinuxMachine<'a> {
    /// Debian's name of the architecture.
    pub architecture: &'a str,
    /// The machine type.
    pub board: Board,
    /// Arguments of QEMU: options of the machine, and the IOMMU.
    pub arguments: &'a [&'a str],
    /// Parameters of the kernel, with the console.
    pub parameters: &'a str,
}

/// A stopped guest. Dropping it ends QEMU.
#[derive(Debug)]
pub struct Guest {
    process: Child,
    monitor: Monitor,
    ram: GuestRam,
    /// Lines that the guest's init process printed.
    console: Vec<String>,
    trace: String,
}

impl Guest {
    /// Boots the guest, waits until it has used its devices, and stops it.
    ///
    /// # Errors
    /// QEMU or the guest was not fetched, or the guest reports a failure.
    pub fn run(machine: &LinuxMachine<'_>) -> anyhow::Result<Self> {
        let base = PhysAddr::new(machine.board.ram_base());
        let ram = GuestRam::new(PhysRange::new(base, RAM).context("no RAM")?, None)?;
        let (qmp, their_qmp) = UnixStream::pair()?;
        let (serial, their_serial) = UnixStream::pair()?;
        let results = file("ringfence-results", RESULTS)?;
        let disks = [(); 3].map(|()| file("ringfence-disk", DISK));
        let mut command = command(machine, &ram)?;
        for argument in DEVICES.split_whitespace() {
            let argument = argument.replace("{one}", &drive(&disks[0])?);
            let argument = argument.replace("{two}", &drive(&disks[1])?);
            let argument = argument.replace("{three}", &drive(&disks[2])?);
            command.arg(argument.replace("{results}", &path(&results)));
        }
        command.stdin(Stdio::from(OwnedFd::from(their_qmp)));
        command.stdout(Stdio::from(OwnedFd::from(their_serial)));
        let process = command.spawn().context("cannot start QEMU")?;
        // Their ends of the sockets must be closed here, so that the end of QEMU is seen.
        drop(command);
        let mut guest = Self {
            process,
            monitor: Monitor::new(qmp),
            ram,
            console: Vec::new(),
            trace: String::new(),
        };
        guest.wait(serial)?;
        guest.monitor.execute("stop")?;
        guest.trace = text(results)?;
        Ok(guest)
    }

    /// Reads the console until the guest has done its work.
    fn wait(&mut self, serial: UnixStream) -> anyhow::Result<()> {
        self.monitor.execute("qmp_capabilities")?;
        for line in BufReader::new(serial).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).trim().to_owned();
            if line == "ready" {
                let failures = self.console.iter().filter(|line| line.starts_with("FAIL"));
                let failures: Vec<&str> = failures.map(String::as_str).collect();
                ensure!(failures.is_empty(), "the guest reports {failures:?}");
                return Ok(());
            }
            self.console.push(line);
        }
        bail!("the guest ended early: {:#?}", self.console)
    }

    /// Returns the lines of the console.
    pub fn console(&self) -> &[String] {
        &self.console
    }

    /// Returns the guest's trace since boot.
    pub fn trace(&self) -> &str {
        &self.trace
    }

    /// Returns the guest's RAM.
    pub const fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Reads a register of the IOMMU.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn register(&mut self, at: u64, bytes: u32) -> anyhow::Result<u64> {
        self.monitor.register(PhysAddr::new(at), bytes)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // QEMU is a child of `timeout`, which ends with it.
        let _ = self.monitor.execute("quit");
        let _ = self.process.wait();
    }
}

fn command(machine: &LinuxMachine<'_>, ram: &GuestRam) -> anyhow::Result<Command> {
    let emulator = Emulator::find()?;
    let guest = emulator.linux(machine.architecture);
    ensure!(
        guest.join("initramfs").is_file(),
        "no Linux guest in {}: run `cargo run -p ringfence-guest-harness --example fetch_linux`, \
         or set QEMU_LINUX to a directory with the guests",
        guest.display()
    );
    let mut command = emulator.command_within(LIMIT, machine.board.program());
    let memory = format!(
        "memory-backend-file,id=ram,size={RAM},mem-path={},share=on",
        ram.path()
    );
    let parameters = format!(
        "{} quiet panic=-1 ipv6.disable=1 iommu.passthrough=0 iommu.strict=1 \
         trace_event=dma:*,iommu:map,iommu:unmap trace_buf_size=16M",
        machine.parameters
    );
    command.args(["-object", &memory, "-m", &format!("{RAM}B")]);
    command.args(machine.arguments);
    command.args(["-accel", "tcg", "-smp", "1", "-nodefaults", "-no-reboot"]);
    command.args(["-display", "none", "-append", &parameters]);
    command.arg("-kernel").arg(guest.join("kernel"));
    command.arg("-initrd").arg(guest.join("initramfs"));
    command.args(["-chardev", "socket,id=qmp,fd=0", "-qmp", "chardev:qmp"]);
    command.args(["-chardev", "socket,id=console,fd=1"]);
    command.args(["-serial", "chardev:console"]);
    Ok(command)
}

/// Creates a file in memory.
fn file(name: &str, bytes: u64) -> anyhow::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, bytes)?;
    Ok(file)
}

fn drive(disk: &anyhow::Result<OwnedFd>) -> anyhow::Result<String> {
    match disk {
        Ok(disk) => Ok(path(disk)),
        Err(error) => bail!("no disk: {error:#}"),
    }
}

fn path(file: &OwnedFd) -> String {
    let (process, file) = (std::process::id(), file.as_raw_fd());
    format!("format=raw,file=/proc/{process}/fd/{file},file.locking=off")
}

/// Returns the text at the beginning of a disk.
fn text(disk: OwnedFd) -> anyhow::Result<String> {
    let mut disk = File::from(disk);
    let mut bytes = Vec::new();
    disk.rewind()?;
    disk.read_to_end(&mut bytes)?;
    let end = bytes.iter().position(|byte| *byte == 0);
    bytes.truncate(end.context("the trace does not fit the disk")?);
    Ok(String::from_utf8(bytes)?)
}
