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
    shared: Rc<dyn SharedAlloc<R>>,
    lookup_enabled: bool,
}

/// The methods of [`IovaAllocator`] that need no handle of a CPU, as a trait object can have them.
trait SharedAlloc<R> {
    fn cpu(self: Rc<Self>) -> Box<dyn CpuAlloc<R>>;
    fn has_lookup(&self) -> bool;
    fn footprint(&self) -> usize;
}

/// The methods of [`IovaAllocator`] that need the handle of a CPU, with that handle.
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
        self.lookup_enabled && self.shared.has_lookup()
    }

    fn per_cpu(&self) -> Self::PerCpu {
        Rc::clone(&self.shared).cpu()
    }

    fn alloc(
        &self,
        cpu: &mut Self::PerCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        cpu.alloc(request)
    }

    fn find(&self, cpu: &mut Self::PerCpu, page: Pfn) -> Option<PfnRange> {
        if self.lookup_enabled {
            cpu.find(page)
        } else {
            None
        }
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
        self.shared.footprint()
    }
}

impl<R: FreeProof + 'static> ReplayAlloc for DynAlloc<R> {
    type Dispatch = DynDispatch;
    type NoFind = Self;
    type Replayed = Self;

    fn without_find(self) -> Self {
        Self {
            lookup_enabled: false,
            ..self
        }
    }

    fn replayed(trace: Rc<AllocTrace>) -> Self {
        Self {
            shared: Rc::new(ReplayedAlloc::<R>::new(trace)),
            lookup_enabled: false,
        }
    }
}

/// Creates an allocator of any type that frees flushed ranges.
///
/// # Errors
/// Memory is short, or the mode has no allocator that frees flushed ranges: it has none, one of
/// another type only (`shadow`, rings), or one that frees cleared ranges (`bitmap-paper`).
pub(crate) fn dyn_alloc(env: &AllocEnv<'_>) -> Result<DynAlloc<Flushed>, LabError> {
    let shared: Rc<dyn SharedAlloc<Flushed>> = match env.kind {
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
    Ok(DynAlloc {
        shared,
        lookup_enabled: true,
    })
}

/// Creates a bitmap of any type. It frees cleared ranges and requests a flush when it wraps.
///
/// # Errors
/// Memory is short, or the mode has no bitmap.
pub(crate) fn dyn_bitmap(env: &AllocEnv<'_>) -> Result<DynAlloc<Unmapped>, LabError> {
    let shared: Rc<dyn SharedAlloc<Unmapped>> = match env.kind {
        Alloc::Bitmap => Rc::new(bitmap(env)?),
        Alloc::BitmapAsPublished => Rc::new(bitmap_as_published(env)?),
        Alloc::TableBitmap => Rc::new(table_bitmap(env)?),
        _ => return Err(LabError::Internal("no bitmap")),
    };
    Ok(DynAlloc {
        shared,
        lookup_enabled: true,
    })
}
