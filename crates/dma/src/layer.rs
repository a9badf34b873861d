//! The mapping layer of one IOMMU: its domains, its flush policy, and one handle per processor.

use core::fmt;

use alloc::vec::Vec;

use ringfence_types::{
    DeviceId, DomainId, Flushed, Invalidation, InvalidationError, Iova, PageSize, Pending, Pfn,
    RingId, WholeDomain,
};

use crate::Platform;
use crate::bounce::BouncePool;
use crate::flush::{Flush, Home};
use crate::space::{Limits, Space};

/// The mapping layer of one IOMMU. `S` answers where addresses come from and what the hardware looks up, `F` when a stale translation
/// dies; `B` stands for a driver's buffer.
pub struct Dma<S: Space, F: Flush<S, B>, B> {
    pub(crate) spaces: Vec<S>,
    pub(crate) shared: Vec<F::PerDomain>,
    pub(crate) flush: F,
    pub(crate) bounce: Option<BouncePool>,
}

/// One processor's handle to a [`Dma`].
pub struct Cpu<S: Space, F: Flush<S, B>, B> {
    pub(crate) spaces: Vec<S::PerCpu>,
    pub(crate) flush: Vec<F::PerCpu>,
}

/// A device attached to a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment {
    pub(crate) device: DeviceId,
    pub(crate) index: usize,
    pub(crate) limits: Limits,
}

impl Attachment {
    /// The device.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// The domain.
    pub fn domain(&self) -> DomainId {
        DomainId::new(self.index as u16 + 1)
    }

    /// Which of the device's rings its mappings go to: the first one unless [`Dma::on_ring`] has named another.
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
    /// The space serves another device alone: a ring's addresses mean nothing without the device whose ring it is.
    OtherDevice,
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
        }
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for AttachError<E> {}

/// Highest address that saves the bus a dual-address cycle (HW16).
const PREFERRED: Iova = Iova::new(u32::MAX as u64);

/// The limits that a DMA mask (highest reachable address) sets.
fn limits(mask: Iova) -> Option<Limits> {
    // A page counts only if all of it can be reached.
    let pages = mask
        .get()
        .checked_add(1)
        .map_or(1 << 52, |bytes| bytes >> 12);
    let mask = Pfn::new(pages.checked_sub(1)?);
    Some(Limits {
        preferred: mask.min(Pfn::containing(PREFERRED)),
        mask,
        ring: RingId::new(0),
    })
}

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    /// A layer without domains.
    pub fn new(flush: F) -> Self {
        Self {
            spaces: Vec::new(),
            shared: Vec::new(),
            flush,
            bounce: None,
        }
    }

    /// Gives the layer a pool for buffers that a device cannot reach.
    pub fn with_bounce(mut self, pool: BouncePool) -> Self {
        self.bounce = Some(pool);
        self
    }

    /// Makes a new domain with the space that `make` returns, and attaches `device` to it. `mask` is the highest address that the
    /// device can put on the bus.
    ///
    /// # Errors
    /// See [`AttachError`]; the layer is unchanged.
    pub fn attach<E>(
        &mut self,
        device: DeviceId,
        mask: Iova,
        make: impl FnOnce(DomainId) -> Result<S, E>,
    ) -> Result<Attachment, AttachError<E>> {
        let limits = limits(mask).ok_or(AttachError::BadMask)?;
        let index = self.spaces.len();
        let number = u16::try_from(index + 1).map_err(|_| AttachError::TooManyDomains)?;
        let domain = DomainId::new(number);
        let space = make(domain).map_err(AttachError::Space)?;
        if space.domain() != domain {
            return Err(AttachError::WrongDomain);
        }
        if !space.serves(device) {
            return Err(AttachError::OtherDevice);
        }
        self.shared.push(self.flush.per_domain());
        self.spaces.push(space);
        Ok(Attachment {
            device,
            index,
            limits,
        })
    }

    /// Attaches one more device to the domain of `other`: the two see each other's mappings.
    ///
    /// # Errors
    /// See [`AttachError`].
    pub fn attach_to(
        &mut self,
        device: DeviceId,
        mask: Iova,
        other: &Attachment,
    ) -> Result<Attachment, AttachError<core::convert::Infallible>> {
        let limits = limits(mask).ok_or(AttachError::BadMask)?;
        let space = self
            .spaces
            .get(other.index)
            .ok_or(AttachError::NoSuchDomain)?;
        if !space.serves(device) {
            return Err(AttachError::OtherDevice);
        }
        Ok(Attachment {
            device,
            index: other.index,
            limits,
        })
    }

    /// The same attachment for mappings of another of the device's rings; `None` if it has no such ring. A space without rings counts
    /// as one ring.
    pub fn on_ring(&self, at: &Attachment, ring: RingId) -> Option<Attachment> {
        let rings = self.spaces.get(at.index)?.rings();
        (u32::from(ring.get()) < rings).then_some(Attachment {
            limits: Limits { ring, ..at.limits },
            ..*at
        })
    }

    /// A handle for one more processor.
    pub fn cpu(&self) -> Cpu<S, F, B> {
        let mut cpu = Cpu {
            spaces: Vec::new(),
            flush: Vec::new(),
        };
        self.extend(&mut cpu);
        cpu
    }

    /// Gives a handle its parts of domains that were made after it.
    #[cold]
    pub(crate) fn extend(&self, cpu: &mut Cpu<S, F, B>) {
        for (space, shared) in self.spaces.iter().zip(&self.shared).skip(cpu.spaces.len()) {
            cpu.spaces.push(space.per_cpu());
            cpu.flush.push(self.flush.per_cpu(shared));
        }
    }

    /// Where ranges of the device's domain go home through this processor.
    #[inline]
    pub(crate) fn home<'a>(&'a self, cpu: &'a mut Cpu<S, F, B>, at: &Attachment) -> Home<'a, S> {
        Home {
            spaces: &self.spaces,
            cpus: &mut cpu.spaces,
            here: at.index,
        }
    }

    /// The space of an attached device.
    pub fn space(&self, at: &Attachment) -> Option<&S> {
        self.spaces.get(at.index)
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
        self.extend(cpu);
        let mut result = Ok(());
        for (here, shared) in self.shared.iter().enumerate() {
            let home = Home {
                spaces: &self.spaces,
                cpus: &mut cpu.spaces,
                here,
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
        self.extend(cpu);
        let Some(shared) = self.shared.get(at.index) else {
            return Ok(());
        };
        let home = Home {
            spaces: &self.spaces,
            cpus: &mut cpu.spaces,
            here: at.index,
        };
        self.flush.flush(shared, home, platform)
    }

    /// Invalidates the whole domain at `index` and tells its space, so that an allocator that has handed out every address
    /// may start over.
    #[cold]
    pub(crate) fn flush_domain<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        index: usize,
    ) -> Result<(), InvalidationError> {
        let (Some(space), Some(own)) = (self.spaces.get(index), cpu.spaces.get_mut(index)) else {
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
