//! Selection of a guest's devices, and checks for incompatible options.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use crate::access::SocketAccess;
use crate::dma_fault_injection::InjectedDma;
use crate::host::HostPagePool;
use crate::limits::{GuestLimits, MIN_IOTLB_PAGES};
use crate::link::Address;
use crate::memory::{Locked, MemoryRules};
use crate::qemu::QemuIommu;
use crate::sandbox::SandboxProgram;
use crate::virtio::pviommu::InjectedReply;

pub(super) const SANDBOX_NEEDS_IOMMU: &str = "--disk mode=sandbox requires --iommu virtio or \
    --iommu pviommu, which grant the process its pages";
pub(super) const LOCK_NEEDS_PVIOMMU: &str = "--lock mapped requires a guest with --iommu pviommu";
pub(super) const POOL_NEEDS_PVIOMMU: &str =
    "--host-page-pool requires a guest with --iommu pviommu";

/// Selection of a guest's devices.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// Users who may connect to the devices.
    pub access: SocketAccess,
    /// Resource limits of the guest.
    pub limits: GuestLimits,
    /// The devices, by the protocol that connects them to QEMU.
    pub devices: GuestDevices,
}

/// The devices of a guest, by the protocol that connects them to QEMU.
#[derive(Clone, Debug)]
pub enum GuestDevices {
    /// Devices that QEMU reaches through vfio-user. Their IOMMU, if any, lives in this process.
    VfioUser(VfioUserDevices),
    /// A disk as a vhost-user back-end, which is the only device.
    VhostUser(VhostUserDisk),
}

impl Default for GuestDevices {
    fn default() -> Self {
        Self::VfioUser(VfioUserDevices::default())
    }
}

impl From<VfioUserDevices> for DeviceOptions {
    fn from(devices: VfioUserDevices) -> Self {
        Self {
            devices: GuestDevices::VfioUser(devices),
            ..Self::default()
        }
    }
}

impl From<VhostUserDisk> for DeviceOptions {
    fn from(disk: VhostUserDisk) -> Self {
        Self {
            devices: GuestDevices::VhostUser(disk),
            ..Self::default()
        }
    }
}

/// Devices that QEMU reaches through vfio-user.
#[derive(Clone, Debug, Default)]
pub struct VfioUserDevices {
    /// The IOMMU between the devices and the guest's memory.
    pub iommu: Iommu,
    /// The disk. `None` for no disk.
    pub disk: Option<Disk>,
    /// True for an entropy device.
    pub entropy: bool,
    /// Options of the network device. `None` for no network device.
    pub net: Option<NetOptions>,
    /// Rules for the guest's memory, and for the pages to lock. The daemon creates the memory file,
    /// if any, and removes it at its end.
    pub memory: MemoryRules,
}

/// The IOMMU of this process that translates the DMA of a guest's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Iommu {
    /// No IOMMU: devices can access all guest memory.
    None,
    /// The virtio-iommu, which Linux drives.
    Virtio {
        /// File that records the requests of the guest's IOMMU driver.
        requests: Option<PathBuf>,
        /// File that records the DMAs of the devices between maps and unmaps.
        dmas: Option<PathBuf>,
    },
    /// The para-virtual IOMMU, whose driver is this project's kernel module.
    Pviommu {
        /// Host optimisations: a pool of frames and a pointer to the last table.
        host_page_pool: HostPagePool,
        /// For tests: a wrong reply.
        inject_reply: Option<InjectedReply>,
    },
    /// The ring IOMMU, whose driver is a kernel module of this project.
    Ring,
}

impl Iommu {
    /// The para-virtual IOMMU, without optimisations of the host.
    pub const PVIOMMU: Self = Self::Pviommu {
        host_page_pool: HostPagePool::Off,
        inject_reply: None,
    };
}

impl Default for Iommu {
    fn default() -> Self {
        Self::Virtio {
            requests: None,
            dmas: None,
        }
    }
}

/// A disk, backed by an image file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Path of the image file.
    pub path: PathBuf,
    /// True if the disk is read-only.
    pub read_only: bool,
    /// Interface of the disk.
    pub bus: DiskBus,
    /// Process that serves the disk, and unit that translates its accesses.
    pub mode: DiskMode,
    /// For tests: illegal DMA by the disk.
    pub inject_dma: Vec<InjectedDma>,
}

impl Disk {
    /// Returns an emulated disk that the guest can write.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            read_only: false,
            bus: DiskBus::default(),
            mode: DiskMode::default(),
            inject_dma: Vec::new(),
        }
    }
}

/// Interface of a disk for its driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskBus {
    /// A virtio block device.
    #[default]
    Virtio,
    /// An NVMe controller with one namespace.
    Nvme,
}

/// Process that serves a disk, and unit that translates its accesses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskMode {
    /// This process serves the disk, and the software IOMMU translates its accesses.
    Emulated {
        /// Delay after each doorbell.
        delay: Option<Duration>,
    },
    /// This process serves the disk, and the hardware model translates its accesses, with tables
    /// in memory.
    Assigned {
        /// Delay after each doorbell.
        delay: Option<Duration>,
    },
    /// A sandboxed process serves the disk. It has only the pages that the IOMMU maps for the disk.
    Sandbox(SandboxProgram),
}

impl DiskMode {
    /// An assigned disk without delay.
    pub const ASSIGNED: Self = Self::Assigned { delay: None };

    fn is_emulated(&self) -> bool {
        matches!(self, Self::Emulated { .. })
    }

