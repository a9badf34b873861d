//! One entry of the table, in two words.

use ringfence_types::{Iova, PageSize};

/// Bits of a [`CacheEntry`]'s second word, from the lowest: cycle of the release (8), ghost (1),
/// users (10), page number of the IOVA (45).
const GHOST: u64 = 1 << 8;
const USER_SHIFT: u32 = 9;
const USER: u64 = 1 << USER_SHIFT;
const USERS_MAX: u64 = (1 << 10) - 1;
const PAGE_SHIFT: u32 = 19;

/// Highest IOVA of an entry: 57 bits, the maximum that any IOMMU translates.
const IOVA_MAX: u64 = u64::MAX >> (64 - 57);

/// An entry: free (all zero), a mapping in use or released, or a ghost. A ghost is the key of a
/// mapping that left the cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct CacheEntry {
    key: u64,
    state: u64,
}

impl CacheEntry {
    /// Creates a mapping with one user; `None` if the address is misaligned or too high.
    #[inline]
    pub(super) fn in_use(key: u64, iova: Iova) -> Option<Self> {
        (iova.is_aligned(PageSize::Size4K.bytes()) && iova.get() <= IOVA_MAX).then(|| Self {
            key,
            state: (iova.get() >> PageSize::Size4K.shift()) << PAGE_SHIFT | USER,
        })
    }

    /// Returns the key's word; 0 if the entry is free.
    #[inline]
    pub(super) fn key(&self) -> u64 {
        self.key
    }

    #[inline]
    pub(super) fn iova(&self) -> Iova {
        Iova::new((self.state >> PAGE_SHIFT) << PageSize::Size4K.shift())
    }

    /// Returns true if the entry is a ghost.
    #[inline]
    pub(super) fn is_ghost(&self) -> bool {
        self.state & GHOST != 0
    }

    /// Returns the number of users; 0 for a ghost.
    #[inline]
    pub(super) fn users(&self) -> u64 {
        self.state >> USER_SHIFT & USERS_MAX
    }

    /// Adds a user; false if the count is at its maximum.
    #[inline]
    pub(super) fn add_user(&mut self) -> bool {
        let room = self.users() < USERS_MAX;
        if room {
            self.state += USER;
        }
        room
    }

    /// Removes a user in cycle `now` and returns the remaining users; `None` if the count is 0.
    #[inline]
    pub(super) fn drop_user(&mut self, now: u8) -> Option<u64> {
        let left = self.users().checked_sub(1)?;
        self.state = (self.state - USER) & !0xff | u64::from(now);
        Some(left)
    }

    /// Returns the cycle of the last release. Valid for a released mapping or a ghost.
    #[inline]
    pub(super) fn cycle(&self) -> u8 {
        self.state as u8
    }

    /// Returns the cycles since the last release. Valid for a released mapping or a ghost.
    #[inline]
    pub(super) fn age(&self, now: u8) -> u8 {
        now.wrapping_sub(self.cycle())
    }

    /// Sets the cycles since the last release. For a released mapping.
    #[inline]
    pub(super) fn set_age(&mut self, now: u8, age: u8) {
        self.state = self.state & !0xff | u64::from(now.wrapping_sub(age));
    }

    /// Turns the mapping into a ghost: keeps its key and the cycle of its release.
    #[inline]
    pub(super) fn make_ghost(&mut self) {
        self.state = self.state & 0xff | GHOST;
    }
}
