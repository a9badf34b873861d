//! The machine of a replay: memory, frames, one IOMMU, context tables, and a clock that the trace
//! drives.

use std::rc::Rc;

use ringfence_devices::{DmaRequest, Observer};
use ringfence_dma::Platform;
use ringfence_hw::IommuStats;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{
    DomainId, Fault, Invalidation, InvalidationError, Invalidator, Nanos, PhysAddr, PhysRange,
    RequesterId, Ticket,
};

use crate::Profile;
use crate::error::LabError;
use crate::guest::QueueStats;
use crate::hardware::{ContextTarget, Hardware, Host, Vtd};

/// Where the buffers of a trace lie; traces are renamed to fit. A reservation of addresses: memory
/// is what the tables take.
pub const DATA_BYTES: u64 = ringfence_trace::ARENA_BYTES;
/// Room for tables above them: enough to map all data by 4 KiB pages.
const TABLE_BYTES: u64 = 4 << 30;
/// Both together: coherent memory comes from where tables do.
pub const MEMORY_BYTES: u64 = DATA_BYTES + TABLE_BYTES;

/// The IOMMU as the mapping layer sees it, with a list of the invalidations it has completed.
#[derive(Debug)]
pub struct LoggedIommu<H> {
    /// The hardware.
    pub hardware: H,
    /// Completed and not yet looked at.
    completed: Vec<Invalidation>,
    /// All invalidations that the layer asked for so far.
    count: u64,
}

impl<H: Hardware> LoggedIommu<H> {
    /// Calls `each` for every invalidation completed since the last call, whoever asked for it.
    pub fn each_completed(&mut self, each: impl FnMut(Invalidation)) {
        if H::Host::REMOTE {
            self.hardware.drain_completed(&mut self.completed);
        }
        self.completed.drain(..).for_each(each);
    }
}

impl<H: Hardware> Invalidator for LoggedIommu<H> {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        let ticket = self.hardware.invalidator().submit(request)?;
        // A host has asked the unit itself; else the unit completes what it accepts before it
        // returns.
        if !H::Host::REMOTE {
            self.count += 1;
            self.completed.push(request);
        }
        Ok(ticket)
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.hardware.invalidator().poll(ticket)
    }
}

/// Memory and hardware of one replay.
#[derive(Debug)]
pub struct ReplayPlatform<H = Vtd> {
    arena: Rc<Arena>,
    frames: Rc<Frames<Rc<Arena>>>,
    coherency: Coherency,
    /// The IOMMU.
    pub iommu: LoggedIommu<H>,
    /// The time.
    pub now: Nanos,
}

impl<H: Hardware> ReplayPlatform<H> {
    /// A machine as `profile` describes it. With `enabled` false its IOMMU is off.
    pub fn new(profile: &Profile, enabled: bool) -> Result<Self, LabError> {
        let arena = Rc::new(Arena::new(MEMORY_BYTES)?);
        let region = PhysRange::new(PhysAddr::new(DATA_BYTES), TABLE_BYTES)
            .ok_or(LabError::Internal("table region"))?;
        let frames = Rc::new(Frames::new(Rc::clone(&arena), region));
        let mut hardware = H::new(profile, &arena, &frames)?;
        if !enabled {
            hardware.disable();
        }
        Ok(Self {
            arena,
            frames,
            coherency: profile.coherency(),
            iommu: LoggedIommu {
                hardware,
                completed: Vec::new(),
                count: 0,
            },
            now: Nanos(0),
        })
    }

    /// Directs a device's accesses.
    pub fn attach(
        &mut self,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        let hardware = &mut self.iommu.hardware;
        hardware.attach(&self.arena, &self.frames, device, domain, to)
    }

    /// An access of a device, before the eyes of `observer`.
    ///
    /// # Errors
    /// The fault that stopped it.
    #[inline]
    pub fn probe<O: Observer>(&mut self, request: &DmaRequest, observer: O) -> Result<(), Fault> {
        self.iommu.hardware.probe(&self.arena, request, observer)
    }

    /// What the hardware has counted.
    pub fn stats(&self) -> IommuStats {
        self.iommu.hardware.stats()
    }

    /// What went through the queue to a host.
    pub fn traffic(&self) -> QueueStats {
        self.iommu.hardware.traffic()
    }

    /// Invalidations so far, whoever asked for them.
    pub fn invalidations(&self) -> u64 {
        if H::Host::REMOTE {
            self.traffic().invalidations
        } else {
            self.iommu.count
        }
    }

    /// Who keeps the tables, if it is not the layer.
    pub fn host(&self) -> Option<&H::Host> {
        self.iommu.hardware.host()
    }

    /// Whether the walker snoops.
    pub fn coherency(&self) -> Coherency {
        self.coherency
    }

    /// The memory, for use beside the hardware.
    pub fn arena(&self) -> &Rc<Arena> {
        &self.arena
    }

    /// Bytes of table frames in use and at most.
    pub fn table_bytes(&self) -> (u64, u64) {
        (self.frames.in_use() * 4096, self.frames.peak() * 4096)
    }
}

impl<H: Hardware> Platform for ReplayPlatform<H> {
    type Memory = Arena;
    type Frames = Frames<Rc<Arena>>;
    type Invalidator = LoggedIommu<H>;

    #[inline]
    fn memory(&self) -> &Arena {
        &self.arena
    }

    #[inline]
    fn frames(&self) -> &Frames<Rc<Arena>> {
        &self.frames
    }

    #[inline]
    fn invalidator(&mut self) -> &mut LoggedIommu<H> {
        &mut self.iommu
    }

    #[inline]
    fn now(&self) -> Nanos {
        self.now
    }
}
