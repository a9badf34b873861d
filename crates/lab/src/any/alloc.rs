//! Allocators that dispatch: one for each of the two things that a range must have gone through to be freed.

use std::rc::Rc;

use ringfence_iova::{AllocError, Allocation, IovaAllocator, Request};
use ringfence_types::{Flushed, Pfn, PfnRange, Unmapped, WholeDomain};

use crate::build::{
    Freelists, Gas, Next, Product, Rcache, Site, TableBits, Tree, bitmap, bitmap_literal,
    freelists, gas, product, rcache, table_bitmap, tree,
};
use crate::error::LabError;
use crate::meter::{Recorded, ReplayAlloc, Tape};
use crate::modes::Alloc;

/// Any allocator that takes flushed ranges back.
pub(super) struct AnyAlloc {
    which: Which,
    /// Whether it is asked to find.
    finds: bool,
}

/// Which it is; the recorded one too, so that the meter's replicas of it are one type.
// There is one a domain, and it stays where it is.
#[allow(clippy::large_enum_variant)]
enum Which {
    Recorded(Recorded<Flushed>),
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
    let which = match site.answer {
        Alloc::CachedRbTree => Which::Tree(tree(site)?),
        Alloc::Eiovar(_) => Which::Freelists(freelists(site)?),
        Alloc::Bitmap => Which::Bitmap(bitmap(site)?),
        Alloc::TableBitmap => Which::TableBitmap(table_bitmap(site)?),
        Alloc::FreeBsd => Which::Gas(gas(site)?),
        Alloc::LinuxRcache => Which::Rcache(rcache(site)?),
        Alloc::Magazine => Which::Magazines(product(site)?),
        Alloc::Identity
        | Alloc::BitmapLiteral
        | Alloc::RingTail
        | Alloc::RingFree
        | Alloc::RingTailLiteral => {
            return Err(LabError::Internal("allocator without a composed form"));
        }
    };
    Ok(AnyAlloc { which, finds: true })
}

impl ReplayAlloc for AnyAlloc {
    type NoFind = Self;
    type Recorded = Self;

    fn without_find(self) -> Self {
        Self {
            finds: false,
            ..self
        }
    }

    fn recorded(tape: Rc<Tape>) -> Self {
        Self {
            which: Which::Recorded(Recorded::new(tape)),
            finds: false,
        }
    }
}

impl IovaAllocator for AnyAlloc {
    type PerCpu = AnyAllocCpu;
    type Returned = Flushed;

    fn finds(&self) -> bool {
        let index = matches!(
            self.which,
            Which::Tree(_) | Which::Freelists(_) | Which::Gas(_)
        );
        self.finds && index
    }

    fn per_cpu(&self) -> AnyAllocCpu {
        match &self.which {
            Which::Bitmap(a) => AnyAllocCpu::Bitmap(a.per_cpu()),
            Which::TableBitmap(a) => AnyAllocCpu::TableBitmap(a.per_cpu()),
            Which::Rcache(a) => AnyAllocCpu::Rcache(Box::new(a.per_cpu())),
            Which::Magazines(a) => AnyAllocCpu::Magazines(Box::new(a.per_cpu())),
            Which::Recorded(_) | Which::Tree(_) | Which::Freelists(_) | Which::Gas(_) => {
                AnyAllocCpu::None(())
            }
        }
    }

