//! The role every IOVA allocator plays, and its vocabulary.

use core::fmt;

use ringfence_types::{Flushed, Pfn, PfnRange, Unmapped, WholeDomain};

/// What a mapping needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocRequest {
    /// Number of pages, at least 1.
    pub pages: u64,
    /// The first page is a multiple of 2^`align_order`.
    pub align_order: u8,
    /// The highest page that may be part of the range (from the device's DMA mask), inclusive.
    pub limit: Pfn,
}

impl AllocRequest {
    /// `pages` pages anywhere up to `limit`, aligned to one page.
    #[inline]
    pub const fn new(pages: u64, limit: Pfn) -> Self {
        Self {
            pages,
            align_order: 0,
            limit,
        }
    }

    /// Refuses what no state could satisfy.
    #[inline]
    pub(crate) const fn validate(&self) -> Result<(), AllocError> {
        if self.pages == 0 || self.align_order >= PAGE_BITS {
            return Err(AllocError::BadRequest {
                pages: self.pages,
                align_order: self.align_order,
            });
        }
        Ok(())
    }

    /// The error for a request that finds no room.
    #[inline]
    pub(crate) const fn exhausted(&self) -> AllocError {
        AllocError::Exhausted {
            pages: self.pages,
            limit: self.limit,
        }
    }

    /// The highest aligned first page of a range that fits into `[floor, top)`. Valid requests
    /// only.
    #[inline]
    pub(crate) const fn highest_in(&self, floor: u64, top: u64) -> Option<u64> {
        let Some(lo) = top.checked_sub(self.pages) else {
            return None;
        };
        let lo = lo & !self.align_mask();
        if lo >= floor { Some(lo) } else { None }
    }

    /// The lowest aligned first page of a range that fits into `[floor, top)`. Valid requests only.
    #[inline]
    pub(crate) const fn lowest_in(&self, floor: u64, top: u64) -> Option<u64> {
        let lo = floor.saturating_add(self.align_mask()) & !self.align_mask();
        match top.checked_sub(self.pages) {
            Some(highest) if lo <= highest => Some(lo),
            _ => None,
        }
    }

    /// Low bits that are zero in an aligned page number.
    #[inline]
    const fn align_mask(&self) -> u64 {
        (1_u64 << (self.align_order & 63)) - 1
    }

    /// The smallest order whose power of two holds the pages. Valid requests only.
    #[inline]
    pub(crate) const fn order(&self) -> u32 {
        order_of(self.pages)
    }
}

/// Highest page of the 32-bit space ("dma_32bit_pfn" in Linux).
pub(crate) const LAST_32BIT_PAGE: u64 = 0xf_ffff;

/// Bits of a page number.
const PAGE_BITS: u8 = 52;

/// The smallest `order` with 2^`order` >= `pages`; `pages` is at least 1.
#[inline]
pub(crate) const fn order_of(pages: u64) -> u32 {
    // Doubled, with a low bit that makes it non-zero, so that one bit scan suffices; the undoubled
    // bits keep huge values huge.
    let below = pages.wrapping_sub(1);
    63 - (below | below << 1 | 1).leading_zeros()
}

/// A range handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// The pages; exactly as many as asked for.
    pub range: PfnRange,
    /// Existing ranges (or bitmap words) inspected to find it beyond the first: the iterations of
    /// the search loop (`rb_prev` calls of EIOVAR Fig. 2). Zero when it came from a cache.
    pub steps: u32,
}

/// Why no range was handed out. The allocator is as it was before the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AllocError {
    /// No free range of `pages` pages lies at or below `limit`.
    Exhausted {
        /// Pages asked for.
        pages: u64,
        /// Highest page allowed.
        limit: Pfn,
    },
    /// The request itself cannot be satisfied by any state: no pages, or an alignment beyond the
    /// address width.
    BadRequest {
        /// Pages asked for.
        pages: u64,
        /// Binary logarithm of the alignment asked for.
        align_order: u8,
    },
    /// The allocator has handed out every address once and must not reuse any before the domain is
    /// flushed: flush it, call [`IovaAllocator::flushed`], and ask again.
    NeedsFlush,
    /// No memory for the allocator's own records.
    OutOfMemory,
}