    pub(super) fn is_assigned(&self) -> bool {
        matches!(self, Self::Assigned { .. })
    }
}

impl Default for DiskMode {
    fn default() -> Self {
        Self::Emulated { delay: None }
    }
}

/// A disk that is a vhost-user back-end. QEMU's IOMMU translates its accesses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserDisk {
    /// QEMU's IOMMU in front of the disk.
    pub iommu: QemuIommu,
    /// Path of the image file.
    pub path: PathBuf,
    /// True if the disk is read-only.
    pub read_only: bool,
    /// For tests: illegal DMA by the disk.
    pub inject_dma: Vec<InjectedDma>,
}

/// Options of a network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetOptions {
    /// Address of its link.
    pub link: Address,
    /// Number of queue pairs, at most [`MAX_PAIRS`](crate::virtio::net::MAX_PAIRS).
    pub pairs: NonZeroU16,
    /// MAC address. `None` for a random locally administered one.
    pub mac: Option<[u8; 6]>,
}

impl DeviceOptions {
    /// Checks the combinations that the types allow.
    ///
    /// # Errors
    /// A message for the user, which names the options of the command line.
    pub fn check(&self) -> Result<(), &'static str> {
        let broken = match &self.devices {
            GuestDevices::VfioUser(devices) => devices.first_conflict(&self.limits),
            GuestDevices::VhostUser(disk) => disk.first_conflict(&self.limits),
        };
        broken.map_or(Ok(()), Err)
    }
}

impl VfioUserDevices {
    fn first_conflict(&self, limits: &GuestLimits) -> Option<&'static str> {
        let usual = GuestLimits::default();
        let is_pviommu = matches!(self.iommu, Iommu::Pviommu { .. });
        let has_iommu = self.iommu != Iommu::None;
        let is_ring = self.iommu == Iommu::Ring;
        let is_emulated = |disk: &Disk| disk.mode.is_emulated();
        let records_dmas = matches!(self.iommu, Iommu::Virtio { dmas: Some(_), .. });
        let is_sandboxed = |disk: &Disk| matches!(disk.mode, DiskMode::Sandbox(_));
        let sandboxed = self.disk.as_ref().is_some_and(is_sandboxed);
        let is_nvme = |disk: &Disk| disk.bus == DiskBus::Nvme;
        let injects = |class| {
            let disk = self.disk.as_ref();
            disk.is_some_and(|disk| disk.inject_dma.contains(&class))
        };
        let rules = [
            (sandboxed && !has_iommu, SANDBOX_NEEDS_IOMMU),
            (
                records_dmas
                    && self
                        .disk
                        .as_ref()
                        .is_some_and(|disk| !disk.mode.is_emulated()),
                "--record-dmas requires --disk mode=emulated: the IOMMU of this process does not \
                see the DMAs of another disk",
            ),
            (
                injects(InjectedDma::Foreign) && sandboxed,
                "--inject-dma foreign requires --disk mode=emulated or mode=assigned: the entropy \
                device cannot act for a disk in another process",
            ),
            (
                injects(InjectedDma::Foreign) && !self.entropy,
                "--inject-dma foreign requires --rng, the device that accesses the disk's buffers",
            ),
            (
                injects(InjectedDma::Foreign) && !has_iommu,
                "--inject-dma foreign requires --iommu virtio or --iommu pviommu",
            ),
            (
                injects(InjectedDma::AfterRevoke) && !sandboxed,
                "--inject-dma after-revoke requires --disk mode=sandbox",
            ),
            (
                self.memory.locked == Locked::Mapped && !is_pviommu,
                LOCK_NEEDS_PVIOMMU,
            ),
            (
                (is_pviommu || is_ring)
                    && (limits.mappings, limits.domains, limits.tables)
                        != (usual.mappings, usual.domains, usual.tables),
                "--max-mappings, --max-domains and --max-tables limit the virtio-iommu: remove \
                them, or choose --iommu virtio",
            ),
            (
                is_ring && !self.disk.as_ref().is_none_or(is_emulated),
                "--iommu riommu requires --disk mode=emulated",
            ),
            (
                is_ring && injects(InjectedDma::Foreign),
                "--inject-dma foreign requires --iommu virtio or --iommu pviommu",
            ),
            (
                sandboxed && self.disk.as_ref().is_some_and(is_nvme),
                "--disk bus=nvme requires mode=emulated or mode=assigned",
            ),
            (
                injects(InjectedDma::KeepReading)
                    && (sandboxed || self.disk.as_ref().is_some_and(is_nvme)),
                "--inject-dma keep-reading requires --disk bus=virtio, and mode=emulated or \
                mode=assigned",
            ),
        ];
        let broken = rules.into_iter().find(|(broken, _)| *broken);
        broken.map(|(_, why)| why)
    }
}

impl VhostUserDisk {
    fn first_conflict(&self, limits: &GuestLimits) -> Option<&'static str> {
        let rules = [
            (
                limits.iotlb_pages < MIN_IOTLB_PAGES,
                "--max-iotlb has to be at least 1024: a vhost-user back-end keeps the translations \
                of its longest access",
            ),
            (
                self.inject_dma.contains(&InjectedDma::Foreign),
                "--inject-dma foreign requires --iommu virtio or --iommu pviommu",
            ),
            (
                self.inject_dma.contains(&InjectedDma::AfterRevoke),
                "--inject-dma after-revoke requires --disk mode=sandbox",
            ),
        ];
        let broken = rules.into_iter().find(|(broken, _)| *broken);
        broken.map(|(_, why)| why)
    }
}
