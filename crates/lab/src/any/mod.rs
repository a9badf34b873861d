//! Parts that dispatch at each operation. What is judged and counted goes through them in every mode with an allocator, so that there is one
//! copy of it for many modes; what is timed, only in rows that nobody has named ([`replica`]).

mod alloc;
mod flush;
mod removable;
mod replica;
mod table;

pub(crate) use replica::meter;

use ringfence_dma::flush::{Burst, PerWrap, Strict};
use ringfence_dma::space::Rounding;

use crate::build::{
    Flat, Job, MakeAlloc, MakeTable, Recipe, Reclaimer, ReplayTable, flat, queue, queues,
    reclaimer, reclaimer_of_pages, virtio,
};
use crate::error::LabError;
use crate::hosted::{self, PviommuTable, VirtioTable};
use crate::modes::{Alloc, FlushKind, Mode, TableKind, Who};
use alloc::{AnyAlloc, AnyBitmap};
use flush::AnyFlush;
use table::AnyRadix;

fn recipe<A, T, F>(
    mode: &Mode,
    alloc: MakeAlloc<A>,
    table: MakeTable<T>,
    flush: fn() -> F,
) -> Recipe<A, T, F>
where
    T: ReplayTable,
{
    Recipe {
        alloc,
        answer: mode.alloc,
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

fn flush_of(mode: &Mode) -> fn() -> AnyFlush {
    use FlushKind as F;
    match mode.flush {
        F::PerUnmap => || AnyFlush::Strict,
        F::Deferred => || AnyFlush::Deferred(queue()),
        F::PerCpuQueue => || AnyFlush::PerCpu(queues()),
        F::Burst => || AnyFlush::Burst(Burst::default()),
        F::PerWrap
        | F::Never
        | F::BurstLiteral
        | F::PerCycle
        | F::PerCycleAdaptive
        | F::PerCycleLiteral => || AnyFlush::Strict,
    }
}

/// Tables that keep their pages.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kept {
    Plain,
    Cached,
    Flat,
    Virtio,
    /// With or without what the document has the host do less by.
    Pviommu(Who),
}

/// What a row is put together from.
pub(crate) enum Composed {
    /// An allocator that takes flushed ranges back.
    Kept(Kept),
    /// One that asks for a flush when it wraps.
    Bitmap(Kept),
    /// One that takes flushed ranges back, and a table that gives empty pages back.
    Reclaiming(MakeTable<Reclaimer>),
}

/// What `mode` is put together from.
///
/// # Errors
/// A row that makes no sense, or that identity, rings or a cache carry out in one piece.
pub(crate) fn composed(mode: &Mode) -> Result<Composed, LabError> {
    use {Alloc as A, FlushKind as F, TableKind as T};
    let not_built = || Err(LabError::NotBuilt(mode.name.clone()));
    let of_a_guest = matches!(
        (mode.alloc, mode.table),
        (
            A::CachedRbTree | A::Eiovar(_) | A::FreeBsd | A::LinuxRcache | A::Magazine | A::Bitmap,
            T::Radix
        )
    );
    match (mode.who, mode.flush) {
        (Who::VirtioIommu, F::PerUnmap | F::Deferred | F::PerCpuQueue | F::Burst) if of_a_guest => {
            return Ok(Composed::Kept(Kept::Virtio));
        }
        (who @ (Who::Pviommu | Who::PviommuHopt), F::PerUnmap | F::Burst) if of_a_guest => {
            return Ok(Composed::Kept(Kept::Pviommu(who)));
        }
        (Who::VirtioIommu | Who::Pviommu | Who::PviommuHopt, _) => return not_built(),
        (Who::Kernel | Who::Host, _) => {}
    }
    Ok(match (mode.alloc, mode.table, mode.flush) {
        (A::Identity | A::RingTail | A::RingFree | A::RingTailLiteral, _, _)
        | (
            _,
            T::None
            | T::PassThrough
            | T::StaticRadix
            | T::Ring
            | T::RingNonCoherent
            | T::RingLiteral
            | T::RingNonCoherentLiteral,
            _,
        )
        | (
            _,
            _,
            F::Never | F::BurstLiteral | F::PerCycle | F::PerCycleAdaptive | F::PerCycleLiteral,
        ) => return not_built(),
        (A::Bitmap | A::BitmapLiteral, T::Radix, F::PerWrap) => Composed::Bitmap(Kept::Plain),
        (A::Bitmap | A::BitmapLiteral, T::CachedRadix, F::PerWrap) => {
            Composed::Bitmap(Kept::Cached)
        }
        (A::Bitmap | A::BitmapLiteral | A::TableBitmap, T::Flat, F::PerWrap) => {
            Composed::Bitmap(Kept::Flat)
        }
        (A::BitmapLiteral, _, _) | (_, _, F::PerWrap) => return not_built(),
        (_, T::Flat, _) => Composed::Kept(Kept::Flat),
        (A::TableBitmap, _, _) => return not_built(),
        (_, T::Radix, _) => Composed::Kept(Kept::Plain),
        (_, T::CachedRadix, _) => Composed::Kept(Kept::Cached),
        (_, T::RadixReclaimPage, F::PerUnmap) => Composed::Reclaiming(reclaimer_of_pages),
        (_, T::RadixReclaim, F::PerUnmap) => Composed::Reclaiming(reclaimer),
        (_, T::RadixReclaimPage | T::RadixReclaim, _) => return not_built(),
    })
}

/// Calls the job with parts that dispatch.
pub(crate) fn dispatch<J: Job>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    let flush = flush_of(mode);
    Ok(match composed(mode)? {
        Composed::Kept(Kept::Plain) => {
            let recipe = recipe(mode, alloc::alloc, table::plain, flush);
            job.paged::<AnyAlloc, AnyRadix, AnyFlush>(recipe)
        }
        Composed::Kept(Kept::Cached) => {
            let recipe = recipe(mode, alloc::alloc, table::cached, flush);
            job.paged::<AnyAlloc, AnyRadix, AnyFlush>(recipe)
        }
        Composed::Kept(Kept::Flat) => {
            job.paged::<AnyAlloc, Flat, AnyFlush>(recipe(mode, alloc::alloc, flat, flush))
        }
        Composed::Kept(Kept::Virtio) => {
            let recipe = recipe(mode, alloc::alloc, virtio, flush);
            job.paged::<AnyAlloc, VirtioTable, AnyFlush>(recipe)
        }
        Composed::Kept(Kept::Pviommu(who)) => {
            let recipe = recipe(mode, alloc::alloc, hosted::pviommu(who), flush);
            job.paged::<AnyAlloc, PviommuTable, AnyFlush>(recipe)
        }
        Composed::Bitmap(Kept::Plain) => {
            let recipe = recipe(mode, alloc::bitmap_of, table::plain, || PerWrap);
            job.paged::<AnyBitmap, AnyRadix, PerWrap>(recipe)
        }
        Composed::Bitmap(Kept::Cached) => {
            let recipe = recipe(mode, alloc::bitmap_of, table::cached, || PerWrap);
            job.paged::<AnyBitmap, AnyRadix, PerWrap>(recipe)
        }
        Composed::Bitmap(Kept::Flat) => {
            let recipe = recipe(mode, alloc::bitmap_of, flat, || PerWrap);
            job.paged::<AnyBitmap, Flat, PerWrap>(recipe)
        }
        Composed::Bitmap(Kept::Virtio | Kept::Pviommu(_)) => {
            return Err(LabError::NotBuilt(mode.name.clone()));
        }
        Composed::Reclaiming(table) => {
            let recipe = recipe(mode, alloc::alloc, table, || Strict);
            job.paged::<AnyAlloc, Reclaimer, Strict>(recipe)
        }
    })
}
