//! The mapping layer of one IOMMU: its domains, its flush policy, and one handle per processor.

use core::fmt;

use alloc::vec::Vec;

use ringfence_types::{
    DomainId, Flushed, Invalidation, InvalidationError, Iova, PageSize, Pending, Pfn, RequesterId,
    RingId, WholeDomain,
};

use crate::Platform;
use crate::bounce::BouncePool;
use crate::domain_table::{DomainHandle, DomainSlot};
use crate::flush::{Flush, FlushContext};
use crate::space::{AddressLimits, Space};

/// The mapping layer of one IOMMU. `S` answers where addresses come from and what the hardware
/// looks up, `F` when a stale translation dies; `B` stands for a driver's buffer.
///
/// # Several layers
/// A machine with several IOMMUs has a layer for each, and gives each its number
/// ([`Dma::for_unit`]): then attachments, handles and tokens of one are nothing to the others.
/// Layers of equal numbers cannot tell them apart.
///
/// # Bounds
/// What a driver can make the layer hold: a token's worth of table and address for each of its live
/// mappings; in a deferred mode a queue of fixed length; under [`Burst`](crate::flush::Burst) as
/// many withheld buffers as that is told. Failed invalidations queue nothing: what they should have
/// released is [owed](crate::NotInvalidated), and owed things are the driver's to hold. There are
/// at most 2^16 - 1 domains, and a handle keeps of those that are gone only what bursts withhold.
pub struct Dma<S: Space, F: Flush<S, B>, B> {
    pub(crate) domain_slots: Vec<DomainSlot<S>>,
    /// By seat: what the processors share of the flush policy.
    pub(crate) shared: Vec<Option<F::PerDomain>>,
    unit: u16,
    /// Changes with every domain that comes or goes, and begins elsewhere in each unit: a handle
    /// that knows another epoch must catch up.
    pub(crate) epoch: u64,
    pub(crate) flush: F,
    pub(crate) bounce: Option<BouncePool>,
}

/// One processor's handle to a [`Dma`]. A processor that goes away gives it to [`Dma::remove_cpu`].
/// Dropping it instead is safe and leaks: the addresses in its magazines stay allocated until their
/// domain is detached, and buffers that its bursts withhold never come back, as a device may still
/// reach them. What it has queued in a deferred mode is flushed by the timer.
pub struct Cpu<S: Space, F: Flush<S, B>, B> {
    pub(crate) epoch: u64,
    pub(crate) spaces: Vec<Option<S::PerCpu>>,
    pub(crate) flush: Vec<Option<F::PerCpu>>,
    /// Whose parts these are, by seat.
    domain_handles: Vec<DomainHandle>,
    /// Parts of detached domains that withhold buffers still.
    pub(crate) detached: Vec<(DomainHandle, F::PerCpu)>,
}

/// A device attached to a domain. Worth nothing once [`Dma::detach`] has ended the domain, whoever
/// has its identifier then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment {
    pub(crate) device: RequesterId,
    pub(crate) domain_handle: DomainHandle,
    pub(crate) limits: AddressLimits,
}

impl Attachment {
    /// The device.
    pub fn device(&self) -> RequesterId {
        self.device
    }

    /// The domain.
    pub fn domain(&self) -> DomainId {
        self.domain_handle.domain()
    }

    /// Which of the device's rings its mappings go to: the first one unless [`Dma::on_ring`] has
    /// named another.
    pub fn ring(&self) -> RingId {
        self.limits.ring
    }
}

/// Why a device was not attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttachError<E> {
    /// All 2^16 - 1 domain identifiers are in use.
    TooManyDomains,
    /// The space could not be made.
    Space(E),
    /// The space answers for another domain than the one it was made for.
    WrongDomain,
    /// The domain does not exist.
    NoSuchDomain,
    /// The DMA mask does not even cover one page.
    BadMask,
    /// The space serves another device alone: a ring's addresses mean nothing without the device
    /// whose ring it is.
    OtherDevice,
    /// The device is attached to this domain, and hardware knows one domain a device.
    /// [Detach](Dma::detach) it first.
    Attached(DomainId),
}

