//! Maps a mode to the types that implement it.
//!
//! [`dispatch`] calls a visitor with static types for each named mode; timed replays use them.
//! [`dispatch_dyn`] shares types between modes to save compile time: allocators become trait
//! objects. Oracle replays use it, and so do user-composed modes. Modes without an allocator and a
//! table of their own have the same types in both.

use ringfence_dma::flush::{
    Burst, Deferred, DeferredQueue, Descriptors, FlushQueue, PerCpuQueue, PerWrap, QueueConfig,
    Strict, TransmitBatch,
};
use ringfence_dma::ring::{Ring, SlotChoice};
use ringfence_hw::{FixedLogic, RingLogic};
use ringfence_papers::{
    BurstAsPublished, DescriptorsAsPublished, LogicAsPublished, RingAsPublished,
};
use ringfence_pgtable::Coherency;

use std::cell::RefCell;
use std::sync::Arc;

use crate::components::{
    MakeTable, ModeParts, ReplayTable, ThreadCell, bitmap, bitmap_as_published, contiguous,
    dyn_alloc, dyn_bitmap, eiovar, flat_table, freebsd, freebsd_14, leaf_cached_radix, magazine,
    maple, plain_radix, rb_tree, rcache, reclaiming_radix, reclaiming_radix_full_page,
};
use crate::error::LabError;
use crate::guest::{emulated_table, nested_table, pviommu, virtio_table, xen_table};
use crate::hybrid::HybridParts;
use crate::mapping_cache::CachedParts;
use crate::modes::{Alloc, FlushKind, Mode, Owner, TableKind};
use crate::ring::RingParts;
use crate::shadow::{CopyParts, ShadowParts};
use crate::sidecore::UnmapWait;
use crate::stubs::{FlushFor, FlushForRings, ReplayAlloc, ReplayRing};

/// A mode in which a device uses physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdentityKind {
    /// The machine has no IOMMU, or it is off.
    Off,
    /// The context entry selects pass-through. Drivers call the generic path to the IOMMU's driver.
    PassThrough,
    /// A table maps all memory to itself. Drivers call the same generic path.
    StaticTable,
    /// A host maps all memory of the guest. The guest has no IOMMU, and drivers no generic path.
    WholeGuest,
    /// Xen fills Calgary's table with all memory of a domain. Drivers call no generic path.
    XenWholeGuest,
}

impl IdentityKind {
    fn of(table: TableKind, owner: Owner) -> Self {
        match (table, owner) {
            (TableKind::None, _) => Self::Off,
            (TableKind::StaticRadix, Owner::Host) => Self::WholeGuest,
            (TableKind::StaticRadix, _) => Self::StaticTable,
            (TableKind::StaticFlat, _) => Self::XenWholeGuest,
            _ => Self::PassThrough,
        }
    }

    /// Returns true if drivers call the generic path to the driver of an IOMMU.
    pub const fn has_generic_path(self) -> bool {
        matches!(self, Self::PassThrough | Self::StaticTable)
    }

    /// Returns true if the IOMMU looks accesses up in a table.
    pub const fn has_table(self) -> bool {
        matches!(
            self,
            Self::StaticTable | Self::WholeGuest | Self::XenWholeGuest
        )
    }
}

/// A computation over the types of a mode.
pub trait ModeVisitor {
    /// Result of the computation, the same type for every mode.
    type Output;
    /// Visits a mode without an allocator.
    fn identity(self, kind: IdentityKind) -> Self::Output;
    /// Visits a mode with an allocator and a table.
    fn paged<A, T, F>(self, parts: ModeParts<A, T, F>) -> Self::Output
    where
        A: ReplayAlloc,
        T: ReplayTable,
        F: FlushFor<A, T> + 'static;
    /// Visits a mode whose maps and unmaps another core executes. The default visits the layer of
    /// that core.
    fn offloaded<A, T>(self, parts: ModeParts<A, T, Strict>, _: UnmapWait) -> Self::Output
    where
        Self: Sized,
        A: ReplayAlloc,
        T: ReplayTable,
        Strict: FlushFor<A, T>,
    {
        self.paged(parts)
    }
    /// Visits a mode with a cache of mappings.
    fn cached<T: ReplayTable<Pages = ()>>(self, parts: CachedParts<T>) -> Self::Output;
    /// Visits a mode with a pool that stays mapped.
    fn shadow<P: CopyParts>(self, parts: P) -> Self::Output;
    /// Visits a mode whose tables are rings.
    fn rings<D, L, F>(self, parts: RingParts<D, L, F>) -> Self::Output
    where
        D: ReplayRing,
        L: RingLogic + 'static,
        F: FlushForRings<D> + 'static;
}

