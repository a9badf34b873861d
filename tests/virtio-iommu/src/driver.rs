//! A driver that can send any request.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use ringfence_types::{Access, Iova, IovaRange};

use super::{Failure, Make, Setup, Subject};
use ringfence_virtio_iommu::spec::*;
use ringfence_virtio_iommu::{BypassPolicy, Options, ReservedRegion, ReservedRegionKind};

pub(super) const PAGE: u64 = 4096;
pub(super) const READ: u32 = VIRTIO_IOMMU_MAP_F_READ;
pub(super) const WRITE: u32 = VIRTIO_IOMMU_MAP_F_WRITE;
pub(super) const BOTH: u32 = READ | WRITE;
/// Two endpoints that exist, and one that does not.
pub(super) const ONE: u32 = 0x20;
pub(super) const TWO: u32 = 0x21;
pub(super) const NOBODY: u32 = 0x99;
/// Fills replies before the device writes them.
pub(super) const UNTOUCHED: u8 = 0xee;

const fn region(start: u64, last: u64, kind: ReservedRegionKind) -> ReservedRegion {
    ReservedRegion {
        range: const_range(start, last),
        kind,
    }
}

const fn const_range(start: u64, last: u64) -> IovaRange {
    match IovaRange::inclusive(Iova::new(start), Iova::new(last)) {
        Some(range) => range,
        None => const_range(0, u64::MAX),
    }
}

/// Reserved regions of endpoint `TWO`.
pub(super) const DOORBELLS: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);
pub(super) const RESERVED: (u64, u64) = (0x80_0000, 0x8f_ffff);

const ENDPOINTS: &[(u32, &[ReservedRegion])] = &[
    (ONE, &[]),
    (
        TWO,
        &[
            region(RESERVED.0, RESERVED.1, ReservedRegionKind::Reserved),
            region(DOORBELLS.0, DOORBELLS.1, ReservedRegionKind::Msi),
        ],
    ),
];

/// 4 KiB pages, no access before attachment, bypass domains, PROBE, no MMIO, two endpoints.
pub(super) fn usual() -> Setup {
    Setup {
        options: Options {
            unattached: BypassPolicy::DriverDecides {
                bypass_at_first: false,
            },
            ..Options::default()
        },
        endpoints: ENDPOINTS,
    }
}

/// Returns an error with the violated requirement unless `holds`.
pub(super) const fn ensure(holds: bool, what: &'static str) -> Result<(), Failure> {
    if holds {
        Ok(())
    } else {
        Err(Failure::Broken(what))
    }
}

/// The driver of one device.
pub(super) struct Driver {
    pub(super) subject: Box<dyn Subject>,
}

impl Driver {
    /// Creates a driver that has accepted all features.
    pub(super) fn new(make: Make<'_>, setup: &Setup) -> Result<Self, Failure> {
        let mut driver = Self::reset(make, setup)?;
        driver.accept_all();
        Ok(driver)
    }

    /// Creates a driver that has accepted no features.
    pub(super) fn reset(make: Make<'_>, setup: &Setup) -> Result<Self, Failure> {
        let subject = make(setup).ok_or(Failure::NotApplicable)?;
        Ok(Self { subject })
    }

    /// Creates a driver with endpoint `ONE` in domain 1.
    pub(super) fn attached(make: Make<'_>, setup: &Setup) -> Result<Self, Failure> {
        let mut driver = Self::new(make, setup)?;
        let status = driver.attach(1, ONE);
        ensure(status == VIRTIO_IOMMU_S_OK, "an endpoint can be attached")?;
        Ok(driver)
    }

    pub(super) fn accept_all(&mut self) {
        let offered = self.subject.offered();
        self.subject.accept(offered);
    }

    /// Sends one request. Returns the used length and the content of the reply buffer.
    pub(super) fn send(&mut self, readable: &[u8], room: usize) -> (usize, Vec<u8>) {
        let reply = self.send_at_once(readable, room);
        self.subject.idle();
        reply
    }

