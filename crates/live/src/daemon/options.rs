//! Selection of a guest's devices, and checks for incompatible options.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use crate::access::SocketAccess;
use crate::dma_fault_injection::InjectedDma;
use crate::guest::QemuIommu;
use crate::host::HostPagePool;
use crate::limits::{GuestLimits, MIN_IOTLB_PAGES};
use crate::link::Address;
use crate::memory::{Locked, MemoryRules};
use crate::sandbox::SandboxProgram;
use crate::virtio::pviommu::InjectedReply;

pub(super) const LOCK_NEEDS_PVIOMMU: &str =
    "what is locked is what the para-virtual IOMMU's driver maps, and there is none";
pub(super) const POOL_NEEDS_PVIOMMU: &str = "the pool of frames and the pointer to the last table \
    are the para-virtual IOMMU's, and there is none";

/// Selection of a guest's devices.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// Users who may connect to the devices.
    pub access: SocketAccess,
    /// Image file of the disk. `None` for no disk.
    pub disk: Option<PathBuf>,
    /// True if the disk is read-only.
    pub read_only: bool,
    /// Program of the disk's sandboxed process. `None` to serve the disk in this process.
    pub sandbox: Option<SandboxProgram>,
    /// True if the hardware model translates the disk's accesses, with tables in memory.
    pub assigned: bool,
    /// Host optimisations of the para-virtual IOMMU: a pool of frames and a pointer to the last
    /// table.
    pub host_page_pool: HostPagePool,
    /// Delay of the disk after each doorbell.
    pub delay: Option<Duration>,
    /// For tests: illegal DMA by the disk.
    pub inject_dma: Vec<InjectedDma>,
    /// File that records the requests of the guest's IOMMU driver.
    pub requests: Option<PathBuf>,
    /// True for no IOMMU: devices can access all guest memory.
    pub untranslated: bool,
    /// QEMU's IOMMU in front of the disk, which is then a vhost-user back-end and the only device.
    pub vhost_user: Option<QemuIommu>,
    /// True for the para-virtual IOMMU, whose driver is this project's kernel module.
    pub paravirtual: bool,
    /// For tests: a wrong reply by the para-virtual IOMMU.
    pub inject_reply: Option<InjectedReply>,
    /// Resource limits of the guest.
    pub limits: GuestLimits,
    /// Rules for the guest's memory, and for the pages to lock. The daemon creates the memory file,
    /// if any, and removes it at its end.
    pub memory: MemoryRules,
    /// True for an entropy device.
    pub entropy: bool,
    /// Options of the network device. `None` for no network device.
    pub net: Option<NetOptions>,
}

impl DeviceOptions {
    /// Checks that the options are compatible.
    ///
    /// # Errors
    /// The reason, as a message for the user.
    pub fn check(&self) -> Result<(), &'static str> {
        let disk = self.disk.is_some();
        let apart = self.sandbox.is_some();
        let foreign = self.vhost_user.is_some();
        // `own`: an IOMMU of this process; `virtio`: the virtio-iommu.
        let own = !self.untranslated && !foreign;
        let virtio = own && !self.paravirtual;
        let injected = |class| self.inject_dma.contains(&class);
        let usual = GuestLimits::default();
        let rules = [
            (
                foreign && self.untranslated,
                "a vhost-user back-end stands behind QEMU's IOMMU, and there would be none",
            ),
            (
                foreign && self.paravirtual,
                "a vhost-user back-end stands behind QEMU's IOMMU, not behind the para-virtual one",
            ),
            (
                self.untranslated && self.paravirtual,
                "there is the para-virtual IOMMU or there is none",
            ),
            (
                foreign && (self.entropy || self.net.is_some()),
                "only the disk can be a vhost-user back-end",
            ),
            (
                foreign && !disk,
                "only the disk can be a vhost-user back-end, and there is none",
            ),
            (
                foreign && self.limits.iotlb_pages < MIN_IOTLB_PAGES,
                "a vhost-user back-end with fewer than 1024 pages cannot keep those of its longest \
                access",
            ),
            (
                self.requests.is_some() && !virtio,
                "what is written down is what the virtio-iommu's driver asks for, and there is no \
                virtio-iommu",
            ),
            (self.read_only && !disk, "there is no disk to be read-only"),
            (
                apart && !disk,
                "there is no disk to be in a process of its own",
            ),
            (
                !self.inject_dma.is_empty() && !disk,
                "it is the disk that misbehaves, and there is none",
            ),
            (
                apart && !own,
                "a process of its own is granted what an IOMMU of ours maps, and there is none",
            ),
            (
                self.assigned && !disk,
                "it is the disk that the hardware translates, and there is none",
            ),
            (
                self.assigned && foreign,
                "a vhost-user back-end's accesses are translated by QEMU's IOMMU, not by the model \
                of the hardware",
            ),
            (
                self.assigned && apart,
                "a disk in a process of its own is granted its pages, and nothing translates its \
                accesses",
            ),
            (
                self.delay.is_some() && !disk,
                "it is the disk that is late, and there is none",
            ),
            (
                self.delay.is_some() && (apart || foreign),
                "only a disk that is served here, and by its registers, can be late",
            ),
            (
                apart && injected(InjectedDma::Foreign),
                "a disk in a process of its own has no other device to misbehave for it",
            ),
            (
                injected(InjectedDma::Foreign) && !self.entropy,
                "the entropy device misbehaves as another device than the disk, and there is none",
            ),
            (
                injected(InjectedDma::Foreign) && !own,
                "another device's misbehaviour is tried behind an IOMMU of ours, and there is none",
            ),
            (
                injected(InjectedDma::AfterRevoke) && !apart,
                "only a disk in a process of its own can use what was revoked",
            ),
            (
                self.inject_reply.is_some() && !self.paravirtual,
                "it is the para-virtual IOMMU that answers wrongly, and there is none",
            ),
            (
                foreign && self.memory != MemoryRules::default(),
                "a vhost-user back-end takes sealed memory only, and locks none of it",
            ),
            (
                self.memory.locked == Locked::Mapped && !self.paravirtual,
                LOCK_NEEDS_PVIOMMU,
            ),
            (
                self.paravirtual
                    && (
                        self.limits.mappings,
                        self.limits.domains,
                        self.limits.tables,
                    ) != (usual.mappings, usual.domains, usual.tables),
                "mappings, domains and tables are limited for the virtio-iommu, and there is none",
            ),
            (
                self.host_page_pool == HostPagePool::On && !self.paravirtual,
                POOL_NEEDS_PVIOMMU,
            ),
        ];
        let broken = rules.into_iter().find(|(broken, _)| *broken);
        broken.map_or(Ok(()), |(_, why)| Err(why))
    }
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