/// Calls `visitor` with the static types of a named mode, or with the shared types of another mode.
///
/// # Errors
/// The mode is not built in.
pub fn dispatch<V: ModeVisitor>(mode: &Mode, visitor: V) -> Result<V::Output, LabError> {
    special(mode, visitor)
        .or_else(|visitor| named(mode, visitor))
        .or_else(|visitor| shared(mode, visitor))
}

/// Calls `visitor` with the static types of a named mode. It is not compiled for the types that
/// other modes share.
///
/// # Errors
/// The mode is not built in, or has no static types.
pub fn dispatch_static<V: ModeVisitor>(mode: &Mode, visitor: V) -> Result<V::Output, LabError> {
    special(mode, visitor)
        .or_else(|visitor| named(mode, visitor))
        .map_err(|_| LabError::NotBuilt(mode.name.clone()))
}

/// Calls `visitor` with the shared types of `mode`, also if it is a named mode.
///
/// # Errors
/// The mode is not built in.
pub fn dispatch_dyn<V: ModeVisitor>(mode: &Mode, visitor: V) -> Result<V::Output, LabError> {
    special(mode, visitor).or_else(|visitor| shared(mode, visitor))
}

type DeferredFlush = Deferred<ThreadCell<DeferredQueue>>;
pub(crate) type PerCpuFlush =
    PerCpuQueue<ThreadCell<FlushQueue>, ThreadCell<Vec<Arc<ThreadCell<FlushQueue>>>>>;

fn deferred() -> DeferredFlush {
    Deferred::new(RefCell::new)
}

pub(crate) fn per_cpu_queue() -> PerCpuFlush {
    PerCpuQueue::new(QueueConfig::default(), RefCell::new, RefCell::new)
}

/// Calls `visitor` if one object implements several axes of `mode`: identity, rings or a cache of
/// mappings. Returns it otherwise.
fn special<V: ModeVisitor>(mode: &Mode, visitor: V) -> Result<V::Output, V> {
    use {Alloc as A, Coherency as C, FlushKind as F, TableKind as T};
    if mode.flush.has_cache() {
        return cached(mode, visitor);
    }
    if mode.has_pool() {
        return shadow(mode, visitor);
    }
    if mode.table == T::StaticFlat && mode.owner == Owner::Xen {
        return Ok(visitor.identity(IdentityKind::XenWholeGuest));
    }
    if !matches!(mode.owner, Owner::Kernel | Owner::Host) {
        return Err(visitor);
    }
    let coherency = match mode.table {
        T::Ring | T::RingAsPublished => C::Coherent,
        _ => C::NonCoherent,
    };
    let choice = match mode.alloc {
        A::RingFree => SlotChoice::NextFree,
        _ => SlotChoice::Tail,
    };
    Ok(match (mode.alloc, mode.table, mode.flush) {
        (A::Identity, table, F::Never) => visitor.identity(IdentityKind::of(table, mode.owner)),
        (A::RingTail | A::RingFree, T::Ring | T::RingNonCoherent, F::Burst) => {
            let parts = RingParts::new(choice, coherency, Burst::default);
            visitor.rings::<Ring, FixedLogic, Burst>(parts)
        }
        (A::RingTail | A::RingFree, T::Ring | T::RingNonCoherent, F::PerUnmap) => {
            let parts = RingParts::new(choice, coherency, || Strict);
            visitor.rings::<Ring, FixedLogic, Strict>(parts)
        }
        (
            A::RingTailAsPublished,
            T::RingAsPublished | T::RingNonCoherentAsPublished,
            F::BurstAsPublished,
        ) => {
            let parts = RingParts::new(choice, coherency, || BurstAsPublished);
            visitor.rings::<RingAsPublished, LogicAsPublished, BurstAsPublished>(parts)
        }
        _ => return Err(visitor),
    })
}

