//! Allocators that dispatch: one for each of the two things that a range must have gone through to be freed.

use ringfence_iova::{AllocError, Allocation, IovaAllocator, Request};
use ringfence_types::{Flushed, Pfn, PfnRange, Unmapped, WholeDomain};

use crate::build::{
    Freelists, Gas, Next, Product, Rcache, Site, TableBits, Tree, bitmap, bitmap_literal,
    freelists, gas, product, rcache, table_bitmap, tree,
};
use crate::error::LabError;
use crate::modes::Alloc;

/// Any allocator that takes flushed ranges back.
// There is one a domain, and it stays where it is.
#[allow(clippy::large_enum_variant)]
pub(super) enum AnyAlloc {
    Tree(Tree),
    Freelists(Freelists),
    Bitmap(Next),
    TableBitmap(TableBits),
    Gas(Gas),
    Rcache(Rcache),
    Magazines(Product),
}

/// One processor's part of any allocator.
pub(super) enum AnyAllocCpu {
    None(()),
    Bitmap(<Next as IovaAllocator>::PerCpu),
    TableBitmap(<TableBits as IovaAllocator>::PerCpu),
    Rcache(Box<<Rcache as IovaAllocator>::PerCpu>),
    Magazines(Box<<Product as IovaAllocator>::PerCpu>),
}

pub(super) fn alloc(site: &Site<'_>) -> Result<AnyAlloc, LabError> {
    Ok(match site.answer {
        Alloc::CachedRbTree => AnyAlloc::Tree(tree(site)?),
        Alloc::Eiovar(_) => AnyAlloc::Freelists(freelists(site)?),
        Alloc::Bitmap => AnyAlloc::Bitmap(bitmap(site)?),
        Alloc::TableBitmap => AnyAlloc::TableBitmap(table_bitmap(site)?),
        Alloc::FreeBsd => AnyAlloc::Gas(gas(site)?),
        Alloc::LinuxRcache => AnyAlloc::Rcache(rcache(site)?),
        Alloc::Magazine => AnyAlloc::Magazines(product(site)?),
        Alloc::Identity
        | Alloc::BitmapLiteral
        | Alloc::RingTail
        | Alloc::RingFree
        | Alloc::RingTailLiteral => {
            return Err(LabError::Internal("allocator without a composed form"));
        }
    })
}

impl IovaAllocator for AnyAlloc {
    type PerCpu = AnyAllocCpu;
    type Returned = Flushed;

    fn per_cpu(&self) -> AnyAllocCpu {
        match self {
            Self::Bitmap(a) => AnyAllocCpu::Bitmap(a.per_cpu()),
            Self::TableBitmap(a) => AnyAllocCpu::TableBitmap(a.per_cpu()),
            Self::Rcache(a) => AnyAllocCpu::Rcache(Box::new(a.per_cpu())),
            Self::Magazines(a) => AnyAllocCpu::Magazines(Box::new(a.per_cpu())),
            Self::Tree(_) | Self::Freelists(_) | Self::Gas(_) => AnyAllocCpu::None(()),
        }
    }

