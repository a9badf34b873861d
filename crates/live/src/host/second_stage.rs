//! Second-stage translation of the guest's memory: a page gets its frame when a device first needs
//! it (PVIOMMU section 4.3, step 5).

use std::io;
use std::sync::Arc;

use ringfence_memory::Arena;
use ringfence_pgtable::{Levels, SecondStage};
use ringfence_pviommu::backend::{
    FixedLastTable, GuestBacking, OnDemand, OnDemandStats, PinError, PoolStats,
};
use ringfence_pviommu::wire::{Gpa, GuestPhysical};
use ringfence_types::{AddressRange, DomainId, PhysAddr};
use vm_memory::GuestMemoryMmap;

use super::Host;
use super::frame_rmap::{HostFrames, RmapRecorder};
use super::pages::GuestPages;
use crate::counters::DeviceCounters;

/// Guest-physical address space that a second stage can back with frames: 64 GiB. Pin counts are
/// stored sparsely.
const GUEST_BYTES: u64 = 1 << 36;
/// Domain ID of the guest's CPUs in the second stage. They cache nothing here: QEMU accesses the
/// memory directly.
const GUEST: DomainId = DomainId::new(u16::MAX);

/// Host optimisations: a pool of preallocated frames, and a pointer to the last table (PV17, PV18).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HostPagePool {
    /// Both are off.
    #[default]
    Off,
    /// Both are on.
    On,
}

type Frames = OnDemand<Arc<Arena>, HostFrames, Option<FixedLastTable>, RmapRecorder>;

/// Guest memory whose pages get frames when a device first needs them.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Current pages, with their locks.
    resident: GuestPages,
    frames: Frames,
    host: Arc<Host>,
    counted: (OnDemandStats, PoolStats),
}

impl Memory {
    /// Creates an empty guest memory without frames. Its tables are in the memory of `host`.
    ///
    /// # Errors
    /// The host has no memory for its tables.
    pub(crate) fn on_demand(host: &Arc<Host>, optimisations: HostPagePool) -> io::Result<Self> {
        let window = AddressRange::<GuestPhysical>::new(Gpa::new(0), GUEST_BYTES);
        let window = window.ok_or(io::ErrorKind::InvalidInput)?;
        let on = optimisations == HostPagePool::On;
        let rmap = host.rmap();
        let frames = OnDemand::new(
            Arc::clone(host.memory()),
            host.second_stage.clone(),
            HostFrames::Guest(Arc::clone(rmap)),
            SecondStage::new(Levels::Four),
            GUEST,
            &[window],
            on.then(FixedLastTable::default),
            RmapRecorder(Arc::clone(rmap)),
        );
        let frames = frames.map_err(io::Error::other)?;
        let frames = if on { frames } else { frames.without_pool() };
        Ok(Self {
            resident: GuestPages::new(),
            // Do not count the pool's first filling as the guest's work.
            counted: (*frames.stats(), *frames.pool().stats()),
            frames,
            host: Arc::clone(host),
        })
    }

    /// Replaces the guest's memory. A removed page keeps its frame without a page behind it, and
    /// gets the same frame if it returns.
    pub(crate) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        self.resident.set_memory(memory);
    }

    /// Locks the pinned pages that exist in `memory`, which is to replace the guest's memory.
    ///
    /// # Errors
    /// The host cannot lock one of them.
    pub(crate) fn lock_pinned(&self, memory: &GuestMemoryMmap) -> io::Result<()> {
        self.resident.lock_pinned(memory)
    }

    /// Locks and counts pages that are pinned from now on. No page may be pinned yet.
    pub(crate) fn lock(&mut self, counters: Arc<DeviceCounters>) {
        self.resident.lock(counters);
    }

    /// Returns the pin count of a page; `None` if no guest has memory at its address.
    #[cfg(test)]
    pub(crate) fn pins(&self, page: Gpa) -> Option<u32> {
        self.frames.pinned(page)
    }
}

impl GuestBacking for Memory {
    fn contains(&self, page: Gpa) -> bool {
        self.resident.contains(page) && self.frames.contains(page)
    }

    fn pin(&mut self, page: Gpa) -> Result<PhysAddr, PinError> {
        self.resident.pin(page)?;
        let frame = self.frames.pin(page);
        frame.inspect_err(|_| self.resident.unpin(page))
    }

    fn unpin(&mut self, page: Gpa) {
        self.frames.unpin(page);
        self.resident.unpin(page);
    }

    /// Refills the pool, if enabled, and updates the counters.
    fn maintain(&mut self) {
        self.frames.maintain();
        let (stats, pool) = (*self.frames.stats(), *self.frames.pool().stats());
        let (before, before_pool) = self.counted;
        let counters = self.host.counters();
        for (counter, now, before) in [
            (&counters.second_stage_walks, stats.walks, before.walks),
            (
                &counters.last_table_hits,
                stats.last_table_hits,
                before.last_table_hits,
            ),
            (&counters.frames, stats.allocated, before.allocated),
            (
                &counters.frames_awaited,
                pool.from_host,
                before_pool.from_host,
            ),
            (&counters.pool_refills, pool.refills, before_pool.refills),
        ] {
            counter.add(now.saturating_sub(before));
        }
        self.counted = (stats, pool);
    }
}
