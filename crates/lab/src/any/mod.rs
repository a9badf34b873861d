//! Parts that dispatch at each operation. What is judged and counted goes through them in every mode with an allocator, so that there is one
//! copy of it for many modes; what is timed, only in rows that nobody has named.

mod alloc;
mod flush;
mod table;

use ringfence_dma::flush::{Burst, PerWrap, Strict};
use ringfence_dma::space::Rounding;

use crate::build::{
    Flat, Job, MakeTable, Recipe, Reclaimer, ReplayTable, Site, flat, queue, queues, reclaimer,
    reclaimer_of_pages, virtio,
};
use crate::error::LabError;
use crate::hosted::{self, PviommuTable, VirtioTable};
use crate::modes::{Alloc, FlushKind, Mode, TableKind, Who};
use alloc::{AnyAlloc, AnyBitmap};
use flush::AnyFlush;
use table::AnyRadix;

fn recipe<A, T, F>(
    mode: &Mode,
    alloc: fn(&Site<'_>) -> Result<A, LabError>,
    table: MakeTable<T>,
    flush: fn() -> F,
) -> Recipe<A, T, F>
where
    T: ReplayTable,
{
    let rounding = match mode.alloc {
        Alloc::CachedRbTree | Alloc::Eiovar(_) => Rounding::PowerOfTwo,
        _ => Rounding::Exact,
    };
    Recipe {
        alloc,
        answer: mode.alloc,
        flush,
        rounding,
        table,
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

/// Calls the job with parts that dispatch, for rows whose table a host keeps behind a virtio-iommu.
fn dispatch_virtio<J: Job>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    use {Alloc as A, FlushKind as F, TableKind as T};
    match (mode.alloc, mode.table, mode.flush) {
        (
            A::CachedRbTree | A::Eiovar(_) | A::FreeBsd | A::LinuxRcache | A::Magazine | A::Bitmap,
            T::Radix,
            F::PerUnmap | F::Deferred | F::PerCpuQueue | F::Burst,
        ) => {
            let recipe = recipe(mode, alloc::alloc, virtio, flush_of(mode));
            Ok(job.paged::<AnyAlloc, VirtioTable, AnyFlush>(recipe))
        }
        _ => Err(LabError::NotBuilt(mode.name.clone())),
    }
}

/// Calls the job with parts that dispatch, for rows whose table a host keeps behind a para-virtual IOMMU.
fn dispatch_pviommu<J: Job>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    use {Alloc as A, FlushKind as F, TableKind as T};
    match (mode.alloc, mode.table, mode.flush) {
        (
            A::CachedRbTree | A::Eiovar(_) | A::FreeBsd | A::LinuxRcache | A::Magazine | A::Bitmap,
            T::Radix,
            F::PerUnmap | F::Burst,
        ) => {
            let table = hosted::pviommu(mode.who);
            let recipe = recipe(mode, alloc::alloc, table, flush_of(mode));
            Ok(job.paged::<AnyAlloc, PviommuTable, AnyFlush>(recipe))
        }
        (_, _, F::PerCycle | F::PerCycleAdaptive | F::PerCycleLiteral) => {
            hosted::dispatch(mode, job)
        }
        _ => Err(LabError::NotBuilt(mode.name.clone())),
    }
}

/// Calls the job with parts that dispatch.
pub(crate) fn dispatch<J: Job>(mode: &Mode, job: J) -> Result<J::Output, LabError> {
    use {Alloc as A, FlushKind as F, TableKind as T};
    match mode.who {
        Who::VirtioIommu => return dispatch_virtio(mode, job),
        Who::Pviommu | Who::PviommuHopt => return dispatch_pviommu(mode, job),
        Who::Kernel | Who::Host => {}
    }
    let flush = flush_of(mode);
    let not_built = || Err(LabError::NotBuilt(mode.name.clone()));
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
        (A::Bitmap | A::BitmapLiteral, T::Radix, F::PerWrap) => {
            let recipe = recipe(mode, alloc::bitmap_of, table::plain, || PerWrap);
            job.paged::<AnyBitmap, AnyRadix, PerWrap>(recipe)
        }
        (A::Bitmap | A::BitmapLiteral, T::CachedRadix, F::PerWrap) => {
            let recipe = recipe(mode, alloc::bitmap_of, table::cached, || PerWrap);
            job.paged::<AnyBitmap, AnyRadix, PerWrap>(recipe)
        }
        (A::Bitmap | A::BitmapLiteral | A::TableBitmap, T::Flat, F::PerWrap) => {
            let recipe = recipe(mode, alloc::bitmap_of, flat, || PerWrap);
            job.paged::<AnyBitmap, Flat, PerWrap>(recipe)
        }
        (A::BitmapLiteral, _, _) | (_, _, F::PerWrap) => return not_built(),
        (_, T::Flat, _) => {
            job.paged::<AnyAlloc, Flat, AnyFlush>(recipe(mode, alloc::alloc, flat, flush))
        }
        (A::TableBitmap, _, _) => return not_built(),
        (_, T::Radix, _) => {
            let recipe = recipe(mode, alloc::alloc, table::plain, flush);
            job.paged::<AnyAlloc, AnyRadix, AnyFlush>(recipe)
        }
        (_, T::CachedRadix, _) => {
            let recipe = recipe(mode, alloc::alloc, table::cached, flush);
            job.paged::<AnyAlloc, AnyRadix, AnyFlush>(recipe)
        }
        (_, T::RadixReclaimPage, F::PerUnmap) => {
            let recipe = recipe(mode, alloc::alloc, reclaimer_of_pages, || Strict);
            job.paged::<AnyAlloc, Reclaimer, Strict>(recipe)
        }
        (_, T::RadixReclaim, F::PerUnmap) => {
            let recipe = recipe(mode, alloc::alloc, reclaimer, || Strict);
            job.paged::<AnyAlloc, Reclaimer, Strict>(recipe)
        }
        (_, T::RadixReclaimPage | T::RadixReclaim, _) => return not_built(),
    })
}
