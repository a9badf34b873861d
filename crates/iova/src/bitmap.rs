//! A bitmap with one bit per page, searched upwards from the last allocation, with one flush
//! of the domain per wrap.
//!
//! Source: Fujita and Moriai, sections 2.3 and 3.3. Freed pages are [`Unmapped`], not flushed. The
//! policy reuses no address before the search position has passed the whole space, and flushes the
//! domain when the position wraps.
//!
//! The paper does not specify the treatment of a page that is freed *ahead* of the position. A
//! plain bitmap allocator clears its bit and reuses the page in the same lap, before the flush.
//! [`Bitmap::new`] therefore withholds freed pages until a flush; [`Bitmap::as_published`] has the
//! defect. See docs/decisions/0003-bitmap-reuse.md.

use alloc::vec::Vec;
use core::mem;

use ringfence_types::{Flushed, Lock, Pfn, PfnRange, Unmapped, WholeDomain};

use crate::{AllocError, AllocRequest, Allocation, IovaAllocator};

const WORD: u64 = 64;

/// A set of pages, as offsets from the first page of the space.
#[derive(Debug, Default)]
struct Bits {
    words: Vec<u64>,
    set: u64,
}

impl Bits {
    fn new(bits: u64) -> Result<Self, AllocError> {
        let words = usize::try_from(bits.div_ceil(WORD)).map_err(|_| AllocError::OutOfMemory)?;
        let mut this = Self::default();
        this.words
            .try_reserve_exact(words)
            .map_err(|_| AllocError::OutOfMemory)?;
        this.words.resize(words, 0);
        Ok(this)
    }

    #[inline]
    fn word(&self, index: u64) -> u64 {
        self.words.get(index as usize).copied().unwrap_or(0)
    }

    /// Calls `change` for each word that `[lo, lo + pages)` touches, with the mask of its bits.
    #[inline]
    fn each_word(lo: u64, pages: u64, mut change: impl FnMut(u64, u64)) {
        let end = lo.saturating_add(pages);
        let mut at = lo;
        while at < end {
            let (word, first) = (at / WORD, at % WORD);
            let bits = (WORD - first).min(end - at);
            let mask = (u64::MAX >> (WORD - bits)) << first;
            change(word, mask);
            at += bits;
        }
    }

    fn insert(&mut self, lo: u64, pages: u64) {
        Self::each_word(lo, pages, |index, mask| {
            if let Some(word) = self.words.get_mut(index as usize) {
                *word |= mask;
            }
        });
        self.set = self.set.saturating_add(pages);
    }

    fn remove(&mut self, lo: u64, pages: u64) {
        Self::each_word(lo, pages, |index, mask| {
            if let Some(word) = self.words.get_mut(index as usize) {
                *word &= !mask;
            }
        });
        self.set = self.set.saturating_sub(pages);
    }

    /// Returns true if all pages are in the set.
    fn has_all(&self, lo: u64, pages: u64) -> bool {
        let mut all = true;
        Self::each_word(lo, pages, |index, mask| {
            all &= self.word(index) & mask == mask
        });
        all
    }

    /// Returns true if any page is in the set.
    fn has_any(&self, lo: u64, pages: u64) -> bool {
        let mut any = false;
        Self::each_word(lo, pages, |index, mask| any |= self.word(index) & mask != 0);
        any
    }

    /// Returns the first page in `[from, end)` that is in the set (`flip` = 0) or not in it (`flip`
    /// = all ones).
    #[inline]
    fn first(&self, from: u64, end: u64, flip: u64, inspected: &mut u32) -> Option<u64> {
        let mut at = from;
        while at < end {
            *inspected = inspected.saturating_add(1);
            let word = (self.word(at / WORD) ^ flip) & (u64::MAX << (at % WORD));
            let base = at - at % WORD;
            if word != 0 {
                let bit = base + u64::from(word.trailing_zeros());
                return (bit < end).then_some(bit);
            }
            at = base + WORD;
        }
        None
    }

    /// Removes this set's pages from `other` and empties this set.
    fn subtract_from(&mut self, other: &mut Self) {
        for (word, other) in self.words.iter_mut().zip(&mut other.words) {
            *other &= !mem::take(word);
        }
        other.set = other.set.saturating_sub(self.set);
        self.set = 0;
    }
}

/// The shared state of a [`Bitmap`]; the embedder wraps it in a lock.
#[derive(Debug)]
pub struct BitmapState {
    space: PfnRange,
    /// Pages that may not be allocated: live pages, and the pages of `freed` and `flushing`.
    used: Bits,
    /// Pages freed since the last flush request. `None` in the variant as published, which clears
    /// freed pages at once.
    freed: Option<Bits>,
    /// Pages freed before that request, while its flush has not completed.
    flushing: Bits,
    /// Number of pages freed since the last flush, in the variant as published.
    freed_as_published: u64,
    /// Number of flush requests that had pages to release.
    flush_requests: u64,
    /// True if the search position returns to the start with the flush.
    wrapping: bool,
    /// Start of the next search.
    next: u64,
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
    fn new(space: PfnRange, as_published: bool) -> Result<Self, AllocError> {
        let pages = space.pages();
        Ok(Self {
            space,
            used: Bits::new(pages)?,
            freed: if as_published {
                None
            } else {
                Some(Bits::new(pages)?)
            },
            flushing: Bits::new(if as_published { 0 } else { pages })?,
            freed_as_published: 0,
            flush_requests: 0,
            wrapping: false,
            next: 0,
        })
    }