/// Calls `visitor` with the table of `mode`, which has a cache. Returns it if no cache is built in
/// front of the mode's allocator and table.
fn cached<V: ModeVisitor>(mode: &Mode, visitor: V) -> Result<V::Output, V> {
    use {Owner as W, TableKind as T};
    if mode.alloc != Alloc::LinuxRcache {
        return Err(visitor);
    }
    Ok(match (mode.owner, mode.table) {
        (W::Kernel, T::Radix) => visitor.cached(CachedParts::new(mode, plain_radix)),
        (W::Kernel, T::Flat) => visitor.cached(CachedParts::new(mode, flat_table)),
        (W::Emulated, T::Radix) => visitor.cached(CachedParts::new(mode, emulated_table)),
        (W::Nested, T::Radix) => visitor.cached(CachedParts::new(mode, nested_table)),
        (W::VirtioIommu, T::Radix) => {
            visitor.cached(CachedParts::new(mode, virtio_table(mode.owner)))
        }
        (W::Pviommu | W::PviommuHopt, T::Radix) => {
            visitor.cached(CachedParts::new(mode, pviommu(mode.owner)))
        }
        (owner @ (W::Xen | W::XenMulticall), T::Flat) => {
            visitor.cached(CachedParts::new(mode, xen_table(owner, mode.flush)))
        }
        _ => return Err(visitor),
    })
}

/// Calls `visitor` with the table that maps the pool of `mode`. Returns it if none is built in.
fn shadow<V: ModeVisitor>(mode: &Mode, visitor: V) -> Result<V::Output, V> {
    use {FlushKind as F, Owner as W, TableKind as T};
    let owner = mode.owner;
    if mode.alloc == Alloc::Pool && owner != W::Kernel {
        return Err(visitor);
    }
    if matches!(mode.alloc, Alloc::ShadowHybrid | Alloc::ShadowOrMap) {
        return match (owner, mode.table, mode.flush) {
            (W::Kernel, T::CachedRadix, F::PerUnmap) => {
                Ok(visitor.shadow(HybridParts::new(mode, || Strict)))
            }
            (W::Kernel, T::CachedRadix, F::Burst) => {
                Ok(visitor.shadow(HybridParts::new(mode, Burst::default)))
            }
            (W::Kernel, T::CachedRadix, F::TransmitBatch) => {
                Ok(visitor.shadow(HybridParts::new(mode, TransmitBatch::default)))
            }
            _ => Err(visitor),
        };
    }
    Ok(match (owner, mode.table, mode.flush) {
        (W::Kernel, T::Radix, F::PerUnmap) => visitor.shadow(ShadowParts::new(mode, plain_radix)),
        (W::VirtioIommu, T::Radix, F::PerUnmap) => {
            visitor.shadow(ShadowParts::new(mode, virtio_table(mode.owner)))
        }
        (W::Pviommu | W::PviommuHopt, T::Radix, F::PerUnmap) => {
            visitor.shadow(ShadowParts::new(mode, pviommu(mode.owner)))
        }
        _ => return Err(visitor),
    })
}

