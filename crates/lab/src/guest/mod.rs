//! The IOMMU of a guest, which its host provides (axis 4: the owner of the table).
//!
//! The DMA layer runs in the guest. Five hosts differ in the table that the unit walks, and in the
//! messages from the guest to its host:
//!
//! | host | the unit walks | guest to host | completion |
//! |---|---|---|---|
//! | [`VirtioHost`] | the host's table of the domain | requests: map, unmap, flush | reply |
//! | [`PviommuHost`] | the host's table of the device | requests: map, unmap | reply |
//! | [`XenHost`] | the hypervisor's table | hypercalls | return |
//! | [`EmulatedHost`] | a shadow of the guest's | invalidations, also of maps | status write |
//! | [`NestedHost`] | the guest's table, and the host's below it | invalidations | status write |
//!
//! With the first three, the guest's [`IoPageTable`](ringfence_dma::space::IoPageTable) turns maps
//! and unmaps into messages. With the last two it writes a table in the guest's memory. A write of
//! the invalidation queue's tail register then is the message.
//!
//! A message can wait until the guest kicks its host. The host completes all waiting messages
//! before the kick returns. It invalidates in the unit before it completes an unmap, a flush or an
//! invalidation. So the layer's [`Invalidator`] calls the host (decisions 0002, 0019).
//!
//! Guest and host are one thread. A charge for each kick stands for the missing cost: the exit from
//! the guest and the wake-up of the host's thread.

mod emulated;
mod guest_queue;
mod nested;
mod pviommu;
mod request_table;
mod second_stage;
mod tables;
mod unit;
mod virtio;
mod xen;

pub(crate) use emulated::emulated_table;
pub use emulated::{EmulatedHost, EmulatedTable};
pub(crate) use nested::nested_table;
pub use nested::{NestedHost, NestedTable, NestedVtd, WRITE_ONLY_OFFSET};
pub(crate) use pviommu::pviommu;
pub use pviommu::{PviommuHost, PviommuQueue, PviommuTable};
pub use request_table::{RequestTable, TableRequests};
pub use second_stage::{FrameLookup, FrameRmap};
pub use unit::HostUnit;
pub(crate) use virtio::virtio_table;
pub use virtio::{DomainMode, VirtioHost, VirtioTable};
pub use xen::{XenHost, XenTable};
pub(crate) use xen::{whole_guest, xen_table};

pub use crate::queue_stats::{KickCause, LookupStats, QueueStats};

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use ringfence_devices::{DmaRequest, Observer};
use ringfence_hw::IommuStats;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{
    Access, DomainId, Fault, Invalidation, InvalidationError, Invalidator, Iova, PhysAddr,
    PhysRange, RequesterId, Ticket,
};

use crate::Profile;
use crate::error::LabError;
use crate::hardware::{FaultCounts, Hardware, Host};
use crate::layer::{ContextTarget, LayerPlatform};
use second_stage::GuestAddressObserver;

/// A host, and the guest's side of the channel to it.
pub trait HostBackend: fmt::Debug + Sized + 'static {
    /// The host's unit.
    type Unit: Hardware<Host = ()>;

    /// Creates a host that keeps its tables in `memory`, for `unit`.
    ///
    /// # Errors
    /// Memory is short.
    fn new(
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
        coherency: Coherency,
        unit: HostUnit<Self::Unit>,
    ) -> Result<Self, LabError>;

    /// Calls `act` with the unit.
    fn with_unit<R>(&mut self, act: impl FnOnce(&mut HostUnit<Self::Unit>) -> R) -> R;

    /// Completes all messages so far, and returns their ticket. `request` is the layer's
    /// invalidation; a host may ignore it.
    ///
    /// # Errors
    /// The host refused an unmap.
    fn commit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError>;

    /// Returns true if the messages up to `ticket` are complete.
    ///
    /// # Errors
    /// As for [`commit`](Self::commit).
    fn is_completed(&mut self, ticket: Ticket) -> Result<bool, InvalidationError>;

    /// Returns the counters of the queue.
    fn traffic(&self) -> QueueStats;

    /// Returns the reverse map of the frames that devices access; `None` if guest-physical
    /// addresses equal physical ones.
    fn frame_rmap(&self) -> Option<Rc<FrameRmap>> {
        None
    }
}

/// A host that the guest's tables and the hardware share.
#[derive(Debug)]
pub struct SharedHost<V>(Rc<RefCell<V>>);

impl<V> Clone for SharedHost<V> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<V> SharedHost<V> {
    /// Borrows the host. `act` must not borrow it again.
    #[inline]
    fn with<R>(&self, act: impl FnOnce(&mut V) -> R) -> R {
        act(&mut self.0.borrow_mut())
    }
}

