//! The software IOMMU judged by QEMU's own.
//!
//! QEMU's `intel-iommu` stands in front of a disk that lives here, and a stock Linux maps for that
//! disk. Each mapping that QEMU tells of (`DMA_MAP`) is put into the virtio-iommu device and the
//! software IOMMU of this crate, through which the disk then works. While the guest waits for the
//! disk, its processor is stopped, so that nothing changes, and random accesses are tried twice:
//! through the software IOMMU, and as `DMA_READ` or `DMA_WRITE`, which QEMU lets through its own
//! IOMMU by the tables that Linux wrote. Both have to reject it, or both let it through to the same
//! bytes.
//!
//! QEMU tells of a mapping that Linux made for writing only as one for reading and writing. A read
//! that only QEMU rejects is put down to that, and counted apart, if QEMU grants each page of it,
//! to a read or to a write of the bytes that are there.

mod cases;
mod comparison;
mod link;
mod monitor;
mod shadow_iommu;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use crate::access::SocketAccess;
use crate::counters::DeviceCounters;
use crate::guest::{PciSlot, QemuArgs};
use crate::server::StopSignal;
use crate::virtio::blk::Blk;

const SLOT: PciSlot = PciSlot(4);
const NAME: &str = "blk";
const MONITOR: &str = "monitor.sock";
const MEMORY_MIB: u32 = 256;

/// What is tried.
#[derive(Clone, Copy, Debug)]
pub struct DifferentialSettings {
    /// How many accesses.
    pub cases: u32,
    /// Which: the same seed gives the same choices, among what is mapped then.
    pub seed: u64,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DifferentialReport {
    /// Both let it through, to the same bytes.
    pub allowed: u32,
    /// Both rejected it.
    pub rejected: u32,
    /// Reads of what is mapped for writing only, which QEMU tells of as mapped for both.
    pub write_only_reads: u32,
    /// Those in which they differ.
    pub differing: Vec<String>,
    /// How many mappings there were at most.
    pub most_mapped: usize,
}

impl DifferentialReport {
    /// Accesses that were tried.
    pub fn cases(&self) -> u32 {
        let differing = u32::try_from(self.differing.len()).unwrap_or(u32::MAX);
        [
            self.allowed,
            self.rejected,
            self.write_only_reads,
            differing,
        ]
        .into_iter()
        .fold(0, u32::saturating_add)
    }
}

/// A judge at work.
#[derive(Debug)]
pub struct DifferentialTest {
    machine: QemuArgs,
    stop: StopSignal,
    thread: JoinHandle<io::Result<DifferentialReport>>,
    socket: PathBuf,
}

impl DifferentialTest {
    /// Listens in `dir` for a QEMU with the arguments of [`machine`](Self::machine).
    ///
    /// # Errors
    /// What opening the disk and listening meet.
    pub fn start(dir: &Path, disk: fs::File, settings: DifferentialSettings) -> io::Result<Self> {
        let monitor = dir.join(MONITOR);
        let machine = QemuArgs {
            dir: dir.to_owned(),
            access: SocketAccess::OwnUser,
            iommu: None,
            qemu_iommu: None,
            devices: vec![(SLOT, NAME)],
            memory: MEMORY_MIB,
            memory_file: None,
            processors: 1,
            icount: false,
            extra: vec![
                "-device".into(),
                "intel-iommu,intremap=off,caching-mode=on".into(),
                "-qmp".into(),
                format!("unix:{},server=on,wait=off", monitor.display()),
            ],
        };
        let socket = machine.socket(NAME);
        let listener = SocketAccess::OwnUser.listen(&socket)?;
        let counters = Arc::new(DeviceCounters::default());
        let disk = Blk::new(disk, false, Arc::clone(&counters))?;
        let stop = StopSignal::new()?;
        let told = stop.clone();
        let thread = thread::spawn(move || {
            let Some(stream) = told.accept(&listener, SocketAccess::OwnUser, |_| ())? else {
                return Ok(DifferentialReport::default());
            };
            comparison::Comparison::new(stream, disk, SLOT.address(), counters, monitor, settings)?
                .run(&told)
        });
        Ok(Self {
            machine,
            stop,
            thread,
            socket,
        })
    }

    /// The machine to boot.
    pub fn machine(&self) -> &QemuArgs {
        &self.machine
    }

    /// What else the kernel's command line has to say.
    pub const KERNEL_WORDS: &str = "intel_iommu=on";

    /// The guest has ended.
    ///
    /// # Errors
    /// What the conversation with QEMU met.
    pub fn finish(self) -> io::Result<DifferentialReport> {
        self.stop.stop();
        let report = self
            .thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the judge's thread panicked")));
        let _ = fs::remove_file(&self.socket);
        report
    }
}
