//! What allocators with one shared structure have in common: the structure itself, and the lock
//! around it.

use core::marker::PhantomData;

use ringfence_types::{Flushed, Lock, Pfn, PfnRange};

use crate::{AllocError, AllocRequest, Allocation, IovaAllocator};

/// A range that may be handed out at once: it was [`Flushed`], or never handed out.
///
/// Caches between the role and a store keep bare page numbers. The proof was consumed when the
/// range entered the cache, so only this crate can make this type from a bare range.
#[must_use = "the range is lost unless it is freed"]
#[derive(Debug, PartialEq, Eq)]
pub struct ReusableRange(PfnRange);

impl ReusableRange {
    /// For ranges that entered one of this crate's caches as [`Flushed`].
    #[inline]
    pub(crate) const fn cached(range: PfnRange) -> Self {
        Self(range)
    }

    /// The pages.
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

/// A structure that hands out ranges to one caller at a time. [`Locked`] makes an [`IovaAllocator`]
/// of it; caches ([`Eiovar`](crate::Eiovar), [`LinuxRcache`](crate::LinuxRcache)) stand in front of
/// any.
pub trait RangeStore {
    /// As [`IovaAllocator::HAS_LOOKUP`].
    const HAS_LOOKUP: bool = true;

    /// Finds `request.pages` consecutive free pages and takes them.
    ///
    /// # Errors
    /// See [`AllocError`]; the state is unchanged.
    fn alloc(&mut self, request: &AllocRequest) -> Result<Allocation, AllocError>;

    /// Takes a range back, exactly as it was handed out. `false`, and no change, if it is known not
    /// to be allocated.
    fn free(&mut self, range: ReusableRange) -> bool;

    /// The allocated range that contains `page`, as reserved in the store.
    fn find(&self, page: Pfn) -> Option<PfnRange>;

    /// Resident bytes of the store's own records.
    fn footprint(&self) -> usize;
}

/// A [`RangeStore`] behind the one lock that all processors share (AL15).
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
    /// Puts `store` behind the lock that `lock` makes, such as `RefCell::new` or `Mutex::new`.
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
