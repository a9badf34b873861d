//! The next-fit bitmap of Fujita and Moriai (sections 2.3 and 3.3) as published.

use core::mem;

use ringfence_iova::{AllocError, AllocRequest, Allocation, IovaAllocator, NextFit};
use ringfence_types::{Flushed, Lock, Pfn, PfnRange, Unmapped, WholeDomain};

/// The shared state of a [`BitmapAsPublished`].
#[derive(Debug)]
pub struct PublishedBitmapState {
    pages: NextFit,
    /// Number of pages freed since the last flush.
    freed: u64,
    /// True if the search position returns to the start with the flush.
    wrapping: bool,
}

/// The bitmap as published, with one bit per page (128 KiB for 4 GiB). A free clears the bits at
/// once, so a page that is freed ahead of the search position is reused before the flush.
/// [`Bitmap`](ringfence_iova::Bitmap) is the fixed one.
#[derive(Debug)]
pub struct BitmapAsPublished<L> {
    state: L,
}

impl PublishedBitmapState {
    fn alloc(&mut self, request: &AllocRequest) -> Result<Allocation, AllocError> {
        request.validate()?;
        let end = self.pages.end(request).ok_or_else(|| request.exhausted())?;
        let mut inspected = 0;
        if let Some(found) = self.pages.take_ahead(end, request, &mut inspected) {
            return Ok(found);
        }
        if self.pages.is_lap(end) && self.freed > 0 {
            self.wrapping = true;
            return Err(AllocError::NeedsFlush);
        }
        let found = self.pages.take_from_start(end, request, &mut inspected);
        found.ok_or_else(|| request.exhausted())
    }

    fn free(&mut self, range: PfnRange) -> bool {
        let cleared = self.pages.clear(range);
        if cleared {
            self.freed = self.freed.saturating_add(range.pages());
        }
        cleared
    }

    fn flushed(&mut self) {
        self.freed = 0;
        if mem::take(&mut self.wrapping) {
            self.pages.restart();
        }
    }
}

impl<L: Lock<PublishedBitmapState>> BitmapAsPublished<L> {
    /// Creates an allocator with all pages of `space` free; `lock` wraps its state.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`].
    pub fn new(
        space: PfnRange,
        lock: impl FnOnce(PublishedBitmapState) -> L,
    ) -> Result<Self, AllocError> {
        let state = PublishedBitmapState {
            pages: NextFit::new(space)?,
            freed: 0,
            wrapping: false,
        };
        Ok(Self { state: lock(state) })
    }
}

impl<L: Lock<PublishedBitmapState>> IovaAllocator for BitmapAsPublished<L> {
    type PerCpu = ();
    type FreeProof = Unmapped;

    const HAS_LOOKUP: bool = false;

    fn per_cpu(&self) {}

    fn alloc(&self, (): &mut (), request: &AllocRequest) -> Result<Allocation, AllocError> {
        self.state.with(|state| state.alloc(request))
    }

    /// Returns `None`: a bitmap does not record where ranges begin and end.
    fn find(&self, (): &mut (), _: Pfn) -> Option<PfnRange> {
        None
    }

    fn free(&self, (): &mut (), range: Unmapped) -> bool {
        self.state.with(|state| state.free(range.range()))
    }

    fn flushed(&self, (): &mut (), _proof: Flushed<WholeDomain>) {
        self.state.with(PublishedBitmapState::flushed);
    }

    fn footprint(&self) -> usize {
        self.state.with(|state| state.pages.footprint())
    }
}