impl fmt::Display for AllocError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exhausted { pages, limit } => {
                write!(f, "no free range of {pages} pages at or below page {limit}")
            }
            Self::BadRequest { pages, align_order } => write!(
                f,
                "cannot allocate {pages} pages aligned to 2^{align_order} pages"
            ),
            Self::NeedsFlush => {
                f.write_str("the domain must be flushed before addresses are reused")
            }
            Self::OutOfMemory => f.write_str("no memory for the allocator's records"),
        }
    }
}

impl core::error::Error for AllocError {}

/// What must be proven about a range before its allocator takes it back: [`Flushed`] for allocators
/// that may hand it out at once, [`Unmapped`] for those that first ask for a flush of the domain.
pub trait FreeProof: From<Flushed> + fmt::Debug {
    /// The pages.
    fn range(&self) -> PfnRange;
}

impl FreeProof for Flushed {
    #[inline]
    fn range(&self) -> PfnRange {
        Flushed::range(self)
    }
}

impl FreeProof for Unmapped {
    #[inline]
    fn range(&self) -> PfnRange {
        Unmapped::range(self)
    }
}

/// Where the I/O virtual address comes from (question 1 of a mode).
///
/// All methods take `&self`: what processors share stands behind a [`Lock`](ringfence_types::Lock)
/// that the embedder supplies, what they do not share is the handle [`PerCpu`](Self::PerCpu), one
/// per processor.
pub trait IovaAllocator {
    /// One processor's part of the allocator.
    type PerCpu;
    /// What a range must have gone through to be freed.
    type FreeProof: FreeProof;

    /// Whether [`find`](Self::find) has an index to look into. Without, it answers `None` for every
    /// page.
    const HAS_LOOKUP: bool = true;

    /// As [`HAS_LOOKUP`](Self::HAS_LOOKUP), of this allocator: a type that stands for several kinds
    /// of allocators has an index in some of them.
    #[inline]
    fn has_lookup(&self) -> bool {
        Self::HAS_LOOKUP
    }

    /// A handle for one more processor.
    fn per_cpu(&self) -> Self::PerCpu;

    /// Finds `request.pages` consecutive free pages and takes them.
    ///
    /// # Errors
    /// See [`AllocError`]; the state is unchanged.
    fn alloc(
        &self,
        cpu: &mut Self::PerCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError>;

    /// The allocated range that contains `page`, for layers that are given an address and must find
    /// its range (the "IOVA find" of the rIOMMU document, Table 1). Allocators without such an
    /// index return `None`; the layer then relies on the length its caller gives, as Linux does
    /// today. For a page that is not allocated the answer is `None`, or a range that a cache in
    /// front of the index keeps.
    fn find(&self, cpu: &mut Self::PerCpu, page: Pfn) -> Option<PfnRange>;

    /// Takes a range back, exactly as it was handed out. A range that is not allocated is the
    /// mapping layer's to refuse (its leaf is absent); debug builds refuse it here too, by leaving
    /// the state as it is and reporting `false`.
    fn free(&self, cpu: &mut Self::PerCpu, range: Self::FreeProof) -> bool;

    /// Tells the allocator that everything that was unmapped in `domain` before the flush may be
    /// reused. Only allocators that answer [`AllocError::NeedsFlush`] care.
    fn flushed(&self, cpu: &mut Self::PerCpu, proof: Flushed<WholeDomain>) {
        let _ = (cpu, proof);
    }

    /// Gives what the handle holds back to the shared part: before a processor goes away, or under
    /// memory pressure.
    fn drain(&self, cpu: &mut Self::PerCpu) {
        let _ = cpu;
    }

    /// Resident bytes of the allocator's own records, handles excluded.
    fn footprint(&self) -> usize;
}
