//! The spaces of modes with shadow buffers: a pool in front of an allocator and a table.
//! `hybrid.rs` has those that map large buffers.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::{FlushPolicy, Strict};
use ringfence_dma::space::{
    FromDevice, Paged, Rounding, ShadowDepot, ShadowPolicy, ShadowPool, ShadowSpace, Space,
    WhenExhausted,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, PhysAddr, PhysRange};

use crate::components::{
    AllocEnv, MagazineAlloc, PlainRadix, ReplayTable, ThreadCell, magazine, plain_radix,
};
use crate::error::LabError;
use crate::layer::{AttachInfo, ContextTarget, LayerPlatform, SpaceResult};
use crate::modes::{Alloc, Mode};
use crate::platform::{MEMORY_BYTES, POOL_BYTES, POOLS};

/// A space with shadow buffers.
pub type ReplayShadowSpace = ShadowSpace<MagazineAlloc, PlainRadix, ThreadCell<ShadowDepot>>;

/// The constructors of a mode whose devices use copies.
pub trait CopyParts: Copy + 'static {
    /// The space of a domain.
    type Space: Space + 'static;
    /// The flush policy.
    type Flush: FlushPolicy<Self::Space, u64> + 'static;

    /// Sets the least number of bytes on whole pages of a buffer that is mapped in part. Modes that
    /// copy every buffer ignore it.
    #[must_use]
    fn with_threshold(self, bytes: u64) -> Self {
        let _ = bytes;
        self
    }

    /// Creates the flush policy.
    fn flush(self) -> Self::Flush;

    /// Creates the space of a domain. Returns it with the root of its table.
    ///
    /// # Errors
    /// Memory is short.
    fn space(
        self,
        domain: DomainId,
        coherency: Coherency,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
    ) -> Result<(Self::Space, PhysAddr), LabError>;

    /// Returns a constructor of the spaces of devices.
    fn make_space<I>(
        self,
        coherency: Coherency,
    ) -> impl Fn(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<Self::Space> + 'static {
        move |of, platform| {
            let (memory, frames) = (&platform.arena, &platform.frames);
            let (space, root) = self.space(of.domain, coherency, memory, frames)?;
            Ok((space, ContextTarget::Table(root)))
        }
    }
}

/// The constructors of a mode that copies every buffer.
#[derive(Debug, Clone, Copy)]
pub struct ShadowParts {
    policy: ShadowPolicy,
}

impl ShadowParts {
    /// Returns the constructors of `mode`. `None` if it has no shadow buffers.
    pub(crate) fn of(mode: &Mode) -> Option<Self> {
        (mode.alloc == Alloc::Shadow).then_some(Self {
            policy: ShadowPolicy {
                // Devices of a replay fill their buffers.
                from_device: FromDevice::Unspecified,
                // The mode promises bytes: it never maps the pages of a buffer.
                when_exhausted: WhenExhausted::Refuse,
            },
        })
    }
}

impl CopyParts for ShadowParts {
    type Space = ReplayShadowSpace;
    type Flush = Strict;

    fn flush(self) -> Strict {
        Strict
    }

    fn space(
        self,
        domain: DomainId,
        coherency: Coherency,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
    ) -> Result<(ReplayShadowSpace, PhysAddr), LabError> {
        let table = plain_radix(domain, coherency, memory, frames, None)?;
        let (paged, root) = paged(table, memory, frames)?;
        Ok((ShadowSpace::new(paged, pool(domain)?, self.policy), root))
    }
}

/// Creates the allocator in front of `table`, behind a pool. Returns both with the root of the
/// table.
pub(crate) fn paged<T: ReplayTable>(
    table: T,
    memory: &Rc<Arena>,
    frames: &Frames<Rc<Arena>>,
) -> Result<(Paged<MagazineAlloc, T>, PhysAddr), LabError> {
    let root = table.root();
    let alloc = magazine(&AllocEnv {
        kind: Alloc::Shadow,
        memory,
        frames,
        table: Some(root),
        last_page: T::LAST_PAGE,
    })?;
    Ok((Paged::new(alloc, table, Rounding::Exact), root))
}

/// Creates the pool of a domain, in the domain's own part of the memory above all tables.
pub(crate) fn pool(domain: DomainId) -> Result<ShadowPool<ThreadCell<ShadowDepot>>, LabError> {
    let number = u64::from(domain.get());
    if number >= POOLS {
        return Err(LabError::TooManyDevices);
    }
    let start = PhysAddr::new(MEMORY_BYTES - (number + 1) * POOL_BYTES);
    let memory = PhysRange::new(start, POOL_BYTES).ok_or(LabError::Internal("pool"))?;
    ShadowPool::new(memory, RefCell::new).ok_or(LabError::Internal("pool"))
}