impl<E: fmt::Display> fmt::Display for AttachError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyDomains => f.write_str("all domain identifiers are in use"),
            Self::Space(e) => e.fmt(f),
            Self::WrongDomain => f.write_str("the space answers for another domain"),
            Self::NoSuchDomain => f.write_str("no such domain"),
            Self::BadMask => f.write_str("the DMA mask does not cover one page"),
            Self::OtherDevice => f.write_str("the space serves another device"),
            Self::Attached(domain) => write!(f, "the device is attached to domain {domain}"),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for AttachError<E> {}

/// Highest address that saves the bus a dual-address cycle (HW16).
const PREFERRED: Iova = Iova::new(u32::MAX as u64);

/// The limits that a DMA mask (highest reachable address) sets.
fn limits(mask: Iova) -> Option<AddressLimits> {
    // A page counts only if all of it can be reached.
    let pages = mask
        .get()
        .checked_add(1)
        .map_or(1 << 52, |bytes| bytes >> 12);
    let mask = Pfn::new(pages.checked_sub(1)?);
    Some(AddressLimits {
        preferred: mask.min(Pfn::containing(PREFERRED)),
        mask,
        ring: RingId::new(0),
    })
}

/// The place that the next domain can have, and its identifier.
fn free_slot<S>(unit: u16, seats: &[DomainSlot<S>]) -> Option<(usize, DomainId)> {
    let vacant = seats.iter().position(DomainSlot::is_free);
    let index = vacant.unwrap_or(seats.len());
    let seat = DomainSlot::<S>::new(unit, index)?;
    Some((index, seat.handle().domain()))
}

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    /// The layer of a machine's only IOMMU, without domains.
    pub fn new(flush: F) -> Self {
        Self::for_unit(0, flush)
    }

    /// The layer of the machine's IOMMU number `unit`, without domains.
    pub fn for_unit(unit: u16, flush: F) -> Self {
        Self {
            domain_slots: Vec::new(),
            shared: Vec::new(),
            unit,
            // 2^48 domains come and go before one unit's epochs reach the next one's.
            epoch: u64::from(unit) << 48,
            flush,
            bounce: None,
        }
    }

    /// Gives the layer a pool for buffers that a device cannot reach.
    pub fn with_bounce(mut self, pool: BouncePool) -> Self {
        self.bounce = Some(pool);
        self
    }

    /// That pool, for a look at how full it is.
    pub fn bounce(&self) -> Option<&BouncePool> {
        self.bounce.as_ref()
    }

    /// Makes a new domain with the space that `make` returns, and attaches `device` to it. `mask`
    /// is the highest address that the device can put on the bus.
    ///
    /// # Errors
    /// See [`AttachError`]; the layer is unchanged.
    pub fn attach<E>(
        &mut self,
        device: RequesterId,
        mask: Iova,
        make: impl FnOnce(DomainId) -> Result<S, E>,
    ) -> Result<Attachment, AttachError<E>> {
        let limits = limits(mask).ok_or(AttachError::BadMask)?;
        if let Some(domain) = self.domain_of(device) {
            return Err(AttachError::Attached(domain));
        }
        let (index, domain) =
            free_slot(self.unit, &self.domain_slots).ok_or(AttachError::TooManyDomains)?;
        let space = make(domain).map_err(AttachError::Space)?;
        if space.domain() != domain {
            return Err(AttachError::WrongDomain);
        }
        if !space.serves(device) {
            return Err(AttachError::OtherDevice);
        }
        let tenant = self.install_domain(index, space, device);
        let tenant = tenant.ok_or(AttachError::TooManyDomains)?;
        Ok(Attachment {
            device,
            domain_handle: tenant,
            limits,
        })
    }

    /// Gives `space` and its first device the place at `index`. Apart from
    /// [`attach`](Self::attach), of which there is a copy for each closure.
    fn install_domain(
        &mut self,
        index: usize,
        space: S,
        device: RequesterId,
    ) -> Option<DomainHandle> {
        if index == self.domain_slots.len() {
            self.domain_slots.push(DomainSlot::new(self.unit, index)?);
            self.shared.push(None);
        }
        let seat = self.domain_slots.get_mut(index)?;
        let shared = self.shared.get_mut(index)?;
        *shared = Some(self.flush.per_domain());
        let tenant = seat.assign(space, device);
        self.epoch = self.epoch.wrapping_add(1);
        Some(tenant)
    }

    /// Attaches one more device to the domain of `other`: the two see each other's mappings.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn attach_to(
        &mut self,
        device: RequesterId,
        mask: Iova,
        other: &Attachment,
    ) -> Result<Attachment, AttachError<core::convert::Infallible>> {
        let limits = limits(mask).ok_or(AttachError::BadMask)?;
        let space = self.space(other).ok_or(AttachError::NoSuchDomain)?;
        if !space.serves(device) {
            return Err(AttachError::OtherDevice);
        }
        let elsewhere = self.domain_of(device).filter(|d| *d != other.domain());
        if let Some(domain) = elsewhere {
            return Err(AttachError::Attached(domain));
        }
        if let Some(seat) = self.domain_slots.get_mut(other.domain_handle.index())
            && !seat.devices.contains(&device)
        {
            seat.devices.push(device);
        }
        Ok(Attachment {
            device,
            domain_handle: other.domain_handle,
            limits,
        })
    }

    /// The domain that `device` is attached to.
    fn domain_of(&self, device: RequesterId) -> Option<DomainId> {
        let seat = self
            .domain_slots
            .iter()
            .find(|s| s.devices.contains(&device))?;
        Some(seat.handle().domain())
    }

    /// The same attachment for mappings of another of the device's rings; `None` if it has no such
    /// ring. A space without rings counts as one ring.
    pub fn on_ring(&self, at: &Attachment, ring: RingId) -> Option<Attachment> {
        let rings = self.space(at)?.rings();
        (u32::from(ring.get()) < rings).then_some(Attachment {
            limits: AddressLimits { ring, ..at.limits },
            ..*at
        })
    }

    /// A handle for one more processor.
    pub fn cpu(&self) -> Cpu<S, F, B> {
        let mut cpu = Cpu {
            epoch: self.epoch,
            spaces: Vec::new(),
            flush: Vec::new(),
            domain_handles: Vec::new(),
            detached: Vec::new(),
        };
        self.refresh(&mut cpu);
        cpu
    }

    /// Makes a handle's parts those of the present domains.
    #[inline]
    pub(crate) fn refresh_if_stale(&self, cpu: &mut Cpu<S, F, B>) {
        if cpu.epoch != self.epoch {
            self.refresh(cpu);
        }
    }

    /// Gives a handle its parts of domains that are new to it, and takes away those of domains that
    /// are gone.
    #[cold]
    #[inline(never)]
    fn refresh(&self, cpu: &mut Cpu<S, F, B>) {
        for (index, (seat, shared)) in self.domain_slots.iter().zip(&self.shared).enumerate() {
            let tenant = seat.handle();
            if index == cpu.domain_handles.len() {
                cpu.spaces.push(None);
                cpu.flush.push(None);
                cpu.domain_handles.push(tenant);
            }
            let (Some(space), Some(flush), Some(of)) = (
                cpu.spaces.get_mut(index),
                cpu.flush.get_mut(index),
                cpu.domain_handles.get_mut(index),
            ) else {
                continue;
            };
            if *of != tenant {
                *space = None;
                // What another unit's handle withholds is still mapped there, and is not for this
                // one to give back.
                if let Some(old) = flush.take().filter(|old| self.flush.withholds(old))
                    && of.same_iommu(tenant)
                {
                    cpu.detached.push((*of, old));
                }
                *of = tenant;
            }
            if space.is_none() {
                *space = seat.space().map(Space::per_cpu);
                *flush = shared.as_ref().map(|shared| self.flush.per_cpu(shared));
            }
        }
        cpu.epoch = self.epoch;
    }

    /// Where ranges of the device's domain go home through this processor.
    #[inline]
    pub(crate) fn flush_ctx<'a>(
        &'a self,
        cpu: &'a mut Cpu<S, F, B>,
        at: &Attachment,
    ) -> FlushContext<'a, S> {
        FlushContext {
            domain_slots: &self.domain_slots,
            cpus: &mut cpu.spaces,
            domain_index: at.domain_handle.index(),
        }
    }

    /// The space of an attached device; none if it is detached.
    #[inline]
    pub fn space(&self, at: &Attachment) -> Option<&S> {
        self.space_of(at.domain_handle)
    }

    /// The space of a domain, unless that is gone.
    #[inline]
    pub(crate) fn space_of(&self, tenant: DomainHandle) -> Option<&S> {
        self.domain_slots.get(tenant.index())?.space_of(tenant)
    }

    /// The space of an attached device with this processor's part of it. The handle has caught up.
    #[inline]
    pub(crate) fn space_and_cpu<'a>(
        &'a self,
        own: &'a mut [Option<S::PerCpu>],
        at: &Attachment,
    ) -> Option<(&'a S, &'a mut S::PerCpu)> {
        let space = self.space(at)?;
        let own = own.get_mut(at.domain_handle.index())?.as_mut()?;
        Some((space, own))
    }

    /// What the processors share of the flush policy for the device's domain, and this processor's
    /// part. The handle has caught up.
    #[inline]
    pub(crate) fn flush_state<'a>(
        &'a self,
        own: &'a mut [Option<F::PerCpu>],
        at: &Attachment,
    ) -> Option<(&'a F::PerDomain, &'a mut F::PerCpu)> {
        let shared = self.shared.get(at.domain_handle.index())?.as_ref()?;
        let own = own.get_mut(at.domain_handle.index())?.as_mut()?;
        Some((shared, own))
    }

    /// The flush policy.
    pub fn policy(&self) -> &F {
        &self.flush
    }

    /// Runs the timers of the flush policy for every domain; to be called whenever time has passed.
    ///
    /// # Errors
    /// The first invalidation that failed; what it was to release stays unusable.
    pub fn tick<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
    ) -> Result<(), InvalidationError> {
        self.refresh_if_stale(cpu);
        let mut result = Ok(());
        for (here, shared) in self.shared.iter().enumerate() {
            let Some(shared) = shared else { continue };
            let home = FlushContext {
                domain_slots: &self.domain_slots,
                cpus: &mut cpu.spaces,
                domain_index: here,
            };
            let done = self.flush.tick(shared, home, platform);
            result = result.and(done);
        }
        result
    }

    /// Flushes everything that the policy holds back for the device's domain.
    ///
    /// # Errors
    /// The invalidation failed; what it was to release stays unusable.
    pub fn flush<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
    ) -> Result<(), InvalidationError> {
        self.refresh_if_stale(cpu);
        let shared = self
            .shared
            .get(at.domain_handle.index())
            .and_then(Option::as_ref);
        let (Some(_), Some(shared)) = (self.space(at), shared) else {
            return Ok(());
        };
        self.flush.flush(shared, self.flush_ctx(cpu, at), platform)
    }

    /// Invalidates the device's whole domain and tells its space, so that an allocator that has
    /// handed out every address may start over.
    #[cold]
    pub(crate) fn flush_domain<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
    ) -> Result<(), InvalidationError> {
        let Some((space, own)) = self.space_and_cpu(&mut cpu.spaces, at) else {
            return Ok(());
        };
        space.sync(own, platform);
        let domain = space.domain();
        let request = Invalidation::Domain(domain);
        let proof: Flushed<WholeDomain> =
            Pending::submit(platform.invalidator(), request, WholeDomain(domain))
                .map_err(|(_, error)| error)?
                .wait(platform.invalidator())
                .map_err(|(_, error)| error)?;
        space.flushed(own, proof);
        Ok(())
    }
}

/// The granule of every space.
pub(crate) const GRANULE: PageSize = PageSize::Size4K;
