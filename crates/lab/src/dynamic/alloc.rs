//! Enum-dispatched allocators: one for allocators that free flushed ranges, one for those that free
//! cleared ranges.

use std::rc::Rc;

use ringfence_iova::{AllocError, AllocRequest, Allocation, IovaAllocator};
use ringfence_types::{Flushed, Pfn, PfnRange, Unmapped, WholeDomain};

use crate::error::LabError;
use crate::meter::{AllocTrace, ReplayAlloc, ReplayedAlloc};
use crate::mode_dispatch::{
    AllocEnv, BitmapAlloc, EiovarAlloc, FreeBsdAlloc, MagazineAlloc, RbTreeAlloc, RcacheAlloc,
    TableBitmapAlloc, bitmap, bitmap_as_published, eiovar, freebsd, magazine, rb_tree, rcache,
    table_bitmap,
};
use crate::modes::Alloc;

/// Any allocator that frees flushed ranges.
pub(super) struct DynAlloc {
    which: AllocImpl,
    /// True if lookups are enabled.
    finds: bool,
}

/// The allocator, real or replayed, so that the meter's ablations share one type.
// One per domain, and it never moves.
#[allow(clippy::large_enum_variant)]
enum AllocImpl {
    Recorded(ReplayedAlloc<Flushed>),
    Tree(RbTreeAlloc),
    Freelists(EiovarAlloc),
    Bitmap(BitmapAlloc),
    TableBitmap(TableBitmapAlloc),
    Gas(FreeBsdAlloc),
    Rcache(RcacheAlloc),
    Magazines(MagazineAlloc),
}

/// The per-CPU part of any allocator.
pub(super) enum DynAllocCpu {
    None(()),
    Bitmap(<BitmapAlloc as IovaAllocator>::PerCpu),
    TableBitmap(<TableBitmapAlloc as IovaAllocator>::PerCpu),
    Rcache(Box<<RcacheAlloc as IovaAllocator>::PerCpu>),
    Magazines(Box<<MagazineAlloc as IovaAllocator>::PerCpu>),
}

pub(super) fn alloc(site: &AllocEnv<'_>) -> Result<DynAlloc, LabError> {
    let which = match site.kind {
        Alloc::CachedRbTree => AllocImpl::Tree(rb_tree(site)?),
        Alloc::Eiovar(_) => AllocImpl::Freelists(eiovar(site)?),
        Alloc::Bitmap => AllocImpl::Bitmap(bitmap(site)?),
        Alloc::TableBitmap => AllocImpl::TableBitmap(table_bitmap(site)?),
        Alloc::FreeBsd => AllocImpl::Gas(freebsd(site)?),
        Alloc::LinuxRcache => AllocImpl::Rcache(rcache(site)?),
        Alloc::Magazine => AllocImpl::Magazines(magazine(site)?),
        Alloc::Identity
        | Alloc::BitmapAsPublished
        | Alloc::RingTail
        | Alloc::RingFree
        | Alloc::RingTailAsPublished => {
            return Err(LabError::Internal("allocator without a composed form"));
        }
    };
    Ok(DynAlloc { which, finds: true })
}

impl ReplayAlloc for DynAlloc {
    type NoFind = Self;
    type Replayed = Self;

    fn without_find(self) -> Self {
        Self {
            finds: false,
            ..self
        }
    }

    fn replayed(tape: Rc<AllocTrace>) -> Self {
        Self {
            which: AllocImpl::Recorded(ReplayedAlloc::new(tape)),
            finds: false,
        }
    }
}

impl IovaAllocator for DynAlloc {
    type PerCpu = DynAllocCpu;
    type FreeProof = Flushed;

    fn has_lookup(&self) -> bool {
        let index = matches!(
            self.which,
            AllocImpl::Tree(_) | AllocImpl::Freelists(_) | AllocImpl::Gas(_)
        );
        self.finds && index
    }

