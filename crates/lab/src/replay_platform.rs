//! The platform of an oracle replay: memory, frames, one IOMMU, context tables, and a clock that
//! the trace drives.

use std::cell::{Ref, RefCell, RefMut};
use std::rc::Rc;

use ringfence_devices::{DmaRequest, Observer};
use ringfence_dma::Platform;
use ringfence_hw::IommuStats;
use ringfence_memory::{Arena, DeviceView, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{
    Access, DomainId, Fault, Invalidation, InvalidationError, Invalidator, Iova, IovaRange, Nanos,
    PhysAddr, PhysRange, RequesterId, Ticket,
};

use crate::Profile;
use crate::error::LabError;
use crate::hardware::{Hardware, Host, Vtd};
use crate::layer::{ContextTarget, DynInvalidator, LayerPlatform};
use crate::queue_stats::QueueStats;

/// Size of the region that holds the buffers of a trace; the reader renames trace addresses to fit.
/// The region only reserves addresses: just the tables take memory.
pub const DATA_BYTES: u64 = ringfence_trace::ARENA_BYTES;
/// Size of the table region above the buffers: enough to map all buffers with 4 KiB pages.
pub(crate) const TABLE_BYTES: u64 = 4 << 30;
/// Size of the memory of one pool of shadow buffers: the bound on the copies of a device.
pub const POOL_BYTES: u64 = 256 << 20;
/// Number of pools, above the tables.
pub const POOLS: u64 = 256;
/// Size of all regions. Coherent allocations come from the table region.
pub const MEMORY_BYTES: u64 = DATA_BYTES + TABLE_BYTES + POOLS * POOL_BYTES;

/// The IOMMU as the DMA layer sees it. It logs completed invalidations.
#[derive(Debug)]
pub struct LoggedIommu<H> {
    /// The modelled hardware.
    pub hardware: H,
    /// Completed invalidations since the last call of `each_completed`.
    completed: Vec<Invalidation>,
    /// Invalidations that the layer requested so far.
    count: u64,
}

impl<H: Hardware> LoggedIommu<H> {
    /// Calls `each` for every invalidation completed since the last call, from any requester.
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
        // A remote host invalidates the unit itself. A local unit completes a request before
        // `submit` returns.
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
    /// The IOMMU with its log of invalidations.
    pub iommu: LoggedIommu<H>,
    /// Current time on the trace's clock.
    pub now: Nanos,
}

impl<H: Hardware> ReplayPlatform<H> {
    /// Creates the platform that `profile` describes. Its IOMMU translates only if `enabled` is
    /// true, and snoops CPU caches: a replay does not see a missing write-back.
    pub fn new(profile: &Profile, enabled: bool) -> Result<Self, LabError> {
        Self::with_memory(Arena::new(MEMORY_BYTES)?, profile, enabled)
    }

    /// Creates the platform that `profile` describes. Its IOMMU walks the memory's device view,
    /// which has only the lines that were written back.
    pub fn without_snooping(profile: &Profile, enabled: bool) -> Result<Self, LabError> {
        Self::with_memory(Arena::with_device_view(MEMORY_BYTES)?, profile, enabled)
    }

    fn with_memory(memory: Arena, profile: &Profile, enabled: bool) -> Result<Self, LabError> {
        let arena = Rc::new(memory);
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

    /// Directs the accesses of `device` to the target `to`.
    pub fn attach(
        &mut self,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        let hardware = &mut self.iommu.hardware;
        hardware.attach(&self.arena, &self.frames, device, domain, to)
    }

    /// Translates an access of a device and reports it to `observer`.
    ///
    /// # Errors
    /// The fault that stopped the access.
    #[inline]
    pub fn probe<O: Observer>(&mut self, request: &DmaRequest, observer: O) -> Result<(), Fault> {
        let memory = walked(&self.arena);
        self.iommu.hardware.probe(memory, request, observer)
    }

    /// Passes the hardware a hint: a driver has mapped `range` for `device`.
    #[inline]
    pub fn mapped(&mut self, device: RequesterId, range: &IovaRange) {
        let memory = walked(&self.arena);
        self.iommu.hardware.mapped(memory, device, range);
    }

    /// Requests the host address of `iova`, as a device with a device TLB does.
    pub fn translation_request(&mut self, device: RequesterId, iova: Iova) -> Option<PhysAddr> {
        let hardware = &mut self.iommu.hardware;
        hardware.translation_request(walked(&self.arena), device, iova)
    }

    /// Makes an access to a host address, as a device with a device TLB does. Returns true if the
    /// unit permits it.
    pub fn translated_request(
        &mut self,
        device: RequesterId,
        reached: PhysRange,
        access: Access,
    ) -> bool {
        let hardware = &mut self.iommu.hardware;
        hardware.translated_request(walked(&self.arena), device, reached, access)
    }

    /// Returns the hardware's counters.
    pub fn stats(&self) -> IommuStats {
        self.iommu.hardware.stats()
    }

    /// Returns the counters of the queue to a host.
    pub fn traffic(&self) -> QueueStats {
        self.iommu.hardware.traffic()
    }

    /// Returns the number of invalidations so far, from any requester.
    pub fn invalidations(&self) -> u64 {
        if H::Host::REMOTE {
            self.traffic().invalidations
        } else {
            self.iommu.count
        }
    }

    /// Returns the host that owns the tables; `None` if the layer owns them.
    pub fn host(&self) -> Option<&H::Host> {
        self.iommu.hardware.host()
    }

    /// Returns the page walker's coherency.
    pub fn coherency(&self) -> Coherency {
        self.coherency
    }

    /// Returns the memory.
    pub fn arena(&self) -> &Rc<Arena> {
        &self.arena
    }

    /// Returns the frames of tables and of coherent memory.
    pub(crate) fn frame_source(&self) -> &Frames<Rc<Arena>> {
        &self.frames
    }

    /// Returns the bytes of table frames in use, and their peak.
    pub fn table_bytes(&self) -> (u64, u64) {
        (self.frames.in_use() * 4096, self.frames.peak() * 4096)
    }
}

/// Returns the memory that the IOMMU walks.
#[inline]
fn walked(arena: &Arena) -> &Arena {
    arena.device_view().map_or(arena, DeviceView::memory)
}

/// For experiments and tests. The layer of an oracle replay uses
/// [`for_layer`](SharedPlatform::for_layer).
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

/// A platform that the devices and the layer of a replay share.
#[derive(Debug)]
pub struct SharedPlatform<H>(Rc<RefCell<ReplayPlatform<H>>>);

impl<H: Hardware> SharedPlatform<H> {
    /// Shares the platform of a replay.
    pub fn new(platform: ReplayPlatform<H>) -> Self {
        Self(Rc::new(RefCell::new(platform)))
    }

    /// Borrows the platform.
    pub fn borrow(&self) -> Ref<'_, ReplayPlatform<H>> {
        self.0.borrow()
    }

    /// Borrows the platform to change it. The layer must not run during the borrow.
    #[inline]
    pub fn borrow_mut(&self) -> RefMut<'_, ReplayPlatform<H>> {
        self.0.borrow_mut()
    }

    /// Returns the platform of the layer: the same memory and the same IOMMU.
    pub fn for_layer(&self) -> LayerPlatform<DynInvalidator> {
        let platform = self.borrow();
        LayerPlatform {
            arena: Rc::clone(&platform.arena),
            frames: Rc::clone(&platform.frames),
            invalidator: DynInvalidator::new(Self(Rc::clone(&self.0))),
            now: platform.now,
        }
    }
}

impl<H: Hardware> Invalidator for SharedPlatform<H> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.borrow_mut().iommu.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.borrow_mut().iommu.poll(ticket)
    }
}
