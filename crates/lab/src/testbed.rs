//! The layer and the hardware of one mode, for callers that drive them step by step.
//!
//! A replay performs a plan. An attack scenario instead decides each step from the result of the
//! one before. Both use the same layers and the same hardware.

use std::rc::Rc;

use ringfence_devices::{DmaRequest, Observer};
use ringfence_hw::IommuStats;
use ringfence_memory::Arena;
use ringfence_types::{
    Access, DomainId, Fault, FrameSource, Iova, Nanos, PhysAddr, PhysRange, RequesterId,
};

use crate::error::LabError;
use crate::hardware::{FaultCounts, Hardware};
use crate::layer::{ContextTarget, DmaOps};
use crate::oracle::Ownership;
use crate::queue_stats::QueueStats;
use crate::replay_platform::SharedPlatform;

/// The layer and the hardware of one mode.
pub struct Testbed {
    /// The DMA layer, without attached devices.
    pub layer: Box<dyn DmaOps>,
    /// Memory and IOMMU.
    pub machine: Box<dyn Machine>,
    /// The number of owners that an I/O virtual page can have in this mode.
    pub ownership: Ownership,
}

/// The memory and the IOMMU of one mode, for any hardware.
pub trait Machine {
    /// Returns the requester ID of a device that is attached after `attached` others.
    ///
    /// # Errors
    /// The hardware cannot have so many devices.
    fn requester(&self, attached: usize, wanted: RequesterId) -> Result<RequesterId, LabError>;

    /// Directs the accesses of `device` to the target `to`.
    ///
    /// # Errors
    /// The context tables cannot be allocated, or the hardware does not support the target.
    fn attach(
        &mut self,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError>;

    /// Removes the context of `device` and invalidates its cached copy.
    ///
    /// # Errors
    /// The context tables are malformed, or the invalidation failed.
    fn detach(&mut self, device: RequesterId) -> Result<(), LabError>;

    /// Turns translation off, as it is before a kernel enables the unit.
    fn disable(&mut self);

    /// Translates an access without moving bytes, and reports it to `observer`.
    ///
    /// # Errors
    /// The fault that stopped the access.
    fn probe(&mut self, request: &DmaRequest, observer: &mut dyn Observer) -> Result<(), Fault>;

    /// Requests the host address of `iova`, as a device with a device TLB does.
    fn translation_request(&mut self, device: RequesterId, iova: Iova) -> Option<PhysAddr>;

    /// Makes an access to a host address, as a device with a device TLB does. Returns true if the
    /// unit permits it.
    fn translated_request(
        &mut self,
        device: RequesterId,
        reached: PhysRange,
        access: Access,
    ) -> bool;

    /// Returns the number of invalidations so far.
    fn invalidations(&self) -> u64;

    /// Returns the requests and crossings of a guest whose host owns its table.
    fn traffic(&self) -> QueueStats;

    /// Sets the time on the clock.
    fn set_time(&mut self, now: Nanos);

    /// Invalidates all caches, independently of the layer's state.
    ///
    /// # Errors
    /// The invalidation failed; cached translations may remain.
    fn invalidate_all(&mut self) -> Result<(), LabError>;

    /// Returns the hardware's counters.
    fn stats(&self) -> IommuStats;

    /// Returns the counters of the fault log.
    fn fault_counts(&mut self) -> FaultCounts;

    /// Returns the memory.
    fn memory(&self) -> Rc<Arena>;

    /// Allocates a frame from the pool that also provides the frames of tables.
    ///
    /// # Errors
    /// Memory is short.
    fn alloc_frame(&self) -> Result<PhysAddr, LabError>;
}

impl<H: Hardware> Machine for SharedPlatform<H> {
    fn requester(&self, attached: usize, wanted: RequesterId) -> Result<RequesterId, LabError> {
        H::requester(attached, wanted)
    }

    fn attach(
        &mut self,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        self.borrow_mut().attach(device, domain, to)
    }

    fn detach(&mut self, device: RequesterId) -> Result<(), LabError> {
        let platform = &mut *self.borrow_mut();
        let memory = Rc::clone(platform.arena());
        platform.iommu.hardware.detach(&memory, device)
    }

    fn disable(&mut self) {
        self.borrow_mut().iommu.hardware.disable();
    }

    fn probe(&mut self, request: &DmaRequest, observer: &mut dyn Observer) -> Result<(), Fault> {
        self.borrow_mut().probe(request, observer)
    }

    fn translation_request(&mut self, device: RequesterId, iova: Iova) -> Option<PhysAddr> {
        self.borrow_mut().translation_request(device, iova)
    }

    fn translated_request(
        &mut self,
        device: RequesterId,
        reached: PhysRange,
        access: Access,
    ) -> bool {
        self.borrow_mut()
            .translated_request(device, reached, access)
    }

    fn invalidations(&self) -> u64 {
        self.borrow().invalidations()
    }

    fn traffic(&self) -> QueueStats {
        self.borrow().iommu.hardware.traffic()
    }

    fn set_time(&mut self, now: Nanos) {
        self.borrow_mut().now = now;
    }

    fn invalidate_all(&mut self) -> Result<(), LabError> {
        let invalidated = self.borrow_mut().iommu.hardware.invalidate_all();
        invalidated.map_err(|_| LabError::Internal("an invalidation that fails"))
    }

    fn stats(&self) -> IommuStats {
        self.borrow().stats()
    }

    fn fault_counts(&mut self) -> FaultCounts {
        self.borrow_mut().iommu.hardware.fault_counts()
    }

    fn memory(&self) -> Rc<Arena> {
        Rc::clone(self.borrow().arena())
    }

    fn alloc_frame(&self) -> Result<PhysAddr, LabError> {
        let frame = self.borrow().frame_source().alloc_zeroed();
        frame.map_err(|_| LabError::Internal("no frame is left"))
    }
}
