//! A host with one guest whose memory gets its frames on demand, and requests of that guest.

use std::rc::Rc;

use ringfence_hw::{UnitConfig, VtdUnit};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, Levels, SecondStage};
use ringfence_pviommu::backend::{Backend, BackendLimits, HardwareTables, LastTable, OnDemand};
use ringfence_pviommu::wire::{Config, Devid, Gpa, Status, encode_map, encode_unmap};
use ringfence_types::{
    AddressRange, Direction, DomainId, FrameSource, Iova, IovaRange, OutOfFrames, PhysAddr,
    PhysRange,
};

use ringfence_lab::LabError;

pub(super) const PAGE: u64 = 4096;
pub(super) const DEVICE: Devid = Devid::new(8);
const WINDOW: u64 = 1 << 32;
/// 32 MiB of guest memory: 16 last-level tables.
pub(super) const GUEST_PAGES: u64 = 8 << 10;
/// Maximum pages per request.
pub(super) const PAGES_MAX: u32 = 1024;

/// Frame source of the host.
#[derive(Debug, Clone)]
pub(super) struct FixtureFrames(Rc<Frames<Rc<Arena>>>);

impl FrameSource for FixtureFrames {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        self.0.alloc_zeroed()
    }

    fn free(&self, frame: PhysAddr) {
        self.0.free(frame);
    }
}

pub(super) type FixtureHost<K> = Backend<
    OnDemand<Rc<Arena>, FixtureFrames, K>,
    HardwareTables<Rc<Arena>, FixtureFrames, VtdUnit>,
>;

/// A host with one guest that has one device and no frames yet.
pub(super) fn host<K: LastTable>(last: K) -> Result<(FixtureHost<K>, FixtureFrames), LabError> {
    let arena = Rc::new(Arena::new(256 << 20).map_err(|_| LabError::Internal("a host's memory"))?);
    let source = |start, bytes| {
        let region = PhysRange::new(PhysAddr::new(start), bytes);
        let region = region.ok_or(LabError::Internal("a host's memory"))?;
        Ok::<_, LabError>(FixtureFrames(Rc::new(Frames::new(
            Rc::clone(&arena),
            region,
        ))))
    };
    let (tables, frames) = (source(1 << 20, 63 << 20)?, source(64 << 20, 192 << 20)?);
    let format = SecondStage::new(Levels::Four);
    let memory = AddressRange::new(Gpa::new(0), GUEST_PAGES * PAGE);
    let memory = memory.ok_or(LabError::Internal("a guest's memory"))?;
    let backing = OnDemand::new(
        Rc::clone(&arena),
        tables.clone(),
        frames.clone(),
        format,
        DomainId::new(9),
        &[memory],
        last,
        (),
    );
    let unit = VtdUnit::vtd(&UnitConfig::UNCACHED);
    let domains = [DomainId::new(1)];
    let io_tables = HardwareTables::new(arena, tables, unit, format, Coherency::Coherent, &domains);
    let io_tables = io_tables.map_err(|_| LabError::Internal("a host's tables"))?;
    let config = IovaRange::new(Iova::new(WINDOW), 1 << 32).and_then(|window| {
        let id = u32::try_from(DEVICE.get()).ok()?;
        Config::new(window, PAGES_MAX, [id]).ok()
    });
    let config = config.ok_or(LabError::Internal("a configuration"))?;
    let backing = backing.map_err(|_| LabError::Internal("a guest's memory"))?;
    let backend = Backend::new(config, BackendLimits::default(), backing, io_tables);
    Ok((backend, frames))
}

pub(super) fn giova(slot: u64) -> Iova {
    Iova::new(WINDOW + slot * PAGE)
}

pub(super) fn gpa(page: u64) -> Gpa {
    Gpa::new(page % GUEST_PAGES * PAGE)
}

/// Encodes a request that maps guest pages: pairs of a slot of the window and a page.
pub(super) fn map(pairs: &[(u64, u64)]) -> Result<Vec<u8>, LabError> {
    let mut bytes = Vec::new();
    let pairs = pairs.iter().map(|(slot, page)| (giova(*slot), gpa(*page)));
    let encoded = encode_map(&mut bytes, DEVICE, Direction::Bidirectional, pairs);
    encoded.map_err(|_| LabError::Internal("a request"))?;
    Ok(bytes)
}

pub(super) fn unmap(slots: &[u64]) -> Result<Vec<u8>, LabError> {
    let mut bytes = Vec::new();
    let encoded = encode_unmap(&mut bytes, DEVICE, slots.iter().copied().map(giova));
    encoded.map_err(|_| LabError::Internal("a request"))?;
    Ok(bytes)
}

/// Sends a request and runs maintenance.
///
/// # Errors
/// The host did not answer with success.
pub(super) fn ask<K: LastTable>(host: &mut FixtureHost<K>, request: &[u8]) -> Result<(), LabError> {
    let status = host.handle(request);
    host.maintain();
    match status {
        Status::Ok => Ok(()),
        _ => Err(LabError::Internal("a sound request was refused")),
    }
}

/// Sequence of the guest pages that buffers use.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pattern {
    /// Cycles through this many consecutive pages.
    Few(u64),
    /// All of memory, in order.
    InOrder,
    /// All of memory, in scattered order.
    Scattered,
}

impl Pattern {
    pub(super) fn page(self, number: u64) -> u64 {
        match self {
            Self::Few(pages) => number % pages.max(1),
            Self::InOrder => number % GUEST_PAGES,
            // Knuth's multiplier is odd, so every page occurs, far from the previous one.
            Self::Scattered => number.wrapping_mul(0x9e37_79b1) % GUEST_PAGES,
        }
    }
}
