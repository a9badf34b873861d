//! Timestamps that the embedder supplies.

/// Nanoseconds since an epoch of the embedder's choice. The core reads no clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Returns the nanoseconds since `earlier`, or zero if `earlier` is later than `self`.
    #[inline]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
