//! How long a released mapping stays.

/// The number C of whole cycles that a released mapping stays at most, 1 to [`Cycles::MAX`]
/// (section 4.5).
///
/// The cycle in which it was released comes on top: with cycles of T it stays at least T x C and
/// less than T x (C + 1), with the document's 10 s and 3 from 30 s to less than 40 s. So says its
/// last sentence on the matter; the one before, that "a new cycle numbered N+C starts, and mappings
/// added in cycle N are removed", would give 20 s to less than 30 s. T is the caller's: it is how
/// often it calls [`tick`](super::ReverseCache::tick).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cycles(u8);

impl Cycles {
    /// The highest C: ages are counted in 8 bits.
    pub const MAX: u8 = 254;

    /// C of the document.
    pub const PAPER: Self = Self(3);

    /// T of the document, in seconds.
    pub const PAPER_SECONDS: u64 = 10;

    /// C = `count`; `None` if it is 0 or above [`MAX`](Self::MAX).
    pub const fn new(count: u8) -> Option<Self> {
        match count {
            1..=Self::MAX => Some(Self(count)),
            _ => None,
        }
    }

    /// C.
    #[inline]
    pub const fn get(self) -> u8 {
        self.0
    }
}
