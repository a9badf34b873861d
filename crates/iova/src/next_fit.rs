//! Pages with one bit each, and a position behind the last allocation. Bitmap allocators search
//! upwards from the position.

use alloc::vec::Vec;
use core::mem;

use ringfence_types::{Pfn, PfnRange};

use crate::{AllocError, AllocRequest, Allocation};

const WORD: u64 = 64;

/// A set of pages, as offsets from the first page of the space.
#[derive(Debug, Default)]
pub(crate) struct Bits {
    words: Vec<u64>,
    set: u64,
}

impl Bits {
    pub(crate) fn new(bits: u64) -> Result<Self, AllocError> {
        let words = usize::try_from(bits.div_ceil(WORD)).map_err(|_| AllocError::OutOfMemory)?;
        let mut this = Self::default();
        this.words
            .try_reserve_exact(words)
            .map_err(|_| AllocError::OutOfMemory)?;
        this.words.resize(words, 0);
        Ok(this)
    }

    /// Returns the number of pages in the set.
    pub(crate) fn len(&self) -> u64 {
        self.set
    }

    /// Returns the memory of the words, in bytes.
    pub(crate) fn footprint(&self) -> usize {
        self.words.capacity().saturating_mul(size_of::<u64>())
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

    pub(crate) fn insert(&mut self, lo: u64, pages: u64) {
        Self::each_word(lo, pages, |index, mask| {
            if let Some(word) = self.words.get_mut(index as usize) {
                *word |= mask;
            }
        });
        self.set = self.set.saturating_add(pages);
    }

    pub(crate) fn remove(&mut self, lo: u64, pages: u64) {
        Self::each_word(lo, pages, |index, mask| {
            if let Some(word) = self.words.get_mut(index as usize) {
                *word &= !mask;
            }
        });
        self.set = self.set.saturating_sub(pages);
    }

    /// Returns true if all pages are in the set.
    pub(crate) fn has_all(&self, lo: u64, pages: u64) -> bool {
        let mut all = true;
        Self::each_word(lo, pages, |index, mask| {
            all &= self.word(index) & mask == mask
        });
        all
    }

    /// Returns true if any page is in the set.
    pub(crate) fn has_any(&self, lo: u64, pages: u64) -> bool {
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
    pub(crate) fn subtract_from(&mut self, other: &mut Self) {
        for (word, other) in self.words.iter_mut().zip(&mut other.words) {
            *other &= !mem::take(word);
        }
        other.set = other.set.saturating_sub(self.set);
        self.set = 0;
    }
}

/// The pages of a space, searched upwards from the end of the last allocation (Fujita and Moriai
/// section 2.3). An allocator above it decides when a freed page may be allocated again.
#[derive(Debug)]
pub struct NextFit {
    space: PfnRange,
    /// Pages that may not be allocated.
    used: Bits,
    /// Start of the next search, as an offset from the start of the space.
    position: u64,
}

impl NextFit {
    /// Creates a space with all pages free. Memory: one bit per page.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`].
    pub fn new(space: PfnRange) -> Result<Self, AllocError> {
        Ok(Self {
            space,
            used: Bits::new(space.pages())?,
            position: 0,
        })
    }

    /// Returns the end of the search for `request`, as an offset: that of the space, or the end of
    /// what the device reaches. `None` if it reaches no page.
    #[inline]
    pub fn end(&self, request: &AllocRequest) -> Option<u64> {
        let last = request.limit.get().checked_sub(self.space.lo().get())?;
        Some(last.saturating_add(1).min(self.space.pages()))
    }

    /// Returns true if a search to `end` reaches the end of the space, so that the next one wraps.
    #[inline]
    pub fn is_lap(&self, end: u64) -> bool {
        end == self.space.pages()
    }

    /// Allocates between the position and `end`, and moves the position. Adds the inspected words
    /// to `inspected`.
    #[inline]
    pub fn take_ahead(
        &mut self,
        end: u64,
        request: &AllocRequest,
        inspected: &mut u32,
    ) -> Option<Allocation> {
        let lo = self.first_fit(self.position, end, request, inspected)?;
        self.position = lo.saturating_add(request.pages);
        self.take(lo, request, *inspected)
    }

    /// Allocates between the start of the space and `end`. A search that does not reach the end of
    /// the space does not complete a lap, and does not move the position.
    pub fn take_from_start(
        &mut self,
        end: u64,
        request: &AllocRequest,
        inspected: &mut u32,
    ) -> Option<Allocation> {
        let lo = self.first_fit(0, end, request, inspected)?;
        if self.is_lap(end) {
            self.position = lo.saturating_add(request.pages);
        }
        self.take(lo, request, *inspected)
    }

    /// Moves the position to the start of the space.
    pub fn restart(&mut self) {
        self.position = 0;
    }

    /// Makes the pages of `range` free. Returns false, without a change, if one of them is free
    /// already or lies outside the space.
    pub fn clear(&mut self, range: PfnRange) -> bool {
        let Some((lo, pages)) = self.used_pages(range) else {
            return false;
        };
        self.used.remove(lo, pages);
        true
    }

    /// Returns the memory of the bits, in bytes.
    pub fn footprint(&self) -> usize {
        self.used.footprint()
    }

    /// Returns `range` as an offset and a number of pages; `None` if one of them is not used.
    pub(crate) fn used_pages(&self, range: PfnRange) -> Option<(u64, u64)> {
        if !self.space.contains(&range) {
            return None;
        }
        let lo = range.lo().get().saturating_sub(self.space.lo().get());
        let pages = range.pages();
        self.used.has_all(lo, pages).then_some((lo, pages))
    }

    /// Makes the pages of `freed` free, and empties it.
    pub(crate) fn clear_all(&mut self, freed: &mut Bits) {
        freed.subtract_from(&mut self.used);
    }

    /// Returns the number of pages of the space.
    pub(crate) fn pages(&self) -> u64 {
        self.space.pages()
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

    fn take(&mut self, lo: u64, request: &AllocRequest, inspected: u32) -> Option<Allocation> {
        let first = self.space.lo().get().saturating_add(lo);
        let range = PfnRange::new(Pfn::new(first), request.pages)?;
        self.used.insert(lo, request.pages);
        Some(Allocation {
            range,
            steps: inspected.saturating_sub(1),
        })
    }
}
