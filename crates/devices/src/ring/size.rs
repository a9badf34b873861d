//! The size of a ring and positions in it.

/// Number of entries of a ring: a power of two from 2 to 65536. Free-running 32-bit counters can
/// then index the entries and distinguish full from empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RingSize(u32);

impl RingSize {
    /// Creates a size; `None` if `entries` is no power of two from 2 to 65536.
    pub const fn new(entries: u32) -> Option<Self> {
        if entries < 2 || entries > 1 << 16 || !entries.is_power_of_two() {
            return None;
        }
        Some(Self(entries))
    }

    /// Returns the number of entries.
    #[inline]
    pub const fn entries(self) -> u32 {
        self.0
    }

    /// Returns the index of the entry for the free-running `counter`.
    #[inline]
    pub const fn index(self, counter: u32) -> u32 {
        counter & (self.0 - 1)
    }
}

/// A position in a ring that tracks its lap. The phase of entries alternates from lap to lap (NVMe
/// base specification, "Phase Tag").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingCursor {
    size: RingSize,
    counter: u32,
}

impl RingCursor {
    /// Creates a position at entry 0 of the first lap.
    pub const fn new(size: RingSize) -> Self {
        Self { size, counter: 0 }
    }

    /// Returns the index of the entry.
    #[inline]
    pub const fn index(&self) -> u32 {
        self.size.index(self.counter)
    }

    /// Returns the phase of this lap. Set in the first lap, because memory is initially zero.
    #[inline]
    pub const fn phase(&self) -> bool {
        self.counter & self.size.0 == 0
    }

    /// Advances by one entry.
    #[inline]
    pub fn advance(&mut self) {
        self.counter = self.counter.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two() {
        for bad in [0, 1, 3, 65537, 131_072, u32::MAX] {
            assert_eq!(RingSize::new(bad), None);
        }
        for good in [2, 256, 65536] {
            assert_eq!(RingSize::new(good).unwrap().entries(), good);
        }
    }

    #[test]
    fn the_phase_changes_with_every_lap() {
        let size = RingSize::new(4).unwrap();
        let mut cursor = RingCursor {
            size,
            // Across the wrap of the counter.
            counter: u32::MAX - 7,
        };
        let mut laps = Vec::new();
        for _ in 0..12 {
            laps.push((cursor.index(), cursor.phase()));
            cursor.advance();
        }
        let lap = |phase| (0..4).map(move |index| (index, phase));
        let expected: Vec<_> = lap(true).chain(lap(false)).chain(lap(true)).collect();
        assert_eq!(laps, expected);
    }
}
