//! A machine of QEMU without a guest.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::rc::Rc;

use anyhow::Context;
use ringfence_memory::Frames;
use ringfence_types::{PhysAddr, PhysRange, RequesterId};
use rustix::fs::MemfdFlags;

use crate::board::Board;
use crate::emulator::Emulator;
use crate::qtest::Qtest;
use crate::ram::GuestRam;
use crate::read_device::ReadDevice;
use crate::registers::QtestRegisters;
use crate::test_device::TestDevice;

/// Size of the RAM.
const RAM: u64 = 128 << 20;
/// The table frames lie in RAM from here: x86 has other things in the first MiB.
const FRAMES: u64 = 1 << 20;
/// The buffers of the devices lie in RAM from here to its end.
const BUFFERS: u64 = 32 << 20;

/// Distance between two BARs, at least the size of the largest one.
const BAR_STEP: u64 = 1 << 20;

/// The description of a machine.
#[derive(Debug, Clone, Copy)]
pub struct Setup<'a> {
    /// The machine type.
    pub board: Board,
    /// Options of the machine, such as `iommu=smmuv3`.
    pub options: &'a str,
    /// Further arguments of QEMU, such as the unit's `-device`.
    pub arguments: &'a [&'a str],
    /// Device and function numbers of the test devices on bus 0, which write.
    pub devices: &'a [u8],
    /// Device and function numbers of the reading devices on bus 0.
    pub readers: &'a [u8],
}

/// A running QEMU. Dropping it ends the process.
#[derive(Debug)]
pub struct Machine {
    process: Child,
    qtest: Rc<Qtest>,
    ram: Rc<GuestRam>,
    board: Board,
    devices: Vec<TestDevice>,
    readers: Vec<ReadDevice>,
    frames: Frames<Rc<GuestRam>>,
    buffers: PhysRange,
}

impl Machine {
    /// Starts QEMU and enables the test devices.
    ///
    /// # Errors
    /// QEMU is missing, rejects an argument, or does not answer.
    pub fn start(setup: &Setup<'_>) -> anyhow::Result<Self> {
        let base = PhysAddr::new(setup.board.ram_base());
        let part = |offset: u64, end: u64| {
            PhysRange::new(base.wrapping_add(offset), end - offset).context("no RAM")
        };
        let (ours, theirs) = UnixStream::pair()?;
        let qtest = Rc::new(Qtest::new(ours)?);
        let ram = Rc::new(GuestRam::new(part(0, RAM)?, Some(qtest.clone()))?);
        let log = rustix::fs::memfd_create("ringfence-judge-log", MemfdFlags::CLOEXEC)?;
        let process = spawn(setup, &ram, theirs, log.try_clone()?)?;
        let mut machine = Self {
            process,
            qtest,
            frames: Frames::new(ram.clone(), part(FRAMES, BUFFERS)?),
            buffers: part(BUFFERS, RAM)?,
            ram,
            board: setup.board,
            devices: Vec::new(),
            readers: Vec::new(),
        };
        machine.enable(setup).with_context(|| messages(log))?;
        Ok(machine)
    }

    fn enable(&mut self, setup: &Setup<'_>) -> anyhow::Result<()> {
        let mut bars = (0..).map(|number| self.board.bars() + number * BAR_STEP);
        let mut bar = || bars.next().unwrap_or(0);
        for devfn in setup.devices {
            let (qtest, requester) = (self.qtest.clone(), RequesterId::new((*devfn).into()));
            let device = TestDevice::enable(qtest, self.board, requester, bar())?;
            self.devices.push(device);
        }
        for devfn in setup.readers {
            let (qtest, requester) = (self.qtest.clone(), RequesterId::new((*devfn).into()));
            let device = ReadDevice::enable(qtest, self.board, requester, bar())?;
            self.readers.push(device);
        }
        // Boards put data there for firmware, such as a device tree.
        self.ram.clear(self.buffers)?;
        Ok(())
    }

    /// Returns the connection.
    pub fn qtest(&self) -> Rc<Qtest> {
        self.qtest.clone()
    }

    /// Returns the machine type.
    pub const fn board(&self) -> Board {
        self.board
    }

    /// Returns the RAM.
    pub fn ram(&self) -> Rc<GuestRam> {
        self.ram.clone()
    }

    /// Returns the test devices, in the order of the description.
    pub fn devices(&self) -> &[TestDevice] {
        &self.devices
    }

    /// Returns the reading devices, in the order of the description.
    pub fn readers(&self) -> &[ReadDevice] {
        &self.readers
    }

    /// Returns the registers of the unit at `base`.
    pub fn registers(&self, base: u64) -> QtestRegisters {
        QtestRegisters::new(self.qtest.clone(), base)
    }

    /// Returns the source of frames for tables and queues.
    pub const fn frames(&self) -> &Frames<Rc<GuestRam>> {
        &self.frames
    }

    /// Returns the part of RAM for buffers of devices.
    pub const fn buffers(&self) -> PhysRange {
        self.buffers
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts the process. Its standard input is the qtest socket.
fn spawn(
    setup: &Setup<'_>,
    ram: &GuestRam,
    socket: UnixStream,
    log: OwnedFd,
) -> anyhow::Result<Child> {
    let mut command = Emulator::find()?.command(setup.board.program());
    let mut machine = format!("{},memory-backend=ram", setup.board.machine());
    if !setup.options.is_empty() {
        machine = format!("{machine},{}", setup.options);
    }
    let memory = format!(
        "memory-backend-file,id=ram,size={RAM},mem-path={},share=on",
        ram.path()
    );
    command.args([
        "-machine",
        &machine,
        "-m",
        &format!("{RAM}B"),
        "-object",
        &memory,
    ]);
    command.args([
        "-chardev",
        "socket,id=qtest,fd=0",
        "-qtest",
        "chardev:qtest",
    ]);
    command.args(["-qtest-log", "none", "-accel", "qtest"]);
    command.args(["-display", "none", "-nodefaults"]);
    command.args(setup.arguments);
    for devfn in setup.devices {
        let device = format!("iommu-testdev,addr={:x}.{}", devfn >> 3, devfn & 7);
        command.args(["-device", &device]);
    }
    for devfn in setup.readers {
        let address = format!("addr={:x}.{}", devfn >> 3, devfn & 7);
        let device = format!("edu,{address},dma_mask={}", u64::MAX);
        command.args(["-device", &device]);
    }
    command.stdin(Stdio::from(OwnedFd::from(socket)));
    command.stdout(Stdio::null()).stderr(Stdio::from(log));
    command.spawn().context("cannot start QEMU")
}

/// Returns what QEMU printed.
fn messages(log: OwnedFd) -> String {
    let mut text = String::new();
    let mut log = File::from(log);
    let _ = log.rewind().and_then(|()| log.read_to_string(&mut text));
    format!("QEMU printed {text:?}")
}