    /// Finds the first fit in `[from, end)`. Both are offsets from the start of the space.
    fn first_fit(
        &self,
        from: u64,
        end: u64,
        request: &AllocRequest,
        inspected: &mut u32,
    ) -> Option<u64> {
        let base = self.space.lo().get();
        let mut at = from;
        loop {
            let free = self.used.first(at, end, u64::MAX, inspected)?;
            let lo = request.lowest_in(base.saturating_add(free), base.saturating_add(end))?;
            let lo = lo.saturating_sub(base);
            // The run begins in the word that was inspected last.
            let mut run = 0;
            let allocated = self
                .used
                .first(lo, lo.saturating_add(request.pages), 0, &mut run);
            *inspected = inspected.saturating_add(run.saturating_sub(1));
            match allocated {
                None => return Some(lo),
                Some(allocated) => at = allocated.saturating_add(1),
            }
        }
    }

    fn take(
        &mut self,
        lo: u64,
        request: &AllocRequest,
        inspected: u32,
    ) -> Result<Allocation, AllocError> {
        let first = self.space.lo().get().saturating_add(lo);
        let range =
            PfnRange::new(Pfn::new(first), request.pages).ok_or_else(|| request.exhausted())?;
        self.used.insert(lo, request.pages);
        Ok(Allocation {
            range,
            steps: inspected.saturating_sub(1),
        })
    }

    /// Returns the number of pages that a flush would release.
    fn withheld(&self) -> u64 {
        match &self.freed {
            Some(freed) => freed.set.saturating_add(self.flushing.set),
            None => self.freed_as_published,
        }
    }

    fn needs_flush(&mut self, cpu: &mut BitmapCpu) -> AllocError {
        // One flush at a time: the completion of a pending request must not release pages that were
        // freed after it.
        if self.flushing.set == 0 {
            if let Some(freed) = &mut self.freed {
                mem::swap(freed, &mut self.flushing);
            }
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
        let size = self.space.pages();
        let end = match request.limit.get().checked_sub(self.space.lo().get()) {
            Some(last) => last.saturating_add(1).min(size),
            None => return Err(request.exhausted()),
        };
        let mut inspected = 0;
        if let Some(lo) = self.first_fit(self.next, end, request, &mut inspected) {
            self.next = lo.saturating_add(request.pages);
            return self.take(lo, request, inspected);
        }
        let wraps = end == size;
        if wraps && self.withheld() > 0 {
            self.wrapping = true;
            return Err(self.needs_flush(cpu));
        }
        // Either nothing needs a flush, or the device reaches only a part of the space. Such an
        // allocation does not complete a lap and does not move the position.
        if let Some(lo) = self.first_fit(0, end, request, &mut inspected) {
            if wraps {
                self.next = lo.saturating_add(request.pages);
            }
            return self.take(lo, request, inspected);
        }
        if self.freed.is_some() && self.withheld() > 0 {
            return Err(self.needs_flush(cpu));
        }
        Err(request.exhausted())
    }

    fn free(&mut self, range: PfnRange) -> bool {
        if !self.space.contains(&range) {
            return false;
        }
        let (lo, pages) = (
            range.lo().get().saturating_sub(self.space.lo().get()),
            range.pages(),
        );
        if !self.used.has_all(lo, pages) || self.flushing.has_any(lo, pages) {
            return false;
        }
        match &mut self.freed {
            Some(freed) if freed.has_any(lo, pages) => return false,
            Some(freed) => freed.insert(lo, pages),
            None => {
                self.used.remove(lo, pages);
                self.freed_as_published = self.freed_as_published.saturating_add(pages);
            }
        }
        true
    }

    fn flushed(&mut self, cpu: &BitmapCpu) {
        if cpu.flush_requests == 0 || cpu.flush_requests != self.flush_requests {
            return;
        }
        self.flushing.subtract_from(&mut self.used);
        self.freed_as_published = 0;
        if mem::take(&mut self.wrapping) {
            self.next = 0;
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
        let state = BitmapState::new(space, false)?;
        Ok(Self { state: lock(state) })
    }

    /// Creates the allocator as published, with one bit per page (128 KiB for 4 GiB). It reuses a
    /// page that is freed ahead of the position before the flush.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`].
    pub fn as_published(
        space: PfnRange,
        lock: impl FnOnce(BitmapState) -> L,
    ) -> Result<Self, AllocError> {
        let state = BitmapState::new(space, true)?;
        Ok(Self { state: lock(state) })
    }

    /// Returns the number of freed pages that the next flush releases.
    pub fn withheld_pages(&self) -> u64 {
        self.state.with(|state| state.withheld())
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
            let freed = state.freed.as_ref().map_or(0, |bits| bits.words.capacity());
            let words = state.used.words.capacity() + freed + state.flushing.words.capacity();
            words.saturating_mul(size_of::<u64>())
        })
    }
}