/// Calls `visitor` with the static types of a named mode, for timed replays and tests. Returns it
/// if `mode` is no such mode. An oracle replay takes [`shared`].
#[rustfmt::skip]
fn named<V: ModeVisitor>(mode: &Mode, visitor: V) -> Result<V::Output, V> {
    use {Alloc::*, FlushKind as F, ModeParts as P, Owner as W, TableKind as T};
    let strict = || Strict;
    let owner = match mode.owner {
        W::Host => W::Kernel,
        W::PviommuHopt => W::Pviommu,
        owner => owner,
    };
    Ok(match (owner, mode.alloc, mode.table, mode.flush) {
        (W::Kernel, CachedRbTree, T::Radix, F::PerUnmap) =>
            visitor.paged(P::new(mode, rb_tree, plain_radix, strict)),
        (W::Kernel, CachedRbTree, T::Radix, F::Deferred) =>
            visitor.paged(P::new(mode, rb_tree, plain_radix, deferred)),
        (W::Kernel, Eiovar(_), T::Radix, F::PerUnmap) =>
            visitor.paged(P::new(mode, eiovar, plain_radix, strict)),
        (W::Kernel, Eiovar(_), T::Radix, F::Deferred) =>
            visitor.paged(P::new(mode, eiovar, plain_radix, deferred)),
        (W::Kernel, Bitmap, T::Radix, F::PerWrap) =>
            visitor.paged(P::new(mode, bitmap, plain_radix, || PerWrap)),
        (W::Kernel, BitmapAsPublished, T::Radix, F::PerWrap) =>
            visitor.paged(P::new(mode, bitmap_as_published, plain_radix, || PerWrap)),
        (W::Kernel, Bitmap, T::Radix, F::PerUnmap) =>
            visitor.paged(P::new(mode, bitmap, plain_radix, strict)),
        (W::Kernel, FreeBsd, T::RadixReclaimAsPublished, F::PerUnmap) =>
            visitor.paged(P::new(mode, freebsd, reclaiming_radix_full_page, strict)),
        (W::Kernel, FreeBsd, T::RadixReclaim, F::PerUnmap) =>
            visitor.paged(P::new(mode, freebsd, reclaiming_radix, strict)),
        (W::Kernel, FreeBsd14, T::RadixReclaim, F::PerUnmap) =>
            visitor.paged(P::new(mode, freebsd_14, reclaiming_radix, strict)),
        (W::Kernel, LinuxMaple, T::Radix, F::PerUnmap) =>
            visitor.paged(P::new(mode, maple, plain_radix, strict)),
        (W::Kernel, LinuxRcache, T::Radix, F::PerUnmap) =>
            visitor.paged(P::new(mode, rcache, plain_radix, strict)),
        (W::Kernel, LinuxRcache, T::Radix, F::PerCpuQueue) =>
            visitor.paged(P::new(mode, rcache, plain_radix, per_cpu_queue)),
        (W::Kernel, Magazine, T::CachedRadix, F::PerUnmap) =>
            visitor.paged(P::new(mode, magazine, leaf_cached_radix, strict)),
        (W::Kernel, Magazine, T::CachedRadix, F::Burst) =>
            visitor.paged(P::new(mode, magazine, leaf_cached_radix, Burst::default)),
        (W::Kernel, Contiguous, T::CachedRadix, F::Descriptor) =>
            visitor.paged(P::new(mode, contiguous, leaf_cached_radix, Descriptors::default)),
        (W::Kernel, Contiguous, T::Radix, F::DescriptorAsPublished) =>
            visitor.paged(P::new(mode, contiguous, plain_radix, DescriptorsAsPublished::default)),
        (W::Emulated, LinuxRcache, T::Radix, F::PerUnmap) =>
            visitor.paged(P::new(mode, rcache, emulated_table, strict)),
        (W::Emulated, LinuxRcache, T::Radix, F::PerCpuQueue) =>
            visitor.paged(P::new(mode, rcache, emulated_table, per_cpu_queue)),
        (W::Nested, LinuxRcache, T::Radix, F::PerUnmap) =>
            visitor.paged(P::new(mode, rcache, nested_table, strict)),
        (W::VirtioIommu, LinuxRcache, T::Radix, F::PerUnmap) =>
            visitor.paged(P::new(mode, rcache, virtio_table(mode.owner), strict)),
        (W::VirtioIommu | W::VirtioIommuLazy, LinuxRcache, T::Radix, F::PerCpuQueue) =>
            visitor.paged(P::new(mode, rcache, virtio_table(mode.owner), per_cpu_queue)),
        (W::Sidecore, LinuxRcache, T::Radix, F::PerUnmap | F::Async) =>
            visitor.offloaded(P::new(mode, rcache, plain_radix, || Strict), UnmapWait::of(mode)),
        (W::Pviommu, LinuxRcache, T::Radix, F::PerUnmap) =>
            visitor.paged(P::new(mode, rcache, pviommu(mode.owner), strict)),
        _ => return Err(visitor),
    })
}

