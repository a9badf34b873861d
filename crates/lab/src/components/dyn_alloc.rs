//! Any allocator as one type, for oracle replays and user-composed modes.

use std::rc::Rc;

use ringfence_iova::{AllocError, AllocRequest, Allocation, FreeProof, IovaAllocator};
use ringfence_types::{Flushed, Pfn, PfnRange, Unmapped, WholeDomain};

use super::AllocEnv;
use super::allocators::{
    bitmap, bitmap_as_published, contiguous, eiovar, freebsd, freebsd_14, magazine, maple, rb_tree,
    rcache, table_bitmap,
};
use crate::alloc_trace::AllocTrace;
use crate::error::LabError;
use crate::layer::DynDispatch;
use crate::modes::Alloc;
use crate::stubs::{ReplayAlloc, ReplayedAlloc};

/// An allocator of any type that frees ranges with the proof `R`.
pub(crate) struct DynAlloc<R> {
    inner: Rc<dyn SharedAlloc<R>>,
    /// True if lookups are enabled.
    finds: bool,
}

/// An allocator without its type.
trait SharedAlloc<R> {
    fn cpu(self: Rc<Self>) -> Box<dyn CpuAlloc<R>>;
    fn has_lookup(&self) -> bool;
    fn footprint(&self) -> usize;
}

/// An allocator with the handle of one CPU.
pub(crate) trait CpuAlloc<R> {
    fn alloc(&mut self, request: &AllocRequest) -> Result<Allocation, AllocError>;
    fn find(&mut self, page: Pfn) -> Option<PfnRange>;
    fn free(&mut self, range: R) -> bool;
    fn flushed(&mut self, proof: Flushed<WholeDomain>);
    fn drain(&mut self);
}

impl<R: Into<A::FreeProof>, A: IovaAllocator + 'static> SharedAlloc<R> for A {
    fn cpu(self: Rc<Self>) -> Box<dyn CpuAlloc<R>> {
        let own = self.per_cpu();
        Box::new((self, own))
    }

    fn has_lookup(&self) -> bool {
        IovaAllocator::has_lookup(self)
    }

    fn footprint(&self) -> usize {
        IovaAllocator::footprint(self)
    }
}

impl<R: Into<A::FreeProof>, A: IovaAllocator> CpuAlloc<R> for (Rc<A>, A::PerCpu) {
    fn alloc(&mut self, request: &AllocRequest) -> Result<Allocation, AllocError> {
        self.0.alloc(&mut self.1, request)
    }

    fn find(&mut self, page: Pfn) -> Option<PfnRange> {
        self.0.find(&mut self.1, page)
    }

    fn free(&mut self, range: R) -> bool {
        self.0.free(&mut self.1, range.into())
    }

    fn flushed(&mut self, proof: Flushed<WholeDomain>) {
        self.0.flushed(&mut self.1, proof);
    }

    fn drain(&mut self) {
        self.0.drain(&mut self.1);
    }
}

impl<R: FreeProof + 'static> IovaAllocator for DynAlloc<R> {
    type PerCpu = Box<dyn CpuAlloc<R>>;
    type FreeProof = R;

    fn has_lookup(&self) -> bool {
        self.finds && self.inner.has_lookup()
    }

    fn per_cpu(&self) -> Self::PerCpu {
        Rc::clone(&self.inner).cpu()
    }

    fn alloc(
        &self,
        cpu: &mut Self::PerCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        cpu.alloc(request)
    }

    fn find(&self, cpu: &mut Self::PerCpu, page: Pfn) -> Option<PfnRange> {
        if self.finds { cpu.find(page) } else { None }
    }

    fn free(&self, cpu: &mut Self::PerCpu, range: R) -> bool {
        cpu.free(range)
    }

    fn flushed(&self, cpu: &mut Self::PerCpu, proof: Flushed<WholeDomain>) {
        cpu.flushed(proof);
    }

    fn drain(&self, cpu: &mut Self::PerCpu) {
        cpu.drain();
    }

    fn footprint(&self) -> usize {
        self.inner.footprint()
    }
}

impl<R: FreeProof + 'static> ReplayAlloc for DynAlloc<R> {
    type Dispatch = DynDispatch;
    type NoFind = Self;
    type Replayed = Self;

    fn without_find(self) -> Self {
        Self {
            finds: false,
            ..self
        }
    }

    fn replayed(trace: Rc<AllocTrace>) -> Self {
        Self {
            inner: Rc::new(ReplayedAlloc::<R>::new(trace)),
            finds: false,
        }
    }
}

/// Creates an allocator of any type that frees flushed ranges.
///
/// # Errors
/// Memory is short, or the mode has no allocator.
pub(crate) fn dyn_alloc(env: &AllocEnv<'_>) -> Result<DynAlloc<Flushed>, LabError> {
    let inner: Rc<dyn SharedAlloc<Flushed>> = match env.kind {
        Alloc::CachedRbTree => Rc::new(rb_tree(env)?),
        Alloc::Eiovar(_) => Rc::new(eiovar(env)?),
        Alloc::Bitmap => Rc::new(bitmap(env)?),
        Alloc::TableBitmap => Rc::new(table_bitmap(env)?),
        Alloc::FreeBsd => Rc::new(freebsd(env)?),
        Alloc::FreeBsd14 => Rc::new(freebsd_14(env)?),
        Alloc::LinuxRcache => Rc::new(rcache(env)?),
        Alloc::LinuxMaple => Rc::new(maple(env)?),
        Alloc::Magazine => Rc::new(magazine(env)?),
        Alloc::Contiguous => Rc::new(contiguous(env)?),
        _ => return Err(LabError::Internal("allocator without a composed form")),
    };
    Ok(DynAlloc { inner, finds: true })
}

/// Creates a bitmap of any type. It frees cleared ranges and requests a flush when it wraps.
///
/// # Errors
/// Memory is short, or the mode has no bitmap.
pub(crate) fn dyn_bitmap(env: &AllocEnv<'_>) -> Result<DynAlloc<Unmapped>, LabError> {
    let inner: Rc<dyn SharedAlloc<Unmapped>> = match env.kind {
        Alloc::Bitmap => Rc::new(bitmap(env)?),
        Alloc::BitmapAsPublished => Rc::new(bitmap_as_published(env)?),
        Alloc::TableBitmap => Rc::new(table_bitmap(env)?),
        _ => return Err(LabError::Internal("no bitmap")),
    };
    Ok(DynAlloc { inner, finds: true })
}
