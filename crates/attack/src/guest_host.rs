//! A host of the para-virtual IOMMU with one guest of two devices.
//!
//! The testbed's guest has frames for all pages and sends only well-formed requests. This host has
//! limited memory, and its guest sends any bytes.

use std::rc::Rc;

use ringfence_hw::{UnitConfig, VtdUnit};
use ringfence_lab::LabError;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, ContextTables, Levels, SecondStage};
use ringfence_pviommu::backend::{
    Backend, BackendLimits, DeviceSlot, HardwareTables, IoTables, LastTable, OnDemand, SetupError,
};
use ringfence_pviommu::wire::{Config, Devid, Gpa, GuestPhysical, encode_map, encode_unmap};
use ringfence_types::{
    Access, AddressRange, Direction, DomainId, FrameSource, Iova, IovaRange, OutOfFrames, PageSize,
    PhysAddr, RequesterId,
};

use crate::bench::memory;

pub(crate) const PAGE: u64 = PageSize::Size4K.bytes();
/// The attacker's device.
pub(crate) const ATTACKER: Devid = Devid::new(0x10);
/// The victim's device.
pub(crate) const VICTIM: Devid = Devid::new(0x11);
/// First address of the window of both devices.
pub(crate) const WINDOW: u64 = 0x10_0000;
/// Bytes of the guest's memory, from address 0.
pub(crate) const GUEST_BYTES: u64 = 8 << 20;

/// Bytes of the window.
const WINDOW_BYTES: u64 = 64 << 20;
/// Most pages of a request.
const REQUEST_PAGES: u32 = 64;

/// Bytes of the host's memory.
const ARENA: u64 = 64 << 20;
/// First address of the frames for tables.
const TABLES: u64 = 16 << 20;
/// First address of the frames for the guest, after those for tables.
const GUEST: u64 = 32 << 20;
/// Domain of the guest's second stage.
const SECOND_STAGE: DomainId = DomainId::new(9);
/// Domains of the devices, by slot.
const DOMAINS: [DomainId; 2] = [DomainId::new(1), DomainId::new(2)];

/// A shared source of frames.
#[derive(Debug, Clone)]
pub(crate) struct Source(Rc<Frames<Rc<Arena>>>);

impl FrameSource for Source {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        self.0.alloc_zeroed()
    }

    fn free(&self, frame: PhysAddr) {
        self.0.free(frame);
    }
}

type Tables = HardwareTables<Rc<Arena>, Source, VtdUnit>;

/// The host. `K` is its pointer to the last table of the guest's second stage.
pub(crate) struct GuestHost<K: LastTable> {
    pub(crate) arena: Rc<Arena>,
    /// Frames for tables.
    pub(crate) tables: Source,
    /// Frames for the guest.
    pub(crate) frames: Source,
    pub(crate) backend: Backend<OnDemand<Rc<Arena>, Source, K>, Tables>,
    /// The TLBs of the guest's CPUs.
    pub(crate) processors: VtdUnit,
}

/// The configuration of the guest.
pub(crate) fn config() -> Result<Config, LabError> {
    let window = IovaRange::new(Iova::new(WINDOW), WINDOW_BYTES).ok_or(LabError::Internal(
        "the window of the guest host is no range",
    ))?;
    let devices = [ATTACKER, VICTIM].map(|device| device.get() as u32);
    let config = Config::new(window, REQUEST_PAGES, devices);
    config.map_err(|_| LabError::Internal("the configuration of the guest host is invalid"))
}

/// The guest's memory.
pub(crate) fn guest_memory() -> Result<AddressRange<GuestPhysical>, LabError> {
    let memory = AddressRange::new(Gpa::new(0), GUEST_BYTES);
    memory.ok_or(LabError::Internal("the guest's memory is no range"))
}

