//! Enum-dispatched components. Oracle replays of all allocator-based modes use them, so they are
//! compiled once. Timed replays use them only for user-composed modes ([`timed_replay`]); named
//! modes are monomorphised.

mod alloc;
mod flush;
mod optional_table;
mod table;
mod timed_replay;

pub(crate) use timed_replay::meter;

use ringfence_dma::flush::{Burst, PerWrap, Strict};
use ringfence_dma::space::Rounding;

use crate::error::LabError;
use crate::guest::{self, PviommuTable, VirtioTable};
use crate::mode_dispatch::{
    FlatTable, MakeAlloc, MakeTable, ModeParts, ModeVisitor, ReclaimingRadix, ReplayTable,
    deferred_flush, flat_table, per_cpu_flush, reclaiming_radix, reclaiming_radix_full_page,
    virtio_table,
};
use crate::modes::{Alloc, FlushKind, Mode, Owner, TableKind};
use alloc::{DynAlloc, DynBitmap};
use flush::DynFlush;
use table::DynRadix;

fn recipe<A, T, F>(
    mode: &Mode,
    alloc: MakeAlloc<A>,
    table: MakeTable<T>,
    flush: fn() -> F,
) -> ModeParts<A, T, F>
where
    T: ReplayTable,
{
    ModeParts {
        alloc,
        kind: mode.alloc,
        flush,
        rounding: rounding(mode),
        table,
    }
}

fn rounding(mode: &Mode) -> Rounding {
    match mode.alloc {
        Alloc::CachedRbTree | Alloc::Eiovar(_) => Rounding::PowerOfTwo,
        _ => Rounding::Exact,
    }
}

fn flush_of(mode: &Mode) -> fn() -> DynFlush {
    use FlushKind as F;
    match mode.flush {
        F::PerUnmap => || DynFlush::Strict,
        F::Deferred => || DynFlush::Deferred(deferred_flush()),
        F::PerCpuQueue => || DynFlush::PerCpu(per_cpu_flush()),
        F::Burst => || DynFlush::Burst(Burst::default()),
        F::PerWrap
        | F::Never
        | F::BurstAsPublished
        | F::PerCycle
        | F::PerCycleAdaptive
        | F::PerCycleAsPublished => || DynFlush::Strict,
    }
}

/// Tables that keep their table pages.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TableBackend {
    Plain,
    Cached,
    Flat,
    Virtio,
    /// With or without the host optimisations of the PVIOMMU paper.
    Pviommu(Owner),
}

/// The kinds of components of a composed mode.
pub(crate) enum Composition {
    /// An allocator that frees flushed ranges.
    Kept(TableBackend),
    /// An allocator that frees cleared ranges and requests a flush when it wraps.
    Bitmap(TableBackend),
    /// An allocator that frees flushed ranges, and a table that frees empty table pages.
    Reclaiming(MakeTable<ReclaimingRadix>),
}

