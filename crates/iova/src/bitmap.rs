//! One bit a page, searched upwards from the last range handed out (AL09), with one flush of the
//! domain per wrap (AL10).
//!
//! Source: Fujita et al., sections 2.3 and 3.3. Freed pages are [`Unmapped`], not flushed: the
//! policy is that no address is used again before the pointer has gone round the space once, and
//! that the domain is flushed when it wraps.
//!
//! The document does not say what happens to a page that is freed *ahead* of the pointer. Clearing
//! its bit, as bitmap allocators do, hands it out in the same lap, before the flush.
//! [`Bitmap::new`] therefore keeps freed pages apart until a flush; [`Bitmap::as_published`] has
//! the hole. See docs/decisions/0003-bitmap-reuse.md.

use alloc::vec::Vec;
use core::mem;

use ringfence_types::{Flushed, Lock, Pfn, PfnRange, Unmapped, WholeDomain};

use crate::{AllocError, AllocRequest, Allocation, IovaAllocator};

const WORD: u64 = 64;

/// A set of pages of the space, by their distance from its first page.
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

    /// Runs `change` on each word that `[lo, lo + pages)` touches, with the mask of its bits.
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

    /// Whether all pages are in the set.
    fn has_all(&self, lo: u64, pages: u64) -> bool {
        let mut all = true;
        Self::each_word(lo, pages, |index, mask| {
            all &= self.word(index) & mask == mask
        });
        all
    }

    /// Whether any page is.
    fn has_any(&self, lo: u64, pages: u64) -> bool {
        let mut any = false;
        Self::each_word(lo, pages, |index, mask| any |= self.word(index) & mask != 0);
        any
    }

    /// The first page in `[from, end)` that is in the set (`flip` = 0), or that is not (`flip` =
    /// all ones).
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

    /// Empties the set into a subtraction from `other`.
    fn subtract_from(&mut self, other: &mut Self) {
        for (word, other) in self.words.iter_mut().zip(&mut other.words) {
            *other &= !mem::take(word);
        }
        other.set = other.set.saturating_sub(self.set);
        self.set = 0;
    }
}

/// The shared part of a [`Bitmap`], to be put behind a lock.
#[derive(Debug)]
pub struct BitmapState {
    space: PfnRange,
    /// Pages that may not be handed out: live ones, and those below.
    used: Bits,
    /// Freed since the last request for a flush; `None` in the literal variant, which forgets at
    /// once.
    freed: Option<Bits>,
    /// Freed before that request, which has not been answered yet.
    flushing: Bits,
    /// Pages freed since the last flush, literal variant.
    freed_as_published: u64,
    /// Number of requests for a flush that found something to release.
    flush_requests: u64,
    /// Whether the pointer goes back to the start with the flush.
    wrapping: bool,
    /// Where the next search starts.
    next: u64,
}

/// The allocator. Takes back ranges that are merely unmapped, and asks for a flush of the domain
/// when it wraps.
#[derive(Debug)]
pub struct Bitmap<L> {
    state: L,
}

/// Handle of one processor: which request for a flush it was told of last.
///
/// A flush answers for the pages that were free when this handle was told
/// [`AllocError::NeedsFlush`], because the invalidation was submitted after that; for a later
/// request of another processor it proves nothing.
#[derive(Debug, Default)]
pub struct BitmapCpu {
    flush_requests: u64,
}

impl BitmapState {
    fn new(space: PfnRange, literal: bool) -> Result<Self, AllocError> {
        let pages = space.pages();
        Ok(Self {
            space,
            used: Bits::new(pages)?,
            freed: if literal {
                None
            } else {
                Some(Bits::new(pages)?)
            },
            flushing: Bits::new(if literal { 0 } else { pages })?,
            freed_as_published: 0,
            flush_requests: 0,
            wrapping: false,
            next: 0,
        })
    }

    /// First fit in `[from, end)`, both counted from the start of the space.
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
            let taken = self
                .used
                .first(lo, lo.saturating_add(request.pages), 0, &mut run);
            *inspected = inspected.saturating_add(run.saturating_sub(1));
            match taken {
                None => return Some(lo),
                Some(taken) => at = taken.saturating_add(1),
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

    /// Pages that a flush would release.
    fn withheld(&self) -> u64 {
        match &self.freed {
            Some(freed) => freed.set.saturating_add(self.flushing.set),
            None => self.freed_as_published,
        }
    }

    fn needs_flush(&mut self, cpu: &mut BitmapCpu) -> AllocError {
        // One flush at a time: pages freed after the request that is under way must not be released
        // by its answer.
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
        // Nothing to flush, or a device that reaches only a part of the space: that is no lap, and
        // does not move the pointer.
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
    /// All pages of `space` free, behind the lock that `lock` makes. Freed pages are not handed out
    /// before a flush, wherever they lie. Three bits a page: 384 KiB for 4 GiB.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`].
    pub fn new(space: PfnRange, lock: impl FnOnce(BitmapState) -> L) -> Result<Self, AllocError> {
        let state = BitmapState::new(space, false)?;
        Ok(Self { state: lock(state) })
    }

    /// The document's allocator to the letter: one bit a page (128 KiB for 4 GiB), and a page that
    /// is freed ahead of the pointer is handed out before the flush.
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

    /// Freed pages that the next flush releases.
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

    /// A bitmap does not know where ranges begin and end.
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