    /// Like [`send`](Self::send), but does not wait for the device to become idle.
    pub(super) fn send_at_once(&mut self, readable: &[u8], room: usize) -> (usize, Vec<u8>) {
        let mut reply = vec![UNTOUCHED; room];
        let used = self.subject.request(readable, &mut reply);
        (used, reply)
    }

    /// Sends a request with a buffer for a tail only. Returns the status.
    pub(super) fn status(&mut self, readable: &[u8]) -> u8 {
        let (_, reply) = self.send(readable, TAIL_BYTES);
        reply.first().copied().unwrap_or(UNTOUCHED)
    }

    pub(super) fn attach(&mut self, domain: u32, endpoint: u32) -> u8 {
        self.status(&attach(domain, endpoint, 0, 0))
    }

    pub(super) fn attach_bypass(&mut self, domain: u32, endpoint: u32) -> u8 {
        self.status(&attach(domain, endpoint, VIRTIO_IOMMU_ATTACH_F_BYPASS, 0))
    }

    pub(super) fn detach(&mut self, domain: u32, endpoint: u32) -> u8 {
        self.status(&detach(domain, endpoint, 0))
    }

    pub(super) fn map(&mut self, domain: u32, start: u64, last: u64, to: u64, flags: u32) -> u8 {
        self.status(&map(domain, start, last, to, flags))
    }

    /// Maps one page of domain 1 for reads and writes.
    pub(super) fn map_page(&mut self, start: u64, to: u64) -> Result<(), Failure> {
        let status = self.map(1, start, start + (PAGE - 1), to, BOTH);
        ensure(status == VIRTIO_IOMMU_S_OK, "a page can be mapped")
    }

    pub(super) fn unmap(&mut self, domain: u32, start: u64, last: u64) -> u8 {
        self.status(&unmap(domain, start, last))
    }

    pub(super) fn read(&mut self, endpoint: u32, iova: u64) -> Option<u64> {
        self.subject.access(endpoint, iova, Access::Read)
    }

    pub(super) fn write(&mut self, endpoint: u32, iova: u64) -> Option<u64> {
        self.subject.access(endpoint, iova, Access::Write)
    }

    pub(super) fn config(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        self.subject.read_config(0, &mut bytes);
        bytes
    }

    pub(super) fn bypass(&self) -> u8 {
        let mut byte = [0];
        self.subject.read_config(CONFIG_BYPASS, &mut byte);
        let [value] = byte;
        value
    }
}

fn request(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    for field in fields {
        bytes.extend_from_slice(field);
    }
    bytes
}

pub(super) fn attach(domain: u32, endpoint: u32, flags: u32, reserved: u32) -> Vec<u8> {
    let fields = [domain, endpoint, flags, reserved].map(u32::to_le_bytes);
    let [domain, endpoint, flags, reserved] = &fields;
    request(VIRTIO_IOMMU_T_ATTACH, &[domain, endpoint, flags, reserved])
}

pub(super) fn detach(domain: u32, endpoint: u32, reserved: u64) -> Vec<u8> {
    let (domain, endpoint) = (domain.to_le_bytes(), endpoint.to_le_bytes());
    let reserved = reserved.to_le_bytes();
    request(VIRTIO_IOMMU_T_DETACH, &[&domain, &endpoint, &reserved])
}

pub(super) fn map(domain: u32, start: u64, last: u64, to: u64, flags: u32) -> Vec<u8> {
    let (domain, flags) = (domain.to_le_bytes(), flags.to_le_bytes());
    let [start, last, to] = &[start, last, to].map(u64::to_le_bytes);
    request(VIRTIO_IOMMU_T_MAP, &[&domain, start, last, to, &flags])
}

pub(super) fn unmap(domain: u32, start: u64, last: u64) -> Vec<u8> {
    let domain = domain.to_le_bytes();
    let [start, last] = &[start, last].map(u64::to_le_bytes);
    request(VIRTIO_IOMMU_T_UNMAP, &[&domain, start, last, &[0; 4]])
}

pub(super) fn probe(endpoint: u32) -> Vec<u8> {
    request(VIRTIO_IOMMU_T_PROBE, &[&endpoint.to_le_bytes(), &[0; 64]])
}
