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
    AllocEnv, HostOf, MagazineAlloc, MakeTable, ReplayTable, ThreadCell, magazine,
};
use crate::error::LabError;
use crate::layer::{AttachInfo, ContextTarget, LayerPlatform, SpaceResult};
use crate::modes::{Alloc, Mode};
use crate::platform::{MEMORY_BYTES, POOL_BYTES, POOLS};

/// A space with shadow buffers, which the table `T` maps.
pub type ReplayShadowSpace<T> = ShadowSpace<MagazineAlloc, T, ThreadCell<ShadowDepot>>;

/// The constructors of a mode with a pool. `T` is the table that maps the pool.
#[derive(Debug)]
pub struct ShadowParts<T: ReplayTable> {
    policy: ShadowPolicy,
    /// True if the driver takes its buffers from the pool.
    pub lends: bool,
    /// Creates the table of a domain.
    table: MakeTable<T>,
}

impl<T: ReplayTable> Clone for ShadowParts<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ReplayTable> Copy for ShadowParts<T> {}

impl<T: ReplayTable> ShadowParts<T> {
    /// Returns the constructors of `mode` with this table.
    pub(crate) fn new(mode: &Mode, table: MakeTable<T>) -> Self {
        Self {
            lends: mode.alloc == Alloc::Pool,
            policy: ShadowPolicy {
                // Devices of a replay fill their buffers.
                from_device: FromDevice::Unspecified,
                // The mode promises bytes: it never maps the pages of a buffer.
                when_exhausted: WhenExhausted::Refuse,
            },
            table,
        }
    }

    /// Creates the space of a domain. Returns it with the root of the table that the hardware
    /// walks. `host` owns the table, if the mode has a host.
    ///
    /// # Errors
    /// Memory is short.
    pub fn space(
        self,
        domain: DomainId,
        coherency: Coherency,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
        host: Option<&HostOf<T>>,
    ) -> Result<(ReplayShadowSpace<T>, PhysAddr), LabError> {
        let table = (self.table)(domain, coherency, memory, frames, host)?;
        let root = table.root();
        let alloc = magazine(&AllocEnv {
            kind: Alloc::Shadow,
            memory,
            frames,
            table: Some(root),
            last_page: T::LAST_PAGE,
        })?;
        let paged = Paged::new(alloc, table, Rounding::Exact);
        Ok((ShadowSpace::new(paged, pool(domain)?, self.policy), root))
    }

    /// Returns a constructor of the spaces of devices.
    pub fn make_space<I>(
        self,
        coherency: Coherency,
        host: Option<HostOf<T>>,
    ) -> impl Fn(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<ReplayShadowSpace<T>> + 'static
    {
        move |of, platform| {
            let (memory, frames) = (&platform.arena, &platform.frames);
            let (space, root) = self.space(of.domain, coherency, memory, frames, host.as_ref())?;
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
