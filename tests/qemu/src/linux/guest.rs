//! A Linux guest that uses devices behind an IOMMU and then keeps its mappings.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
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
    /// An archive that the kernel unpacks after the initramfs; may be empty.
    pub archive: &'a [u8],
}

/// Two recordings of the same time: by the command `trace record`, and by an instance of tracefs
/// that was set up by hand.
#[derive(Debug)]
pub struct Recordings {
    /// The command's trace.
    pub command: String,
    /// The instance's trace.
    pub control: String,
}

/// Offsets of the recordings on the disk `results`, as in the guest's init script.
const COMMAND_AT: usize = 16 << 20;
const CONTROL_AT: usize = 24 << 20;

/// A stopped guest. Dropping it ends QEMU.
#[derive(Debug)]
pub struct Guest {
    process: Child,
    monitor: Monitor,
    ram: GuestRam,
    /// Lines that the guest's init process printed.
    console: Vec<String>,
    /// The disk `results`.
    results: Vec<u8>,
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
        let initramfs = initramfs(machine)?;
        let mut command = command(machine, &ram)?;
        command.arg("-initrd").arg(proc_path(&initramfs));
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
            results: Vec::new(),
            trace: String::new(),
        };
        guest.wait(serial)?;
        guest.monitor.execute("stop")?;
        let mut results = File::from(results);
        results.rewind()?;
        results.read_to_end(&mut guest.results)?;
        guest.trace = guest.text(0, COMMAND_AT)?;
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

    /// Returns the recordings, which exist if the machine's archive has the command.
    ///
    /// # Errors
    /// A recording is missing or too large.
    pub fn recordings(&self) -> anyhow::Result<Recordings> {
        Ok(Recordings {
            command: self.text(COMMAND_AT, CONTROL_AT)?,
            control: self.text(CONTROL_AT, self.results.len())?,
        })
    }

    /// Returns the text that begins at `start` of the disk and ends before `end`.
    fn text(&self, start: usize, end: usize) -> anyhow::Result<String> {
        let bytes = self.results.get(start..end).context("no such part")?;
        let end = bytes.iter().position(|byte| *byte == 0);
        let text = bytes.get(..end.context("a trace does not fit its part")?);
        Ok(String::from_utf8(text.unwrap_or_default().to_vec())?)
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

/// Returns a file in memory: the guest's initramfs, followed by the machine's archive.
fn initramfs(machine: &LinuxMachine<'_>) -> anyhow::Result<OwnedFd> {
    let guest = Emulator::find()?.linux(machine.architecture);
    let bytes = std::fs::read(guest.join("initramfs")).with_context(|| {
        format!(
            "no Linux guest in {}: run `cargo run -p ringfence-guest-harness --example \
             fetch_linux`, or set QEMU_LINUX to a directory with the guests",
            guest.display()
        )
    })?;
    let mut both = File::from(file("ringfence-initramfs", 0)?);
    both.write_all(&bytes)?;
    both.write_all(machine.archive)?;
    Ok(both.into())
}

fn command(machine: &LinuxMachine<'_>, ram: &GuestRam) -> anyhow::Result<Command> {
    let emulator = Emulator::find()?;
    let guest = emulator.linux(machine.architecture);
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
    format!("format=raw,file={},file.locking=off", proc_path(file))
}

/// Returns a path by which a child opens the file.
fn proc_path(file: &OwnedFd) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}