    fn alloc(&self, cpu: &mut AnyAllocCpu, request: &Request) -> Result<Allocation, AllocError> {
        match (self, cpu) {
            (Self::Tree(a), AnyAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (Self::Freelists(a), AnyAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (Self::Gas(a), AnyAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (Self::Bitmap(a), AnyAllocCpu::Bitmap(cpu)) => a.alloc(cpu, request),
            (Self::TableBitmap(a), AnyAllocCpu::TableBitmap(cpu)) => a.alloc(cpu, request),
            (Self::Rcache(a), AnyAllocCpu::Rcache(cpu)) => a.alloc(cpu, request),
            (Self::Magazines(a), AnyAllocCpu::Magazines(cpu)) => a.alloc(cpu, request),
            _ => Err(AllocError::OutOfMemory),
        }
    }

    fn find(&self, cpu: &mut AnyAllocCpu, page: Pfn) -> Option<PfnRange> {
        match (self, cpu) {
            (Self::Tree(a), AnyAllocCpu::None(cpu)) => a.find(cpu, page),
            (Self::Freelists(a), AnyAllocCpu::None(cpu)) => a.find(cpu, page),
            (Self::Gas(a), AnyAllocCpu::None(cpu)) => a.find(cpu, page),
            _ => None,
        }
    }

    fn free(&self, cpu: &mut AnyAllocCpu, range: Flushed) -> bool {
        match (self, cpu) {
            (Self::Tree(a), AnyAllocCpu::None(cpu)) => a.free(cpu, range),
            (Self::Freelists(a), AnyAllocCpu::None(cpu)) => a.free(cpu, range),
            (Self::Gas(a), AnyAllocCpu::None(cpu)) => a.free(cpu, range),
            (Self::Bitmap(a), AnyAllocCpu::Bitmap(cpu)) => a.free(cpu, range.into()),
            (Self::TableBitmap(a), AnyAllocCpu::TableBitmap(cpu)) => a.free(cpu, range.into()),
            (Self::Rcache(a), AnyAllocCpu::Rcache(cpu)) => a.free(cpu, range),
            (Self::Magazines(a), AnyAllocCpu::Magazines(cpu)) => a.free(cpu, range),
            _ => false,
        }
    }

    fn flushed(&self, cpu: &mut AnyAllocCpu, proof: Flushed<WholeDomain>) {
        match (self, cpu) {
            (Self::Bitmap(a), AnyAllocCpu::Bitmap(cpu)) => a.flushed(cpu, proof),
            (Self::TableBitmap(a), AnyAllocCpu::TableBitmap(cpu)) => a.flushed(cpu, proof),
            _ => {}
        }
    }

    fn drain(&self, cpu: &mut AnyAllocCpu) {
        match (self, cpu) {
            (Self::Rcache(a), AnyAllocCpu::Rcache(cpu)) => a.drain(cpu),
            (Self::Magazines(a), AnyAllocCpu::Magazines(cpu)) => a.drain(cpu),
            _ => {}
        }
    }

    fn footprint(&self) -> usize {
        match self {
            Self::Tree(a) => a.footprint(),
            Self::Freelists(a) => a.footprint(),
            Self::Bitmap(a) => a.footprint(),
            Self::TableBitmap(a) => a.footprint(),
            Self::Gas(a) => a.footprint(),
            Self::Rcache(a) => a.footprint(),
            Self::Magazines(a) => a.footprint(),
        }
    }
}

/// Either allocator that takes cleared ranges back and asks for a flush when it wraps.
pub(super) enum AnyBitmap {
    Own(Next),
    Table(TableBits),
}

/// One processor's part of either.
pub(super) enum AnyBitmapCpu {
    Own(<Next as IovaAllocator>::PerCpu),
    Table(<TableBits as IovaAllocator>::PerCpu),
}

pub(super) fn bitmap_of(site: &Site<'_>) -> Result<AnyBitmap, LabError> {
    Ok(match site.answer {
        Alloc::Bitmap => AnyBitmap::Own(bitmap(site)?),
        Alloc::BitmapLiteral => AnyBitmap::Own(bitmap_literal(site)?),
        Alloc::TableBitmap => AnyBitmap::Table(table_bitmap(site)?),
        _ => return Err(LabError::Internal("no bitmap")),
    })
}

impl IovaAllocator for AnyBitmap {
    type PerCpu = AnyBitmapCpu;
    type Returned = Unmapped;

    const FINDS: bool = false;

    fn per_cpu(&self) -> AnyBitmapCpu {
        match self {
            Self::Own(a) => AnyBitmapCpu::Own(a.per_cpu()),
            Self::Table(a) => AnyBitmapCpu::Table(a.per_cpu()),
        }
    }

    fn alloc(&self, cpu: &mut AnyBitmapCpu, request: &Request) -> Result<Allocation, AllocError> {
        match (self, cpu) {
            (Self::Own(a), AnyBitmapCpu::Own(cpu)) => a.alloc(cpu, request),
            (Self::Table(a), AnyBitmapCpu::Table(cpu)) => a.alloc(cpu, request),
            _ => Err(AllocError::OutOfMemory),
        }
    }

    fn find(&self, _: &mut AnyBitmapCpu, _: Pfn) -> Option<PfnRange> {
        None
    }

    fn free(&self, cpu: &mut AnyBitmapCpu, range: Unmapped) -> bool {
        match (self, cpu) {
            (Self::Own(a), AnyBitmapCpu::Own(cpu)) => a.free(cpu, range),
            (Self::Table(a), AnyBitmapCpu::Table(cpu)) => a.free(cpu, range),
            _ => false,
        }
    }

    fn flushed(&self, cpu: &mut AnyBitmapCpu, proof: Flushed<WholeDomain>) {
        match (self, cpu) {
            (Self::Own(a), AnyBitmapCpu::Own(cpu)) => a.flushed(cpu, proof),
            (Self::Table(a), AnyBitmapCpu::Table(cpu)) => a.flushed(cpu, proof),
            _ => {}
        }
    }

    fn footprint(&self) -> usize {
        match self {
            Self::Own(a) => a.footprint(),
            Self::Table(a) => a.footprint(),
        }
    }
}
