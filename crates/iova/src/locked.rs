//! Allocators with one shared structure and one lock around it.

use core::marker::PhantomData;

use ringfence_types::{Flushed, Lock, Pfn, PfnRange};

use crate::{AllocError, AllocRequest, Allocation, IovaAllocator};

/// A range that may be reused at once: it was [`Flushed`], or never allocated.
///
/// Caches in front of a store keep bare page numbers. A cache consumes the proof when a range
/// enters it, so only this crate can create this type from a bare range.
#[must_use = "the range is lost unless it is freed"]
#[derive(Debug, PartialEq, Eq)]
pub struct ReusableRange(PfnRange);

impl ReusableRange {
    /// Wraps a range that entered one of this crate's caches as [`Flushed`].
    #[inline]
    pub(crate) const fn cached(range: PfnRange) -> Self {
        Self(range)
    }

    /// Returns the pages.
    #[inline]
    pub const fn range(&self) -> PfnRange {
        self.0
    }
}

impl From<Flushed> for ReusableRange {
    #[inline]
    fn from(flushed: Flushed) -> Self {
        Self(flushed.range())
    }
}

/// A structure that allocates ranges for one caller at a time. [`Locked`] turns it into an
/// [`IovaAllocator`]. Caches ([`Eiovar`](crate::Eiovar), [`LinuxRcache`](crate::LinuxRcache)) work
/// in front of any store.
pub trait RangeStore {
    /// True if [`find`](Self::find) can look up ranges. If false, it returns `None` for every page.
    const HAS_LOOKUP: bool = true;

    /// Allocates `request.pages` consecutive free pages.
    ///
    /// # Errors
    /// See [`AllocError`]. The state is unchanged.
    fn alloc(&mut self, request: &AllocRequest) -> Result<Allocation, AllocError>;

    /// Frees a range exactly as it was allocated. Returns `false`, without a change, if the range
    /// is known not to be allocated.
    fn free(&mut self, range: ReusableRange) -> bool;

    /// Returns the allocated range that contains `page`, as reserved in the store.
    fn find(&self, page: Pfn) -> Option<PfnRange>;

    /// Returns the memory of the store's own records in bytes.
    fn footprint(&self) -> usize;
}

/// A [`RangeStore`] behind the one lock that all CPUs share.
///
/// ```
/// use core::cell::RefCell;
/// use ringfence_iova::{CachedTree, IovaAllocator, Locked, AllocRequest};
/// use ringfence_types::{Pfn, PfnRange};
///
/// let space = PfnRange::inclusive(Pfn::new(1), Pfn::new(0xf_ffff)).unwrap();
/// let allocator = Locked::new(CachedTree::new(space), RefCell::new);
/// let found = allocator.alloc(&mut (), &AllocRequest::new(1, Pfn::new(0xf_ffff))).unwrap();
/// assert_eq!(found.range.lo(), Pfn::new(0xf_ffff));
/// ```
#[derive(Debug)]
pub struct Locked<S, L> {
    lock: L,
    store: PhantomData<fn() -> S>,
}

impl<S: RangeStore, L: Lock<S>> Locked<S, L> {
    /// Wraps `store` in the lock that `lock` creates, such as `RefCell::new` or `Mutex::new`.
    pub fn new(store: S, lock: impl FnOnce(S) -> L) -> Self {
        Self {
            lock: lock(store),
            store: PhantomData,
        }
    }
}

impl<S: RangeStore, L: Lock<S>> IovaAllocator for Locked<S, L> {
    type PerCpu = ();
    type FreeProof = Flushed;

    const HAS_LOOKUP: bool = S::HAS_LOOKUP;

    #[inline]
    fn per_cpu(&self) {}

    #[inline]
    fn alloc(&self, (): &mut (), request: &AllocRequest) -> Result<Allocation, AllocError> {
        self.lock.with(|store| store.alloc(request))
    }

    #[inline]
    fn find(&self, (): &mut (), page: Pfn) -> Option<PfnRange> {
        self.lock.with(|store| store.find(page))
    }

    #[inline]
    fn free(&self, (): &mut (), range: Flushed) -> bool {
        self.lock.with(|store| store.free(range.into()))
    }

    fn footprint(&self) -> usize {
        self.lock.with(|store| store.footprint())
    }
}
