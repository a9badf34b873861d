//! Tables that a host keeps for a guest (question 4: a virtqueue).
//!
//! The mapping layer is the guest's. Its table is a
//! [`IoPageTable`](ringfence_dma::space::IoPageTable) whose maps and unmaps are requests; they wait
//! in a queue until the guest kicks, and are answered before the kick returns. The host's side of
//! the queue changes the table that the unit walks and has the unit forget what was unmapped,
//! before it answers. So the layer's [`Invalidator`] submits nothing of its own: it kicks, and its
//! ticket is a request's place in the queue (decisions 0002, 0019).
//!
//! Guest and host are one thread. What that leaves out, an exit from the guest and the way to the
//! host's thread, is charged for each kick.

mod pviommu;
mod queue;
mod rtc;
mod second_stage;
mod tables;
mod unit;
mod virtio;

pub(crate) use pviommu::pviommu;
pub use pviommu::{PviommuHost, PviommuQueue, PviommuTable};
pub use queue::{KickCause, LookupStats, QueueStats};
pub use ringfence_pviommu::rtc::Cycles;
pub use rtc::{CycleFlush, DynCache, DynRtcSpace, RtcParams, RtcParts};
pub(crate) use rtc::{allocator, dispatch};
pub use second_stage::{FrameLookup, FrameRmap};
pub use unit::HostUnit;
pub use virtio::{VirtioHost, VirtioTable};

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use ringfence_devices::{DmaRequest, Observer};
use ringfence_hw::IommuStats;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{
    DomainId, Fault, Invalidation, InvalidationError, Invalidator, RequesterId, Ticket,
};

use crate::Profile;
use crate::error::LabError;
use crate::hardware::{ContextTarget, Hardware, Host, Vtd};
use crate::meter::{TimedPlatform, host_platform};
use second_stage::GuestAddressObserver;

/// The host's side of a queue, and the queue.
pub trait HostBackend: fmt::Debug + Sized + 'static {
    /// A host that keeps its tables in `memory`, for `unit`.
    ///
    /// # Errors
    /// No room.
    fn new(
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
        coherency: Coherency,
        unit: HostUnit,
    ) -> Result<Self, LabError>;

    /// Does something with the unit.
    fn with_unit<R>(&mut self, act: impl FnOnce(&mut HostUnit) -> R) -> R;

    /// Sees to it that everything is answered that was asked so far, `request` or not; the place in
    /// the queue of the last request.
    ///
    /// # Errors
    /// The host did not unmap what it was asked to.
    fn commit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError>;

    /// Whether the request at that place was answered.
    ///
    /// # Errors
    /// As for [`commit`](Self::commit).
    fn is_completed(&mut self, ticket: Ticket) -> Result<bool, InvalidationError>;

    /// What went through the queue.
    fn traffic(&self) -> QueueStats;

    /// Who is in the frames that devices reach; none where the guest has the machine's addresses.
    fn frame_rmap(&self) -> Option<Rc<FrameRmap>> {
        None
    }
}

/// A host, as the guest's tables and the unit share it.
#[derive(Debug)]
pub struct SharedHost<V>(Rc<RefCell<V>>);

impl<V> Clone for SharedHost<V> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<V> SharedHost<V> {
    /// Nobody who is called back borrows it again.
    #[inline]
    fn with<R>(&self, act: impl FnOnce(&mut V) -> R) -> R {
        act(&mut self.0.borrow_mut())
    }
}

impl<V: HostBackend> Host for SharedHost<V> {
    const REMOTE: bool = true;
    type Invalidator = Self;

    fn for_meter(_: &Rc<Arena>, coherency: Coherency) -> Result<(Option<Self>, Self), LabError> {
        // The host's memory is its own: the guest's replica has tables of nothing.
        let TimedPlatform {
            arena,
            frames,
            invalidator,
            ..
        } = host_platform()?;
        let unit = HostUnit::CostOnly(invalidator);
        let host = V::new(&arena, &Rc::new(frames), coherency, unit)?;
        let host = Self(Rc::new(RefCell::new(host)));
        Ok((Some(host.clone()), host))
    }
}

/// The guest's way to an invalidation: the host has done it when it has answered.
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

/// A VT-d unit that a host directs to the tables that it keeps.
#[derive(Debug)]
pub struct VirtIommuHardware<V> {
    host: SharedHost<V>,
}

impl<V: HostBackend> VirtIommuHardware<V> {
    fn with_unit<R>(&self, act: impl FnOnce(&mut Vtd) -> R) -> Result<R, LabError> {
        self.host.with(|host| {
            host.with_unit(|unit| match unit {
                HostUnit::Modelled { vtd, .. } => Ok(act(vtd)),
                HostUnit::CostOnly(_) => Err(LabError::Internal("a machine without a unit")),
            })
        })
    }
}

impl<V: HostBackend> Hardware for VirtIommuHardware<V> {
    type Host = SharedHost<V>;
    type Invalidator = SharedHost<V>;

    fn new(
        profile: &Profile,
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
    ) -> Result<Self, LabError> {
        let unit = HostUnit::modelled(Vtd::new(profile, memory, frames)?);
        let host = V::new(memory, frames, profile.coherency(), unit)?;
        Ok(Self {
            host: SharedHost(Rc::new(RefCell::new(host))),
        })
    }

    fn disable(&mut self) {
        // There always is one here.
        let _ = self.with_unit(Vtd::disable);
    }

    fn attach(
        &mut self,
        memory: &Arena,
        frames: &Frames<Rc<Arena>>,
        device: RequesterId,
        domain: DomainId,
        to: ContextTarget,
    ) -> Result<(), LabError> {
        self.with_unit(|vtd| vtd.attach(memory, frames, device, domain, to))?
    }

    #[inline]
    fn probe<O: Observer>(
        &mut self,
        memory: &Arena,
        request: &DmaRequest,
        observer: O,
    ) -> Result<(), Fault> {
        self.host.with(|host| {
            let occupants = host.frame_rmap();
            let observer = GuestAddressObserver {
                rmap: occupants,
                observer,
            };
            host.with_unit(|unit| match unit {
                HostUnit::Modelled { vtd, .. } => vtd.probe(memory, request, observer),
                // No machine has this one, and nothing would translate its accesses.
                HostUnit::CostOnly(_) => Ok(()),
            })
        })
    }

    #[inline]
    fn invalidator(&mut self) -> &mut SharedHost<V> {
        &mut self.host
    }

    fn stats(&self) -> IommuStats {
        self.with_unit(|vtd| vtd.stats()).unwrap_or_default()
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
}