/// Returns the kinds of components of `mode`.
///
/// # Errors
/// The mode is invalid, or one object implements it: identity, rings or a cache.
pub(crate) fn composition(mode: &Mode) -> Result<Composition, LabError> {
    use {Alloc as A, FlushKind as F, TableKind as T};
    let not_built = || Err(LabError::NotBuilt(mode.name.clone()));
    let of_a_guest = matches!(
        (mode.alloc, mode.table),
        (
            A::CachedRbTree | A::Eiovar(_) | A::FreeBsd | A::LinuxRcache | A::Magazine | A::Bitmap,
            T::Radix
        )
    );
    match (mode.owner, mode.flush) {
        (Owner::VirtioIommu, F::PerUnmap | F::Deferred | F::PerCpuQueue | F::Burst)
            if of_a_guest =>
        {
            return Ok(Composition::Kept(TableBackend::Virtio));
        }
        (who @ (Owner::Pviommu | Owner::PviommuHopt), F::PerUnmap | F::Burst) if of_a_guest => {
            return Ok(Composition::Kept(TableBackend::Pviommu(who)));
        }
        (Owner::VirtioIommu | Owner::Pviommu | Owner::PviommuHopt, _) => return not_built(),
        (Owner::Kernel | Owner::Host, _) => {}
    }
    Ok(match (mode.alloc, mode.table, mode.flush) {
        (A::Identity | A::RingTail | A::RingFree | A::RingTailAsPublished, _, _)
        | (
            _,
            T::None
            | T::PassThrough
            | T::StaticRadix
            | T::Ring
            | T::RingNonCoherent
            | T::RingAsPublished
            | T::RingNonCoherentAsPublished,
            _,
        )
        | (
            _,
            _,
            F::Never
            | F::BurstAsPublished
            | F::PerCycle
            | F::PerCycleAdaptive
            | F::PerCycleAsPublished,
        ) => return not_built(),
        (A::Bitmap | A::BitmapAsPublished, T::Radix, F::PerWrap) => {
            Composition::Bitmap(TableBackend::Plain)
        }
        (A::Bitmap | A::BitmapAsPublished, T::CachedRadix, F::PerWrap) => {
            Composition::Bitmap(TableBackend::Cached)
        }
        (A::Bitmap | A::BitmapAsPublished | A::TableBitmap, T::Flat, F::PerWrap) => {
            Composition::Bitmap(TableBackend::Flat)
        }
        (A::BitmapAsPublished, _, _) | (_, _, F::PerWrap) => return not_built(),
        (_, T::Flat, _) => Composition::Kept(TableBackend::Flat),
        (A::TableBitmap, _, _) => return not_built(),
        (_, T::Radix, _) => Composition::Kept(TableBackend::Plain),
        (_, T::CachedRadix, _) => Composition::Kept(TableBackend::Cached),
        (_, T::RadixReclaimPage, F::PerUnmap) => {
            Composition::Reclaiming(reclaiming_radix_full_page)
        }
        (_, T::RadixReclaim, F::PerUnmap) => Composition::Reclaiming(reclaiming_radix),
        (_, T::RadixReclaimPage | T::RadixReclaim, _) => return not_built(),
    })
}

/// Calls `job` with enum-dispatched components.
pub(crate) fn dispatch<J: ModeVisitor>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    let flush = flush_of(mode);
    Ok(match composition(mode)? {
        Composition::Kept(TableBackend::Plain) => {
            let recipe = recipe(mode, alloc::alloc, table::plain, flush);
            job.paged::<DynAlloc, DynRadix, DynFlush>(recipe)
        }
        Composition::Kept(TableBackend::Cached) => {
            let recipe = recipe(mode, alloc::alloc, table::cached, flush);
            job.paged::<DynAlloc, DynRadix, DynFlush>(recipe)
        }
        Composition::Kept(TableBackend::Flat) => job
            .paged::<DynAlloc, FlatTable, DynFlush>(recipe(mode, alloc::alloc, flat_table, flush)),
        Composition::Kept(TableBackend::Virtio) => {
            let recipe = recipe(mode, alloc::alloc, virtio_table, flush);
            job.paged::<DynAlloc, VirtioTable, DynFlush>(recipe)
        }
        Composition::Kept(TableBackend::Pviommu(who)) => {
            let recipe = recipe(mode, alloc::alloc, guest::pviommu(who), flush);
            job.paged::<DynAlloc, PviommuTable, DynFlush>(recipe)
        }
        Composition::Bitmap(TableBackend::Plain) => {
            let recipe = recipe(mode, alloc::bitmap_of, table::plain, || PerWrap);
            job.paged::<DynBitmap, DynRadix, PerWrap>(recipe)
        }
        Composition::Bitmap(TableBackend::Cached) => {
            let recipe = recipe(mode, alloc::bitmap_of, table::cached, || PerWrap);
            job.paged::<DynBitmap, DynRadix, PerWrap>(recipe)
        }
        Composition::Bitmap(TableBackend::Flat) => {
            let recipe = recipe(mode, alloc::bitmap_of, flat_table, || PerWrap);
            job.paged::<DynBitmap, FlatTable, PerWrap>(recipe)
        }
        Composition::Bitmap(TableBackend::Virtio | TableBackend::Pviommu(_)) => {
            return Err(LabError::NotBuilt(mode.name.clone()));
        }
        Composition::Reclaiming(table) => {
            let recipe = recipe(mode, alloc::alloc, table, || Strict);
            job.paged::<DynAlloc, ReclaimingRadix, Strict>(recipe)
        }
    })
}
