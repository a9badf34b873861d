//! The mapping layer of one IOMMU: its domains, its flush policy and a handle for each CPU.
//! `map.rs` maps and unmaps.

use core::fmt;
use core::sync::atomic::AtomicU64;

use alloc::vec::Vec;

use ringfence_types::{
    DomainId, Flushed, Invalidation, InvalidationError, Iova, Pending, Pfn, RequesterId, RingId,
    WholeDomain,
};

use crate::Platform;
use crate::bounce_pool::BouncePool;
use crate::domain_table::{DomainTable, domain_index};
use crate::error::UnmapFailure;
use crate::flush::{FlushContext, FlushPolicy, OpenBursts};
use crate::space::{AddressSpace, Space};
use crate::token::{AddressLimits, Attachment, DomainHandle};

/// The mapping layer of one IOMMU. `S` provides the IOVA allocator and the I/O page table. `F`
/// decides when stale translations are invalidated. `B` represents a driver's buffer.
///
/// # Several layers
/// A machine with several IOMMUs has one layer for each, with a unit number ([`Dma::for_unit`]). A
/// layer rejects attachments, handles and tokens of another unit. Layers with equal unit numbers
/// cannot detect a mix-up.
///
/// # Bounds
/// A driver can make the layer hold only this:
///
/// - table entries and addresses for each live mapping,
/// - a queue of fixed length in a deferred mode,
/// - the configured number of withheld buffers under [`Burst`](crate::flush::Burst).
///
/// A failed invalidation queues nothing: the driver keeps its ranges and buffers as
/// [`NotInvalidated`](crate::NotInvalidated) tokens. A layer has at most 2^16 - 1 domains. For
/// detached domains, a handle keeps only the buffers that open bursts still withhold.
pub struct Dma<S: Space, F: FlushPolicy<S, B>, B> {
    pub(crate) domains: DomainTable<S>,
    /// The flush policy's state that CPUs share, indexed by domain.
    pub(crate) shared: Vec<Option<F::PerDomain>>,
    /// Changes when a domain is created or removed. Each unit starts at a different value. A handle
    /// with another epoch must refresh its per-domain state.
    pub(crate) epoch: u64,
    pub(crate) flush: F,
    pub(crate) bounce: Option<BouncePool>,
    /// Number of pools of premapped buffers so far, which is the next one's identifier.
    pub(crate) pools: AtomicU64,
}

/// The handle of one CPU to a [`Dma`]. Pass it to [`Dma::remove_cpu`] when the CPU is removed.
///
/// Dropping the handle is safe but leaks. Addresses in its magazines stay allocated until their
/// domain is detached. Buffers that its bursts withhold are lost, because a device may still reach
/// them. The timer flushes its queued unmaps in a deferred mode.
pub struct Cpu<S: Space, F: FlushPolicy<S, B>, B> {
    pub(crate) epoch: u64,
    pub(crate) spaces: Vec<Option<S::PerCpu>>,
    pub(crate) flush: Vec<Option<F::PerCpu>>,
    /// Owners of the per-CPU state, indexed by domain.
    domain_handles: Vec<DomainHandle>,
    /// Flush state of detached domains that still withholds buffers.
    pub(crate) detached: Vec<(DomainHandle, F::PerCpu)>,
}

/// The reason why a device was not attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttachError<E> {
    /// All 2^16 - 1 domain identifiers are in use.
    TooManyDomains,
    /// The caller's `make` could not create the space.
    Space(E),
    /// The space belongs to a domain other than the one that it was created for.
    WrongDomain,
    /// The domain does not exist.
    NoSuchDomain,
    /// The DMA mask covers less than one page.
    BadMask,
    /// The space serves only another device. The addresses of a ring are defined only for its
    /// device.
    OtherDevice,
    /// The device is attached to this domain, and hardware supports one domain per device.
    /// [Detach](Dma::detach) the device first.
    Attached(DomainId),
}

impl<E: fmt::Display> fmt::Display for AttachError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyDomains => f.write_str("all domain identifiers are in use"),
            Self::Space(e) => e.fmt(f),
            Self::WrongDomain => f.write_str("the address space belongs to another domain"),
            Self::NoSuchDomain => f.write_str("no such domain"),
            Self::BadMask => f.write_str("the DMA mask does not cover one page"),
            Self::OtherDevice => f.write_str("the address space belongs to another device"),
            Self::Attached(domain) => write!(f, "the device is attached to domain {domain}"),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for AttachError<E> {}

