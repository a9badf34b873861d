//! A bitmap with one bit per page, searched upwards from the last allocation, with one flush
//! of the domain per wrap.
//!
//! Source: Fujita and Moriai, sections 2.3 and 3.3. Freed pages are [`Unmapped`], not flushed. The
//! policy reuses no address before the search position has passed the whole space, and flushes the
//! domain when the position wraps.
//!
//! The paper does not specify the treatment of a page that is freed *ahead* of the position. A
//! plain bitmap allocator clears its bit and reuses the page in the same lap, before the flush.
//! [`Bitmap`] therefore withholds freed pages until a flush. See
//! docs/decisions/0003-bitmap-reuse.md.

use core::mem;

use ringfence_types::{Flushed, Lock, Pfn, PfnRange, Unmapped, WholeDomain};

use crate::next_fit::Bits;
use crate::{AllocError, AllocRequest, Allocation, IovaAllocator, NextFit};

/// The shared state of a [`Bitmap`]; the embedder wraps it in a lock.
#[derive(Debug)]
pub struct BitmapState {
    /// The used pages: live pages, and the pages of `freed` and `flushing`.
    pages: NextFit,
    /// Pages freed since the last flush request.
    freed: Bits,
    /// Pages freed before that request, while its flush has not completed.
    flushing: Bits,
    /// Number of flush requests that had pages to release.
    flush_requests: u64,
    /// True if the search position returns to the start with the flush.
    wrapping: bool,
}

/// A bitmap allocator. It accepts ranges that are only unmapped, and requests a flush of the domain
/// when it wraps.
#[derive(Debug)]
pub struct Bitmap<L> {
    state: L,
}

/// The handle of one CPU. It records the last flush request that this CPU received.
///
/// A flush releases only pages that were freed before this handle received
/// [`AllocError::NeedsFlush`], because the CPU submits the invalidation after that. It proves
/// nothing for a later request of another CPU.
#[derive(Debug, Default)]
pub struct BitmapCpu {
    flush_requests: u64,
}

impl BitmapState {
    fn new(space: PfnRange) -> Result<Self, AllocError> {
        let pages = NextFit::new(space)?;
        Ok(Self {
            freed: Bits::new(pages.pages())?,
            flushing: Bits::new(pages.pages())?,
            pages,
            flush_requests: 0,
            wrapping: false,
        })
    }

    /// Returns the number of pages that a flush would release.
    fn withheld(&self) -> u64 {
        self.freed.len().saturating_add(self.flushing.len())
    }

    fn needs_flush(&mut self, cpu: &mut BitmapCpu) -> AllocError {
        // One flush at a time: the completion of a pending request must not release pages that were
        // freed after it.
        if self.flushing.len() == 0 {
            mem::swap(&mut self.freed, &mut self.flushing);
            self.flush_requests = self.flush_requests.saturating_add(1);
        }
        cpu.flush_requests = self.flush_requests;
        AllocError::NeedsFlush
    }

    fn alloc(
        &mut self,
        cpu: &mut BitmapCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        request.validate()?;
        let end = self.pages.end(request).ok_or_else(|| request.exhausted())?;
        let mut inspected = 0;
        if let Some(found) = self.pages.take_ahead(end, request, &mut inspected) {
            return Ok(found);
        }
        if self.pages.is_lap(end) && self.withheld() > 0 {
            self.wrapping = true;
            return Err(self.needs_flush(cpu));
        }
        // Either nothing needs a flush, or the device reaches only a part of the space.
        if let Some(found) = self.pages.take_from_start(end, request, &mut inspected) {
            return Ok(found);
        }
        if self.withheld() > 0 {
            return Err(self.needs_flush(cpu));
        }
        Err(request.exhausted())
    }

    fn free(&mut self, range: PfnRange) -> bool {
        let Some((lo, pages)) = self.pages.used_pages(range) else {
            return false;
        };
        if self.flushing.has_any(lo, pages) || self.freed.has_any(lo, pages) {
            return false;
        }
        self.freed.insert(lo, pages);
        true
    }

    fn flushed(&mut self, cpu: &BitmapCpu) {
        if cpu.flush_requests == 0 || cpu.flush_requests != self.flush_requests {
            return;
        }
        self.pages.clear_all(&mut self.flushing);
        if mem::take(&mut self.wrapping) {
            self.pages.restart();
        }
    }
}

impl<L: Lock<BitmapState>> Bitmap<L> {
    /// Creates an allocator with all pages of `space` free; `lock` wraps its state. It never reuses
    /// a freed page before a flush. Memory: three bits per page, 384 KiB for 4 GiB.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`].
    pub fn new(space: PfnRange, lock: impl FnOnce(BitmapState) -> L) -> Result<Self, AllocError> {
        let state = BitmapState::new(space)?;
        Ok(Self { state: lock(state) })
    }
}

impl<L: Lock<BitmapState>> IovaAllocator for Bitmap<L> {
    type PerCpu = BitmapCpu;
    type FreeProof = Unmapped;

    const HAS_LOOKUP: bool = false;

    fn per_cpu(&self) -> BitmapCpu {
        BitmapCpu::default()
    }

    #[inline]
    fn alloc(&self, cpu: &mut BitmapCpu, request: &AllocRequest) -> Result<Allocation, AllocError> {
        self.state.with(|state| state.alloc(cpu, request))
    }

    /// Returns `None`: a bitmap does not record where ranges begin and end.
    #[inline]
    fn find(&self, _: &mut BitmapCpu, _: Pfn) -> Option<PfnRange> {
        None
    }

    #[inline]
    fn free(&self, _: &mut BitmapCpu, range: Unmapped) -> bool {
        self.state.with(|state| state.free(range.range()))
    }

    fn flushed(&self, cpu: &mut BitmapCpu, _proof: Flushed<WholeDomain>) {
        self.state.with(|state| state.flushed(cpu));
    }

    fn footprint(&self) -> usize {
        self.state.with(|state| {
            let freed = state.freed.footprint() + state.flushing.footprint();
            state.pages.footprint() + freed
        })
    }
}
