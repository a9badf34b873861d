//! The spaces of modes with a pool that stays mapped, in front of an allocator and a table: for
//! shadow buffers, or for the driver's own buffers.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::space::{
    FromDevice, Paged, Rounding, ShadowDepot, ShadowPolicy, ShadowPool, ShadowSpace, WhenExhausted,
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

/// The constructors of a mode with a pool.
#[derive(Debug, Clone, Copy)]
pub struct ShadowParts {
    policy: ShadowPolicy,
    /// True if the driver takes its buffers from the pool.
    pub lends: bool,
}

impl ShadowParts {
    /// Returns the constructors of `mode`. `None` if it has no pool.
    pub(crate) fn of(mode: &Mode) -> Option<Self> {
        mode.has_pool().then_some(Self {
            lends: mode.alloc == Alloc::Pool,
            policy: ShadowPolicy {
                // Devices of a replay fill their buffers.
                from_device: FromDevice::Unspecified,
                // The mode promises bytes: it never maps the pages of a buffer.
                when_exhausted: WhenExhausted::Refuse,
            },
        })
    }

    /// Creates the space of a domain. Returns it with the root of its table.
    ///
    /// # Errors
    /// Memory is short.
    pub fn space(
        self,
        domain: DomainId,
        coherency: Coherency,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
    ) -> Result<(ReplayShadowSpace, PhysAddr), LabError> {
        let table = plain_radix(domain, coherency, memory, frames, None)?;
        let root = table.root();
        let alloc = magazine(&AllocEnv {
            kind: Alloc::Shadow,
            memory,
            frames,
            table: Some(root),
            last_page: PlainRadix::LAST_PAGE,
        })?;
        let paged = Paged::new(alloc, table, Rounding::Exact);
        Ok((ShadowSpace::new(paged, pool(domain)?, self.policy), root))
    }

    /// Returns a constructor of the spaces of devices.
    pub fn make_space<I>(
        self,
        coherency: Coherency,
    ) -> impl Fn(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<ReplayShadowSpace> + 'static {
        move |of, platform| {
            let (memory, frames) = (&platform.arena, &platform.frames);
            let (space, root) = self.space(of.domain, coherency, memory, frames)?;
            Ok((space, ContextTarget::Table(root)))
        }
    }
}

/// Creates the pool of a domain, in the domain's own part of the memory above all tables.
fn pool(domain: DomainId) -> Result<ShadowPool<ThreadCell<ShadowDepot>>, LabError> {
    let number = u64::from(domain.get());
    if number >= POOLS {
        return Err(LabError::TooManyDevices);
    }
    let start = PhysAddr::new(MEMORY_BYTES - (number + 1) * POOL_BYTES);
    let memory = PhysRange::new(start, POOL_BYTES).ok_or(LabError::Internal("pool"))?;
    ShadowPool::new(memory, RefCell::new).ok_or(LabError::Internal("pool"))
}