/// Creates memory with a source of frames for tables and one for the guest.
pub(crate) fn host_memory() -> Result<(Rc<Arena>, Source, Source), LabError> {
    let arena = Rc::new(Arena::new(ARENA)?);
    let source = |start, end| {
        let region = memory(start, end - start)?;
        Ok::<_, LabError>(Source(Rc::new(Frames::new(Rc::clone(&arena), region))))
    };
    let (tables, frames) = (source(TABLES, GUEST)?, source(GUEST, ARENA)?);
    Ok((arena, tables, frames))
}

impl<K: LastTable> GuestHost<K> {
    /// Creates the host. `unchecked` changes the devices' tables as a host without checks does,
    /// before the backend owns them.
    pub(crate) fn new(
        last: K,
        unchecked: impl FnOnce(&mut dyn IoTables),
    ) -> Result<Self, LabError> {
        let (arena, tables, frames) = host_memory()?;
        let (format, coherency) = (SecondStage::new(Levels::Four), Coherency::Coherent);
        let backing = OnDemand::new(
            Rc::clone(&arena),
            tables.clone(),
            frames.clone(),
            format,
            SECOND_STAGE,
            &[guest_memory()?],
            last,
            (),
        )
        .map_err(|error| match error {
            SetupError::Range => LabError::Internal("no second stage has the guest's memory"),
            SetupError::Table(error) => error.into(),
        })?;
        let mut hardware = HardwareTables::new(
            Rc::clone(&arena),
            tables.clone(),
            VtdUnit::vtd(&UnitConfig::UNCACHED),
            format,
            coherency,
            &DOMAINS,
        )?;
        let mut contexts = ContextTables::new(coherency, &*arena, &tables)?;
        for (slot, device) in (0..).zip([ATTACKER, VICTIM]) {
            let context = hardware
                .context(DeviceSlot::new(slot))
                .ok_or(LabError::Internal(
                    "a device of the guest host has no table",
                ))?;
            contexts.attach(&*arena, &tables, requester(device), &context)?;
        }
        unchecked(&mut hardware);
        let mut backend = Backend::new(config()?, BackendLimits::default(), backing, hardware);
        let unit = backend.tables().invalidator();
        unit.set_root_table(contexts.root());
        unit.enable();
        Ok(Self {
            arena,
            tables,
            frames,
            backend,
            processors: VtdUnit::vtd(&UnitConfig::UNCACHED),
        })
    }

    /// Returns the host address of a byte that the device accesses.
    pub(crate) fn reach(&mut self, device: Devid, giova: u64, access: Access) -> Option<PhysAddr> {
        let unit = self.backend.tables().invalidator();
        let found = unit.translate(&*self.arena, requester(device), Iova::new(giova), 1, access);
        found.ok().map(|found| found.first().start())
    }
}

fn requester(device: Devid) -> RequesterId {
    RequesterId::new(device.get() as u16)
}

/// Encodes a request that maps pages: addresses of the device, and of the guest.
pub(crate) fn map_request(
    device: Devid,
    direction: Direction,
    pages: &[(u64, u64)],
) -> Result<Vec<u8>, LabError> {
    let mut bytes = Vec::new();
    let pages = pages
        .iter()
        .map(|(giova, gpa)| (Iova::new(*giova), Gpa::new(*gpa)));
    let encoded = encode_map(&mut bytes, device, direction, pages);
    encoded.map_err(|_| LabError::Internal("no map request has this number of pages"))?;
    Ok(bytes)
}

/// Encodes a request that unmaps pages.
pub(crate) fn unmap_request(device: Devid, giovas: &[u64]) -> Result<Vec<u8>, LabError> {
    let mut bytes = Vec::new();
    let encoded = encode_unmap(&mut bytes, device, giovas.iter().map(|at| Iova::new(*at)));
    encoded.map_err(|_| LabError::Internal("no unmap request has this number of pages"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An empty request would be refused by every host, as if the host had found the attack.
    #[test]
    fn a_request_that_cannot_be_encoded_is_an_error() {
        let none = map_request(ATTACKER, Direction::ToDevice, &[]);
        assert!(matches!(none, Err(LabError::Internal(_))));
        let none = unmap_request(ATTACKER, &[]);
        assert!(matches!(none, Err(LabError::Internal(_))));
    }
}