    fn alloc(&self, cpu: &mut AnyAllocCpu, request: &Request) -> Result<Allocation, AllocError> {
        match (&self.which, cpu) {
            (Which::Recorded(a), AnyAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (Which::Tree(a), AnyAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (Which::Freelists(a), AnyAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (Which::Gas(a), AnyAllocCpu::None(cpu)) => a.alloc(cpu, request),
            (Which::Bitmap(a), AnyAllocCpu::Bitmap(cpu)) => a.alloc(cpu, request),
            (Which::TableBitmap(a), AnyAllocCpu::TableBitmap(cpu)) => a.alloc(cpu, request),
            (Which::Rcache(a), AnyAllocCpu::Rcache(cpu)) => a.alloc(cpu, request),
            (Which::Magazines(a), AnyAllocCpu::Magazines(cpu)) => a.alloc(cpu, request),
            _ => Err(AllocError::OutOfMemory),
        }
    }

    fn find(&self, cpu: &mut AnyAllocCpu, page: Pfn) -> Option<PfnRange> {
        if !self.finds {
            return None;
        }
        match (&self.which, cpu) {
            (Which::Tree(a), AnyAllocCpu::None(cpu)) => a.find(cpu, page),
            (Which::Freelists(a), AnyAllocCpu::None(cpu)) => a.find(cpu, page),
            (Which::Gas(a), AnyAllocCpu::None(cpu)) => a.find(cpu, page),
            _ => None,
        }
    }

    fn free(&self, cpu: &mut AnyAllocCpu, range: Flushed) -> bool {
        match (&self.which, cpu) {
            (Which::Recorded(a), AnyAllocCpu::None(cpu)) => a.free(cpu, range),
            (Which::Tree(a), AnyAllocCpu::None(cpu)) => a.free(cpu, range),
            (Which::Freelists(a), AnyAllocCpu::None(cpu)) => a.free(cpu, range),
            (Which::Gas(a), AnyAllocCpu::None(cpu)) => a.free(cpu, range),
            (Which::Bitmap(a), AnyAllocCpu::Bitmap(cpu)) => a.free(cpu, range.into()),
            (Which::TableBitmap(a), AnyAllocCpu::TableBitmap(cpu)) => a.free(cpu, range.into()),
            (Which::Rcache(a), AnyAllocCpu::Rcache(cpu)) => a.free(cpu, range),
            (Which::Magazines(a), AnyAllocCpu::Magazines(cpu)) => a.free(cpu, range),
            _ => false,
        }
    }

    fn flushed(&self, cpu: &mut AnyAllocCpu, proof: Flushed<WholeDomain>) {
        match (&self.which, cpu) {
            (Which::Bitmap(a), AnyAllocCpu::Bitmap(cpu)) => a.flushed(cpu, proof),
            (Which::TableBitmap(a), AnyAllocCpu::TableBitmap(cpu)) => a.flushed(cpu, proof),
            _ => {}
        }
    }

    fn drain(&self, cpu: &mut AnyAllocCpu) {
        match (&self.which, cpu) {
            (Which::Rcache(a), AnyAllocCpu::Rcache(cpu)) => a.drain(cpu),
            (Which::Magazines(a), AnyAllocCpu::Magazines(cpu)) => a.drain(cpu),
            _ => {}
        }
    }

    fn footprint(&self) -> usize {
        match &self.which {
            Which::Recorded(a) => a.footprint(),
            Which::Tree(a) => a.footprint(),
            Which::Freelists(a) => a.footprint(),
            Which::Bitmap(a) => a.footprint(),
            Which::TableBitmap(a) => a.footprint(),
            Which::Gas(a) => a.footprint(),
            Which::Rcache(a) => a.footprint(),
            Which::Magazines(a) => a.footprint(),
        }
    }
}

/// Either allocator that takes cleared ranges back and asks for a flush when it wraps.
pub(super) enum AnyBitmap {
    Recorded(Recorded<Unmapped>),
    Own(Next),
    Table(TableBits),
}

/// One processor's part of either.
pub(super) enum AnyBitmapCpu {
    None(()),
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

impl ReplayAlloc for AnyBitmap {
    type NoFind = Self;
    type Recorded = Self;

    fn without_find(self) -> Self {
        self
    }

    fn recorded(tape: Rc<Tape>) -> Self {
        Self::Recorded(Recorded::new(tape))
    }
}

impl IovaAllocator for AnyBitmap {
    type PerCpu = AnyBitmapCpu;
    type Returned = Unmapped;

    const FINDS: bool = false;

    fn per_cpu(&self) -> AnyBitmapCpu {
        match self {
            Self::Recorded(_) => AnyBitmapCpu::None(()),
            Self::Own(a) => AnyBitmapCpu::Own(a.per_cpu()),
            Self::Table(a) => AnyBitmapCpu::Table(a.per_cpu()),
        }
    }

    fn alloc(&self, cpu: &mut AnyBitmapCpu, request: &Request) -> Result<Allocation, AllocError> {
        match (self, cpu) {
            (Self::Recorded(a), AnyBitmapCpu::None(cpu)) => a.alloc(cpu, request),
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
            (Self::Recorded(a), AnyBitmapCpu::None(cpu)) => a.free(cpu, range),
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
            Self::Recorded(a) => a.footprint(),
            Self::Own(a) => a.footprint(),
            Self::Table(a) => a.footprint(),
        }
    }
}
