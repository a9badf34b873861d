//! Pseudo-random choices from a seed.

/// A generator (xorshift64*). The same seed gives the same choices on every platform.
#[derive(Debug, Clone)]
pub struct Seed(u64);

impl Seed {
    /// Creates a generator from any number.
    pub const fn new(seed: u64) -> Self {
        // The generator never leaves the state zero.
        Self(if seed == 0 {
            0x9e37_79b9_7f4a_7c15
        } else {
            seed
        })
    }

    /// Returns the next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `bound`; 0 if `bound` is 0.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        // The high half of the product. The bias is negligible for bounds far below 2^64.
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }
}