/// Calls `visitor` with the types that modes share, named or composed, if the mode has an allocator
/// and a table.
fn shared<V: ModeVisitor>(mode: &Mode, visitor: V) -> Result<V::Output, LabError> {
    use {Alloc as A, FlushKind as F, ModeParts as P, Owner as W, TableKind as T};
    let fits = match mode.alloc {
        A::Identity | A::RingTail | A::RingFree | A::RingTailAsPublished => false,
        A::Shadow | A::ShadowHybrid | A::ShadowOrMap | A::Pool => false,
        A::Bitmap => true,
        A::BitmapAsPublished => mode.flush == F::PerWrap,
        A::TableBitmap => mode.table == T::Flat,
        _ => mode.flush != F::PerWrap,
    };
    if !fits {
        return Err(LabError::NotBuilt(mode.name.clone()));
    }
    match (mode.owner, mode.table, mode.flush) {
        (W::Kernel | W::Host, T::Radix, _) => with_any_flush(mode, plain_radix, visitor),
        (W::Kernel | W::Host, T::CachedRadix, _) => {
            with_any_flush(mode, leaf_cached_radix, visitor)
        }
        (W::Kernel | W::Host, T::Flat, _) => with_any_flush(mode, flat_table, visitor),
        (W::Kernel | W::Host, T::RadixReclaimAsPublished, F::PerUnmap) => {
            let table = reclaiming_radix_full_page;
            Ok(visitor.paged(P::new(mode, dyn_alloc, table, || Strict)))
        }
        (W::Kernel | W::Host, T::RadixReclaim, F::PerUnmap) => {
            Ok(visitor.paged(P::new(mode, dyn_alloc, reclaiming_radix, || Strict)))
        }
        (W::Sidecore, T::Radix, F::PerUnmap | F::Async) => Ok(visitor.offloaded(
            P::new(mode, dyn_alloc, plain_radix, || Strict),
            UnmapWait::of(mode),
        )),
        (W::Sidecore, T::CachedRadix, F::PerUnmap | F::Async) => Ok(visitor.offloaded(
            P::new(mode, dyn_alloc, leaf_cached_radix, || Strict),
            UnmapWait::of(mode),
        )),
        (W::Sidecore, T::Flat, F::PerUnmap | F::Async) => Ok(visitor.offloaded(
            P::new(mode, dyn_alloc, flat_table, || Strict),
            UnmapWait::of(mode),
        )),
        (W::Emulated, T::Radix, _) => with_flush(mode, emulated_table, visitor),
        (W::Nested, T::Radix, _) => with_flush(mode, nested_table, visitor),
        (owner @ (W::VirtioIommu | W::VirtioIommuLazy), T::Radix, _) => {
            with_flush(mode, virtio_table(owner), visitor)
        }
        (owner, T::Flat, _) if owner.is_xen() => {
            with_any_flush(mode, xen_table(owner, mode.flush), visitor)
        }
        (W::Pviommu | W::PviommuHopt, T::Radix, F::PerUnmap) => {
            let table = pviommu(mode.owner);
            Ok(visitor.paged(P::new(mode, dyn_alloc, table, || Strict)))
        }
        (W::Pviommu | W::PviommuHopt, T::Radix, F::Burst) => {
            let table = pviommu(mode.owner);
            Ok(visitor.paged(P::new(mode, dyn_alloc, table, Burst::default)))
        }
        _ => Err(LabError::NotBuilt(mode.name.clone())),
    }
}

/// Calls `visitor` with a table and the mode's flush policy.
fn with_any_flush<T: ReplayTable<Pages = ()>, V: ModeVisitor>(
    mode: &Mode,
    table: MakeTable<T>,
    visitor: V,
) -> Result<V::Output, LabError> {
    if mode.flush == FlushKind::PerWrap {
        return Ok(visitor.paged(ModeParts::new(mode, dyn_bitmap, table, || PerWrap)));
    }
    with_flush(mode, table, visitor)
}

/// Calls `visitor` with the mode's flush policy, which frees flushed ranges.
fn with_flush<T: ReplayTable<Pages = ()>, V: ModeVisitor>(
    mode: &Mode,
    table: MakeTable<T>,
    visitor: V,
) -> Result<V::Output, LabError> {
    use {FlushKind as F, ModeParts as P};
    Ok(match mode.flush {
        F::PerUnmap => visitor.paged(P::new(mode, dyn_alloc, table, || Strict)),
        F::Deferred => visitor.paged(P::new(mode, dyn_alloc, table, deferred)),
        F::PerCpuQueue => visitor.paged(P::new(mode, dyn_alloc, table, per_cpu_queue)),
        F::Burst => visitor.paged(P::new(mode, dyn_alloc, table, Burst::default)),
        F::Descriptor => visitor.paged(P::new(mode, dyn_alloc, table, Descriptors::default)),
        F::TransmitBatch => visitor.paged(P::new(mode, dyn_alloc, table, TransmitBatch::default)),
        F::DescriptorAsPublished => visitor.paged(P::new(
            mode,
            dyn_alloc,
            table,
            DescriptorsAsPublished::default,
        )),
        _ => return Err(LabError::NotBuilt(mode.name.clone())),
    })
}

#[cfg(test)]
mod tests;
