//! The spaces of modes with a pool that stays mapped, in front of an allocator and a table: for
//! shadow buffers, or for the driver's own buffers. `hybrid.rs` has those that map large buffers.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::{FlushPolicy, Strict};
use ringfence_dma::space::{
    FromDevice, Paged, Rounding, ShadowDepot, ShadowPolicy, ShadowPool, ShadowSpace, Space,
    Thresholds, WhenExhausted,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, Invalidator, PhysAddr, PhysRange};

use crate::components::{
    AllocEnv, HostOf, MagazineAlloc, MakeTable, ReplayTable, ThreadCell, magazine,
};
use crate::error::LabError;
use crate::layer::{
    AttachInfo, ContextTarget, DmaLayer, DmaOps, DynInvalidator, HasPlatform, Inspected,
    LayerPlatform, PoolLayer, SpaceResult,
};
use crate::modes::{Alloc, Mode};
use crate::profile::Profile;
use crate::replay_platform::{MEMORY_BYTES, POOL_BYTES, POOLS};
use crate::withholds::Withholds;

/// A space with shadow buffers, which the table `T` maps.
pub type ReplayShadowSpace<T> = ShadowSpace<MagazineAlloc, T, ThreadCell<ShadowDepot>>;

/// A use of a timed replay's layer. Its type depends on the mode.
pub trait TimedLayerVisitor<I> {
    /// The result of the use.
    type Output;

    /// Uses the layer.
    fn visit<L: DmaOps + HasPlatform<I> + 'static>(self, layer: L) -> Self::Output;
}

/// The constructors of a mode with a pool that stays mapped.
pub trait CopyParts: Copy + 'static {
    /// The table that maps the pool.
    type Table: ReplayTable;
    /// The space of a domain.
    type Space: Space + 'static;
    /// The flush policy.
    type Flush: FlushPolicy<Self::Space, u64> + 'static;

    /// Sets the sizes from which buffers are mapped. Modes that copy every buffer ignore them.
    #[must_use]
    fn with_thresholds(self, thresholds: Thresholds) -> Self {
        let _ = thresholds;
        self
    }

    /// Sets the thresholds that cost the fewest cycles on the machine of `profile`.
    #[must_use]
    fn with_costs(self, profile: &Profile) -> Self {
        let _ = profile;
        self
    }

    /// Returns the buffers that the mode withholds, if its driver has descriptors.
    fn withholds(self) -> Withholds {
        Withholds::All
    }

    /// Creates the flush policy.
    fn flush(self) -> Self::Flush;

    /// Creates the space of a domain. Returns it with the root of the table that the hardware
    /// walks. `host` owns the table, if the mode has a host.
    ///
    /// # Errors
    /// Memory is short.
    fn space(
        self,
        domain: DomainId,
        coherency: Coherency,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
        host: Option<&HostOf<Self::Table>>,
    ) -> Result<(Self::Space, PhysAddr), LabError>;

    /// Returns a constructor of the spaces of devices.
    fn make_space<I>(
        self,
        coherency: Coherency,
        host: Option<HostOf<Self::Table>>,
    ) -> impl Fn(&AttachInfo, &LayerPlatform<I>) -> SpaceResult<Self::Space> + 'static {
        move |of, platform| {
            let (memory, frames) = (&platform.arena, &platform.frames);
            let (space, root) = self.space(of.domain, coherency, memory, frames, host.as_ref())?;
            Ok((space, ContextTarget::Table(root)))
        }
    }

    /// Returns the layer of an oracle replay. A driver that takes its buffers from the pool
    /// inspects the first `inspected` bytes of each that the device writes.
    fn judged(
        self,
        layer: DmaLayer<Self::Space, Self::Flush, DynInvalidator>,
        inspected: u32,
    ) -> Box<dyn DmaOps> {
        let _ = inspected;
        Box::new(layer)
    }

    /// Calls `visitor` with the layer of a timed replay, which drives `layer`, with `inspected` as
    /// for [`judged`](Self::judged).
    fn timed<I: Invalidator + 'static, V: TimedLayerVisitor<I>>(
        self,
        layer: DmaLayer<Self::Space, Self::Flush, I>,
        inspected: u32,
        visitor: V,
    ) -> V::Output {
        let _ = inspected;
        visitor.visit(layer)
    }
}

/// The constructors of a mode whose whole buffers are in the pool. `T` is the table that maps it.
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
            table: T::with_page_size(table, mode.page_size),
        }
    }
}

impl<T: ReplayTable> CopyParts for ShadowParts<T> {
    type Table = T;
    type Space = ReplayShadowSpace<T>;
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
        host: Option<&HostOf<T>>,
    ) -> Result<(ReplayShadowSpace<T>, PhysAddr), LabError> {
        let table = (self.table)(domain, coherency, memory, frames, host)?;
        let (paged, root) = paged(table, memory, frames)?;
        Ok((ShadowSpace::new(paged, pool(domain)?, self.policy), root))
    }

    fn judged(
        self,
        layer: DmaLayer<ReplayShadowSpace<T>, Strict, DynInvalidator>,
        inspected: u32,
    ) -> Box<dyn DmaOps> {
        if self.lends {
            Box::new(PoolLayer::new(layer, inspected, Inspected::TraceBuffer))
        } else {
            Box::new(layer)
        }
    }

    fn timed<I: Invalidator + 'static, V: TimedLayerVisitor<I>>(
        self,
        layer: DmaLayer<ReplayShadowSpace<T>, Strict, I>,
        inspected: u32,
        visitor: V,
    ) -> V::Output {
        if self.lends {
            visitor.visit(PoolLayer::new(layer, inspected, Inspected::Array))
        } else {
            visitor.visit(layer)
        }
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