/// Highest address that does not need a dual-address cycle on the bus (HW16).
const PREFERRED: Iova = Iova::new(u32::MAX as u64);

/// Returns the limits for a DMA mask (the highest reachable address). `None` if the mask covers
/// less than one page.
fn limits(mask: Iova) -> Option<AddressLimits> {
    // A page counts only if the device can reach all of it.
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

impl<S: Space, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Creates the layer of a machine's only IOMMU, without domains.
    pub fn new(flush: F) -> Self {
        Self::for_unit(0, flush)
    }

    /// Creates the layer of the machine's IOMMU number `unit`, without domains.
    pub fn for_unit(unit: u16, flush: F) -> Self {
        Self {
            domains: DomainTable::new(unit),
            shared: Vec::new(),
            // A unit's epochs reach the first epoch of the next unit only after 2^48 changes.
            epoch: u64::from(unit) << 48,
            flush,
            bounce: None,
            pools: AtomicU64::new(0),
        }
    }

    /// Adds a bounce pool for buffers that a device cannot reach.
    pub fn with_bounce(mut self, pool: BouncePool) -> Self {
        self.bounce = Some(pool);
        self
    }

    /// Returns the bounce pool, for statistics.
    pub fn bounce(&self) -> Option<&BouncePool> {
        self.bounce.as_ref()
    }

    /// Creates a domain with the space that `make` returns, and attaches `device` to it. `mask` is
    /// the highest address that the device can issue on the bus.
    ///
    /// # Errors
    /// See [`AttachError`]. The layer is unchanged.
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
        let domain = self.domains.free_id().ok_or(AttachError::TooManyDomains)?;
        let space = make(domain).map_err(AttachError::Space)?;
        if space.domain() != domain {
            return Err(AttachError::WrongDomain);
        }
        if !space.serves(device) {
            return Err(AttachError::OtherDevice);
        }
        let handle = self.install_domain(domain, space, device);
        Ok(Attachment {
            device,
            domain_handle: handle.ok_or(AttachError::TooManyDomains)?,
            limits,
        })
    }

    /// Installs `domain` with its first device. Separate from
    /// [`attach`](Self::attach), which is compiled once for each closure type.
    fn install_domain(
        &mut self,
        domain: DomainId,
        space: S,
        device: RequesterId,
    ) -> Option<DomainHandle> {
        let handle = self.domains.install(domain, space, device)?;
        self.shared
            .resize_with(self.domains.iter().count(), || None);
        *self.shared.get_mut(domain_index(domain))? = Some(self.flush.per_domain());
        self.epoch = self.epoch.wrapping_add(1);
        Some(handle)
    }

    /// Attaches another device to the domain of `other`. Each of the two devices reaches the
    /// other's mappings.
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
        if let Some(slot) = self.domains.get_mut(other.domain())
            && !slot.devices.contains(&device)
        {
            slot.devices.push(device);
        }
        Ok(Attachment {
            device,
            domain_handle: other.domain_handle,
            limits,
        })
    }

    /// Returns the domain that `device` is attached to.
    fn domain_of(&self, device: RequesterId) -> Option<DomainId> {
        let mut slots = self.domains.iter();
        let slot = slots.find(|slot| slot.devices.contains(&device))?;
        Some(slot.handle().domain())
    }

    /// Returns an attachment for another of the device's rings. `None` if the device has no such
    /// ring. A space without rings counts as one ring.
    pub fn on_ring(&self, at: &Attachment, ring: RingId) -> Option<Attachment> {
        let rings = self.space(at)?.rings();
        (u32::from(ring.get()) < rings).then_some(Attachment {
            limits: AddressLimits { ring, ..at.limits },
            ..*at
        })
    }

    /// Creates a handle for another CPU.
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

    /// Refreshes a handle's per-domain state if domains were created or removed.
    #[inline]
    pub(crate) fn refresh_if_stale(&self, cpu: &mut Cpu<S, F, B>) {
        if cpu.epoch != self.epoch {
            self.refresh(cpu);
        }
    }

    /// Creates a handle's state for new domains, and removes its state of detached ones.
    #[cold]
    #[inline(never)]
    fn refresh(&self, cpu: &mut Cpu<S, F, B>) {
        for (index, (slot, shared)) in self.domains.iter().zip(&self.shared).enumerate() {
            let handle = slot.handle();
            if index == cpu.domain_handles.len() {
                cpu.spaces.push(None);
                cpu.flush.push(None);
                cpu.domain_handles.push(handle);
            }
            let (Some(space), Some(flush), Some(of)) = (
                cpu.spaces.get_mut(index),
                cpu.flush.get_mut(index),
                cpu.domain_handles.get_mut(index),
            ) else {
                continue;
            };
            if *of != handle {
                *space = None;
                // Buffers that another unit's handle withholds are still mapped there; this unit
                // must not return them.
                if let Some(old) = flush.take().filter(OpenBursts::withholds)
                    && of.same_iommu(handle)
                {
                    cpu.detached.push((*of, old));
                }
                *of = handle;
            }
            if space.is_none() {
                *space = slot.space().map(AddressSpace::per_cpu);
                *flush = shared.as_ref().map(|shared| self.flush.per_cpu(shared));
            }
        }
        cpu.epoch = self.epoch;
    }

    /// Returns the context through which a CPU with the state `spaces` releases ranges of `domain`.
    #[inline]
    pub(crate) fn flush_ctx<'a>(
        &'a self,
        spaces: &'a mut [Option<S::PerCpu>],
        domain: DomainId,
    ) -> FlushContext<'a, S> {
        FlushContext {
            domains: &self.domains,
            spaces,
            domain,
        }
    }

    /// Returns the space of an attached device. `None` if the device is detached.
    #[inline]
    pub fn space(&self, at: &Attachment) -> Option<&S> {
        self.domains.space_of(at.domain_handle)
    }

    /// Returns the space of an attached device and this CPU's state of it. The caller has refreshed
    /// the handle.
    #[inline]
    pub(crate) fn space_and_cpu<'a>(
        &'a self,
        own: &'a mut [Option<S::PerCpu>],
        at: &Attachment,
    ) -> Option<(&'a S, &'a mut S::PerCpu)> {
        let space = self.space(at)?;
        let own = own.get_mut(domain_index(at.domain()))?.as_mut()?;
        Some((space, own))
    }

    /// Returns the flush policy's shared state and this CPU's state for the device's domain. The
    /// caller has refreshed the handle.
    #[inline]
    pub(crate) fn flush_state<'a>(
        &'a self,
        own: &'a mut [Option<F::PerCpu>],
        at: &Attachment,
    ) -> Option<(&'a F::PerDomain, &'a mut F::PerCpu)> {
        let shared = self.shared.get(domain_index(at.domain()))?.as_ref()?;
        let own = own.get_mut(domain_index(at.domain()))?.as_mut()?;
        Some((shared, own))
    }

    /// Returns the flush policy.
    pub fn policy(&self) -> &F {
        &self.flush
    }

    /// Runs the timers of the flush policy for every domain. The embedder calls it periodically.
    ///
    /// # Errors
    /// Returns the first error. [`UnmapFailure::NotFlushed`]: an invalidation failed, and its
    /// ranges stay unusable until a later one succeeds. [`UnmapFailure::Refused`]: the table
    /// refused to clear mappings that the space kept. A device may reach them until a later call
    /// clears them.
    pub fn tick<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
    ) -> Result<(), UnmapFailure> {
        self.refresh_if_stale(cpu);
        let mut result = Ok(());
        for (slot, shared) in self.domains.iter().zip(&self.shared) {
            let Some(shared) = shared else { continue };
            let ctx = self.flush_ctx(&mut cpu.spaces, slot.handle().domain());
            let done = self.flush.tick(shared, ctx, platform);
            result = result.and(done);
        }
        result
    }

    /// Flushes all unmaps that the policy has deferred for the device's domain.
    ///
    /// # Errors
    /// As for [`tick`](Self::tick), for this domain.
    pub fn flush<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
    ) -> Result<(), UnmapFailure> {
        self.refresh_if_stale(cpu);
        let shared = self
            .shared
            .get(domain_index(at.domain()))
            .and_then(Option::as_ref);
        let (Some(_), Some(shared)) = (self.space(at), shared) else {
            return Ok(());
        };
        let ctx = self.flush_ctx(&mut cpu.spaces, at.domain());
        self.flush.flush(shared, ctx, platform)
    }

    /// Invalidates the device's whole domain and passes the proof to its space. An allocator that
    /// has used up every address may then start over.
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