    fn per_cpu(&self) -> DynAllocCpu {
        match &self.which {
            AllocImpl::Bitmap(a) => DynAllocCpu::Bitmap(a.per_cpu()),
            AllocImpl::TableBitmap(a) => DynAllocCpu::TableBitmap(a.per_cpu()),
            AllocImpl::Rcache(a) => DynAllocCpu::Rcache(Box::new(a.per_cpu())),
            AllocImpl::Magazines(a) => DynAllocCpu::Magazines(Box::new(a.per_cpu())),
            AllocImpl::Recorded(_)
            | AllocImpl::Tree(_)
            | AllocImpl::Freelists(_)
            | AllocImpl::Gas(_) => DynAllocCpu::None(()),
        }
    }

    fn alloc(
        &self,
        cpu: &mut DynAllocCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        match (&self.which, cpu) {
            (AllocImpl::Recorded(a), DynAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (AllocImpl::Tree(a), DynAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (AllocImpl::Freelists(a), DynAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (AllocImpl::Gas(a), DynAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (AllocImpl::Bitmap(a), DynAllocCpu::Bitmap(cpu)) => a.alloc(cpu, request),
            (AllocImpl::TableBitmap(a), DynAllocCpu::TableBitmap(cpu)) => a.alloc(cpu, request),
            (AllocImpl::Rcache(a), DynAllocCpu::Rcache(cpu)) => a.alloc(cpu, request),
            (AllocImpl::Magazines(a), DynAllocCpu::Magazines(cpu)) => a.alloc(cpu, request),
            _ => Err(AllocError::OutOfMemory),
        }
    }

    fn find(&self, cpu: &mut DynAllocCpu, page: Pfn) -> Option<PfnRange> {
        if !self.finds {
            return None;
        }
        match (&self.which, cpu) {
            (AllocImpl::Tree(a), DynAllocCpu::None(cpu)) => a.find(cpu, page),
            (AllocImpl::Freelists(a), DynAllocCpu::None(cpu)) => a.find(cpu, page),
            (AllocImpl::Gas(a), DynAllocCpu::None(cpu)) => a.find(cpu, page),
            _ => None,
        }
    }

    fn free(&self, cpu: &mut DynAllocCpu, range: Flushed) -> bool {
        match (&self.which, cpu) {
            (AllocImpl::Recorded(a), DynAllocCpu::None(cpu)) => a.free(cpu, range),
            (AllocImpl::Tree(a), DynAllocCpu::None(cpu)) => a.free(cpu, range),
            (AllocImpl::Freelists(a), DynAllocCpu::None(cpu)) => a.free(cpu, range),
            (AllocImpl::Gas(a), DynAllocCpu::None(cpu)) => a.free(cpu, range),
            (AllocImpl::Bitmap(a), DynAllocCpu::Bitmap(cpu)) => a.free(cpu, range.into()),
            (AllocImpl::TableBitmap(a), DynAllocCpu::TableBitmap(cpu)) => a.free(cpu, range.into()),
            (AllocImpl::Rcache(a), DynAllocCpu::Rcache(cpu)) => a.free(cpu, range),
            (AllocImpl::Magazines(a), DynAllocCpu::Magazines(cpu)) => a.free(cpu, range),
            _ => false,
        }
    }

    fn flushed(&self, cpu: &mut DynAllocCpu, proof: Flushed<WholeDomain>) {
        match (&self.which, cpu) {
            (AllocImpl::Bitmap(a), DynAllocCpu::Bitmap(cpu)) => a.flushed(cpu, proof),
            (AllocImpl::TableBitmap(a), DynAllocCpu::TableBitmap(cpu)) => a.flushed(cpu, proof),
            _ => {}
        }
    }

    fn drain(&self, cpu: &mut DynAllocCpu) {
        match (&self.which, cpu) {
            (AllocImpl::Rcache(a), DynAllocCpu::Rcache(cpu)) => a.drain(cpu),
            (AllocImpl::Magazines(a), DynAllocCpu::Magazines(cpu)) => a.drain(cpu),
            _ => {}
        }
    }

    fn footprint(&self) -> usize {
        match &self.which {
            AllocImpl::Recorded(a) => a.footprint(),
            AllocImpl::Tree(a) => a.footprint(),
            AllocImpl::Freelists(a) => a.footprint(),
            AllocImpl::Bitmap(a) => a.footprint(),
            AllocImpl::TableBitmap(a) => a.footprint(),
            AllocImpl::Gas(a) => a.footprint(),
            AllocImpl::Rcache(a) => a.footprint(),
            AllocImpl::Magazines(a) => a.footprint(),
        }
    }
}

/// Any allocator that frees cleared ranges and requests a flush when it wraps.
pub(super) enum DynBitmap {
    Recorded(ReplayedAlloc<Unmapped>),
    Own(BitmapAlloc),
    Table(TableBitmapAlloc),
}

/// The per-CPU part of either bitmap.
pub(super) enum DynBitmapCpu {
    None(()),
    Own(<BitmapAlloc as IovaAllocator>::PerCpu),
    Table(<TableBitmapAlloc as IovaAllocator>::PerCpu),
}

pub(super) fn bitmap_of(site: &AllocEnv<'_>) -> Result<DynBitmap, LabError> {
    Ok(match site.kind {
        Alloc::Bitmap => DynBitmap::Own(bitmap(site)?),
        Alloc::BitmapAsPublished => DynBitmap::Own(bitmap_as_published(site)?),
        Alloc::TableBitmap => DynBitmap::Table(table_bitmap(site)?),
        _ => return Err(LabError::Internal("no bitmap")),
    })
}

impl ReplayAlloc for DynBitmap {
    type NoFind = Self;
    type Replayed = Self;

    fn without_find(self) -> Self {
        self
    }

    fn replayed(tape: Rc<AllocTrace>) -> Self {
        Self::Recorded(ReplayedAlloc::new(tape))
    }
}

impl IovaAllocator for DynBitmap {
    type PerCpu = DynBitmapCpu;
    type FreeProof = Unmapped;

    const HAS_LOOKUP: bool = false;

    fn per_cpu(&self) -> DynBitmapCpu {
        match self {
            Self::Recorded(_) => DynBitmapCpu::None(()),
            Self::Own(a) => DynBitmapCpu::Own(a.per_cpu()),
            Self::Table(a) => DynBitmapCpu::Table(a.per_cpu()),
        }
    }

    fn alloc(
        &self,
        cpu: &mut DynBitmapCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        match (self, cpu) {
            (Self::Recorded(a), DynBitmapCpu::None(cpu)) => a.alloc(cpu, request),
            (Self::Own(a), DynBitmapCpu::Own(cpu)) => a.alloc(cpu, request),
            (Self::Table(a), DynBitmapCpu::Table(cpu)) => a.alloc(cpu, request),
            _ => Err(AllocError::OutOfMemory),
        }
    }

    fn find(&self, _: &mut DynBitmapCpu, _: Pfn) -> Option<PfnRange> {
        None
    }

    fn free(&self, cpu: &mut DynBitmapCpu, range: Unmapped) -> bool {
        match (self, cpu) {
            (Self::Recorded(a), DynBitmapCpu::None(cpu)) => a.free(cpu, range),
            (Self::Own(a), DynBitmapCpu::Own(cpu)) => a.free(cpu, range),
            (Self::Table(a), DynBitmapCpu::Table(cpu)) => a.free(cpu, range),
            _ => false,
        }
    }

    fn flushed(&self, cpu: &mut DynBitmapCpu, proof: Flushed<WholeDomain>) {
        match (self, cpu) {
            (Self::Own(a), DynBitmapCpu::Own(cpu)) => a.flushed(cpu, proof),
            (Self::Table(a), DynBitmapCpu::Table(cpu)) => a.flushed(cpu, proof),
            _ => {}
        }
    }

    fn footprint(&self) -> usize {
        match self {
            Self::Recorded(a) => a.footprint(),
            Self::Own(a) => a.footprint(),
            Self::Table(a) => a.footprint(),
        }
    }
}
