//! Differential test of the software IOMMU against QEMU's.
//!
//! QEMU runs a stock Linux with its `intel-iommu` in front of a disk that this process serves, and
//! Linux maps memory for that disk. Each mapping that QEMU sends (`DMA_MAP`) is also entered into
//! this crate's virtio-iommu and software IOMMU, through which the disk works. While the guest
//! waits for the disk, the test stops its CPU, so that nothing changes. It then tries each random
//! access twice. One goes through the software IOMMU. The other is a `DMA_READ` or `DMA_WRITE`,
//! which QEMU translates by its own IOMMU and the tables that Linux wrote. Both must reject the
//! access, or both must allow it and reach the same bytes.
//!
//! QEMU reports a write-only mapping of Linux as readable and writable. A read that only QEMU
//! rejects is counted separately as caused by that, if QEMU denies the read of a page of it, and
//! grants each such page for a write of the bytes already there.

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

use ringfence_live::access::SocketAccess;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::qemu::{PciSlot, QemuArgs};
use ringfence_live::server::StopSignal;
use ringfence_live::virtio::blk::Blk;

const SLOT: PciSlot = PciSlot(4);
const NAME: &str = "blk";
const MONITOR: &str = "monitor.sock";
const MEMORY_MIB: u32 = 256;

/// Settings of a differential test.
#[derive(Clone, Copy, Debug)]
pub struct DifferentialSettings {
    /// Number of accesses.
    pub cases: u32,
    /// Seed of the random choices. The same seed makes the same choices among the same mappings.
    pub seed: u64,
}

/// Result of a differential test.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DifferentialReport {
    /// Accesses that both allowed, to the same bytes.
    pub allowed: u32,
    /// Accesses that both rejected.
    pub rejected: u32,
    /// Reads of write-only mappings, which QEMU reports as readable and writable.
    pub write_only_reads: u32,
    /// Accesses with different results.
    pub differing: Vec<String>,
    /// Largest number of mappings at one time.
    pub most_mapped: usize,
}

impl DifferentialReport {
    /// Returns the number of accesses tried.
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

/// A running differential test.
#[derive(Debug)]
pub struct DifferentialTest {
    machine: QemuArgs,
    stop: StopSignal,
    thread: JoinHandle<io::Result<DifferentialReport>>,
    socket: PathBuf,
}

impl DifferentialTest {
    /// Listens in `dir` for a QEMU started with the arguments of [`machine`](Self::machine).
    ///
    /// # Errors
    /// Opening the disk or listening failed.
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
        let signal = stop.clone();
        let thread = thread::spawn(move || {
            let Some(stream) = signal.accept(&listener, SocketAccess::OwnUser, |_| ())? else {
                return Ok(DifferentialReport::default());
            };
            comparison::Comparison::new(stream, disk, SLOT.address(), counters, monitor, settings)?
                .run(&signal)
        });
        Ok(Self {
            machine,
            stop,
            thread,
            socket,
        })
    }

    /// Returns the arguments of the virtual machine to boot.
    pub fn machine(&self) -> &QemuArgs {
        &self.machine
    }

    /// Ends the test after the guest has ended, and returns the result.
    ///
    /// # Errors
    /// The connection to QEMU failed.
    pub fn finish(self) -> io::Result<DifferentialReport> {
        self.stop.stop();
        let report = self
            .thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the comparison thread panicked")));
        let _ = fs::remove_file(&self.socket);
        report
    }
}