impl<V: HostBackend> Host for SharedHost<V> {
    const REMOTE: bool = true;
    type Invalidator = Self;

    fn for_meter(_: &Rc<Arena>, coherency: Coherency) -> Result<(Option<Self>, Self), LabError> {
        // The host has its own memory. The guest's memory in this replay holds no tables.
        let own = LayerPlatform::timed()?;
        let unit = HostUnit::CostOnly(own.queue());
        let host = V::new(&own.arena, &own.frames, coherency, unit)?;
        let host = Self(Rc::new(RefCell::new(host)));
        Ok((Some(host.clone()), host))
    }
}

/// The guest's invalidator: the host has invalidated when it completes a message.
impl<V: HostBackend> Invalidator for SharedHost<V> {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.with(|host| host.commit(request))
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.with(|host| host.is_completed(ticket))
    }
}

/// The unit of a host, whose guest drives the device.
#[derive(Debug)]
pub struct HostHardware<V> {
    host: SharedHost<V>,
}

impl<V: HostBackend> HostHardware<V> {
    fn with_unit<R>(&self, act: impl FnOnce(&mut V::Unit) -> R) -> Result<R, LabError> {
        self.host.with(|host| {
            host.with_unit(|unit| match unit {
                HostUnit::Modelled { hardware, .. } => Ok(act(hardware)),
                HostUnit::CostOnly(_) => Err(LabError::Internal("a machine without a unit")),
            })
        })
    }
}

impl<V: HostBackend> Hardware for HostHardware<V> {
    type Host = SharedHost<V>;
    type Invalidator = SharedHost<V>;

    fn new(
        profile: &Profile,
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
    ) -> Result<Self, LabError> {
        let unit = HostUnit::modelled(V::Unit::new(profile, memory, frames)?);
        let host = V::new(memory, frames, profile.coherency(), unit)?;
        Ok(Self {
            host: SharedHost(Rc::new(RefCell::new(host))),
        })
    }

    fn disable(&mut self) {
        // The unit is always modelled here.
        let _ = self.with_unit(V::Unit::disable);
    }

    fn attach(
        &mut self,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        self.with_unit(|unit| unit.attach(memory, frames, device, domain, to))?
    }

    fn detach(&mut self, memory: &Arena, device: RequesterId) -> Result<(), LabError> {
        self.with_unit(|unit| unit.detach(memory, device))?
    }

    fn requester(attached: usize, recorded: RequesterId) -> Result<RequesterId, LabError> {
        V::Unit::requester(attached, recorded)
    }

    #[inline]
    fn probe<O: Observer>(
        &mut self,
        memory: &Arena,
        request: &DmaRequest,
        observer: O,
    ) -> Result<(), Fault> {
        self.host.with(|host| {
            let observer = GuestAddressObserver {
                rmap: host.frame_rmap(),
                observer,
            };
            host.with_unit(|unit| match unit {
                HostUnit::Modelled { hardware, .. } => hardware.probe(memory, request, observer),
                // No platform has this unit, and it translates no accesses.
                HostUnit::CostOnly(_) => Ok(()),
            })
        })
    }

    #[inline]
    fn invalidator(&mut self) -> &mut SharedHost<V> {
        &mut self.host
    }

    fn stats(&self) -> IommuStats {
        self.with_unit(|unit| unit.stats()).unwrap_or_default()
    }

    fn host(&self) -> Option<&SharedHost<V>> {
        Some(&self.host)
    }

    fn invalidate_all(&mut self) -> Result<(), InvalidationError> {
        self.host
            .with(|host| host.with_unit(|unit| unit.invalidate(Invalidation::Global)))
    }

    fn drain_completed(&mut self, completed: &mut Vec<Invalidation>) {
        self.host
            .with(|host| host.with_unit(|unit| unit.drain_completed(completed)));
    }

    fn traffic(&self) -> QueueStats {
        self.host.0.borrow().traffic()
    }

    fn translation_request(
        &mut self,
        memory: &Arena,
        device: RequesterId,
        iova: Iova,
    ) -> Option<PhysAddr> {
        let found = self.with_unit(|vtd| vtd.translation_request(memory, device, iova));
        found.ok().flatten()
    }

    fn translated_request(
        &mut self,
        memory: &Arena,
        device: RequesterId,
        reached: PhysRange,
        access: Access,
    ) -> bool {
        let reached = self.with_unit(|vtd| vtd.translated_request(memory, device, reached, access));
        reached.unwrap_or(false)
    }

    fn fault_counts(&mut self) -> FaultCounts {
        self.with_unit(V::Unit::fault_counts).unwrap_or_default()
    }
}
