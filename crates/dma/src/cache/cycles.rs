//! Residency of released mappings, in cycles.

/// The number C of whole cycles for which the cache keeps a released mapping, 1 to [`Cycles::MAX`]
/// (section 4.5).
///
/// The cycle of the release comes on top. With cycles of T, a mapping stays for at least T x C and
/// less than T x (C + 1). With the PVIOMMU paper's 10 s and 3, that is from 30 s to less than 40 s.
///
/// This follows the paper's last sentence on the matter. The sentence before it gives 20 s to less
/// than 30 s: "a new cycle numbered N+C starts, and mappings added in cycle N are removed".
///
/// The caller chooses T: the interval at which it calls [`tick`](super::ReverseCache::tick).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cycles(u8);

impl Cycles {
    /// Highest C: the cache counts ages in 8 bits.
    pub const MAX: u8 = 254;

    /// C of the PVIOMMU paper.
    pub const PAPER: Self = Self(3);

    /// T of the PVIOMMU paper, in seconds.
    pub const PAPER_SECONDS: u64 = 10;

    /// Creates C = `count`; `None` if `count` is 0 or above [`MAX`](Self::MAX).
    pub const fn new(count: u8) -> Option<Self> {
        match count {
            1..=Self::MAX => Some(Self(count)),
            _ => None,
        }
    }

    /// Returns C as a number from 1 to [`MAX`](Self::MAX).
    #[inline]
    pub const fn get(self) -> u8 {
        self.0
    }
}
