//! The trait of all IOVA allocators, and its request and error types.

use core::fmt;

use ringfence_types::{Flushed, Permissions, Pfn, PfnRange, Unmapped, WholeDomain};

/// A request for a range of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocRequest {
    /// Number of pages, at least 1.
    pub pages: u64,
    /// The first page is a multiple of 2^`align_order`.
    pub align_order: u8,
    /// The highest page that the range may include (from the device's DMA mask).
    pub limit: Pfn,
    /// The accesses of the mapping. [`Contiguous`](crate::Contiguous) keeps ranges of equal
    /// permissions together; other allocators ignore it.
    pub permissions: Permissions,
}

impl AllocRequest {
    /// Requests `pages` pages up to `limit`, aligned to one page, for reads and writes.
    #[inline]
    pub const fn new(pages: u64, limit: Pfn) -> Self {
        Self {
            pages,
            align_order: 0,
            limit,
            permissions: Permissions::READ_WRITE,
        }
    }

    /// Rejects requests that no state could satisfy.
    ///
    /// # Errors
    /// [`AllocError::BadRequest`] for no pages, or an alignment of the whole address space.
    #[inline]
    pub const fn validate(&self) -> Result<(), AllocError> {
        if self.pages == 0 || self.align_order >= PAGE_BITS {
            return Err(AllocError::BadRequest {
                pages: self.pages,
                align_order: self.align_order,
            });
        }
        Ok(())
    }

    /// Returns the error of a request that finds no free range.
    #[inline]
    pub const fn exhausted(&self) -> AllocError {
        AllocError::Exhausted {
            pages: self.pages,
            limit: self.limit,
        }
    }

    /// Returns the highest aligned first page of a range that fits into `[floor, top)`. The request
    /// must be valid.
    #[inline]
    pub(crate) const fn highest_in(&self, floor: u64, top: u64) -> Option<u64> {
        let Some(lo) = top.checked_sub(self.pages) else {
            return None;
        };
        let lo = lo & !self.align_mask();
        if lo >= floor { Some(lo) } else { None }
    }

    /// Returns the lowest aligned first page of a range that fits into `[floor, top)`. The request
    /// must be valid.
    #[inline]
    pub(crate) const fn lowest_in(&self, floor: u64, top: u64) -> Option<u64> {
        let lo = floor.saturating_add(self.align_mask()) & !self.align_mask();
        match top.checked_sub(self.pages) {
            Some(highest) if lo <= highest => Some(lo),
            _ => None,
        }
    }

    /// Returns the mask of the bits that are zero in an aligned page number.
    #[inline]
    const fn align_mask(&self) -> u64 {
        (1_u64 << (self.align_order & 63)) - 1
    }

    /// Returns the smallest order whose power of two is at least `pages`. The request must be
    /// valid.
    #[inline]
    pub(crate) const fn order(&self) -> u32 {
        order_of(self.pages)
    }
}

/// Highest page of the 32-bit space ("dma_32bit_pfn" in Linux).
pub(crate) const LAST_32BIT_PAGE: u64 = 0xf_ffff;

/// Bits of a page number.
const PAGE_BITS: u8 = 52;

/// Returns the smallest `order` with 2^`order` >= `pages`. `pages` must be at least 1.
#[inline]
pub(crate) const fn order_of(pages: u64) -> u32 {
    // Doubling `below` and setting its low bit makes the value non-zero, so one bit scan is enough.
    // The undoubled bits keep the top bit of huge values.
    let below = pages.wrapping_sub(1);
    63 - (below | below << 1 | 1).leading_zeros()
}

/// An allocated range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// The allocated pages, exactly as many as requested.
    pub range: PfnRange,
    /// Number of search steps: existing ranges (or bitmap words) inspected after the first one.
    /// These are the iterations of the search loop (`rb_prev` calls of EIOVAR Fig. 2). Zero if a
    /// cache supplied the range. Each allocator documents deviations.
    pub steps: u32,
}

/// The reason why an allocation failed. The allocator is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AllocError {
    /// No free range of `pages` pages lies at or below `limit`.
    Exhausted {
        /// Number of pages requested.
        pages: u64,
        /// Highest page allowed.
        limit: Pfn,
    },
    /// No state could satisfy the request: it has no pages, or an alignment beyond the address
    /// width.
    BadRequest {
        /// Number of pages requested.
        pages: u64,
        /// Binary logarithm of the alignment requested.
        align_order: u8,
    },
    /// The allocator has allocated every address once, and must not reuse any before a flush. Flush
    /// the domain, call [`IovaAllocator::flushed`], and try again.
    NeedsFlush,
    /// Out of memory for the allocator's records.
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
            Self::OutOfMemory => f.write_str("out of memory for the allocator's records"),
        }
    }
}

impl core::error::Error for AllocError {}

/// The proof that an allocator requires to free a range. [`Flushed`] for allocators that may reuse
/// it at once, [`Unmapped`] for those that first request a flush of the domain.
pub trait FreeProof: From<Flushed> + fmt::Debug {
    /// Returns the pages of the range.
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

/// An IOVA allocator (axis 1 of a mode).
///
/// All methods take `&self`. A [`Lock`](ringfence_types::Lock) of the embedder protects the state
/// that CPUs share. Each CPU has a handle, [`PerCpu`](Self::PerCpu), for its own state.
pub trait IovaAllocator {
    /// The state of one CPU.
    type PerCpu;
    /// The proof that [`free`](Self::free) requires.
    type FreeProof: FreeProof;

    /// True if [`find`](Self::find) can look up ranges. If false, it returns `None` for every page.
    const HAS_LOOKUP: bool = true;

    /// Like [`HAS_LOOKUP`](Self::HAS_LOOKUP), for a type that represents several kinds of
    /// allocators, some of which can look up ranges.
    #[inline]
    fn has_lookup(&self) -> bool {
        Self::HAS_LOOKUP
    }

    /// Creates the handle of another CPU.
    fn per_cpu(&self) -> Self::PerCpu;

    /// Allocates `request.pages` consecutive free pages.
    ///
    /// # Errors
    /// See [`AllocError`]. The state is unchanged.
    fn alloc(
        &self,
        cpu: &mut Self::PerCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError>;

    /// Returns the allocated range that contains `page`. For layers that receive an address and
    /// need its range (the "IOVA find" of the rIOMMU paper, Table 1).
    ///
    /// `None` if the allocator has no such index; the layer then relies on the length from its
    /// caller, as Linux does today. For a page that is not allocated, the result is `None` or a
    /// range that a cache in front of the index holds.
    fn find(&self, cpu: &mut Self::PerCpu, page: Pfn) -> Option<PfnRange>;

    /// Frees a range exactly as it was allocated. The mapping layer must reject ranges that are not
    /// allocated, whose leaf is not present. Debug builds also check here: they return `false` and
    /// leave the state unchanged.
    fn free(&self, cpu: &mut Self::PerCpu, range: Self::FreeProof) -> bool;

    /// Permits reuse of every address that was unmapped in the domain of `proof` before the flush.
    /// Used only by allocators that return [`AllocError::NeedsFlush`].
    fn flushed(&self, cpu: &mut Self::PerCpu, proof: Flushed<WholeDomain>) {
        let _ = (cpu, proof);
    }

    /// Moves the ranges that the handle caches to the shared state. Call it before a CPU is
    /// removed, or under memory pressure.
    fn drain(&self, cpu: &mut Self::PerCpu) {
        let _ = cpu;
    }

    /// Returns the memory of the allocator's own records in bytes, without handles.
    fn footprint(&self) -> usize;
}
