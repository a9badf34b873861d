//! How soon mappings are used again, and how long it is therefore worth keeping them.

use super::Cycles;

/// How long released mappings stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResidencyPolicy {
    /// C cycles, whatever happens to them: the document's.
    Fixed,
    /// As long as reuse has been taking, and never longer than C cycles.
    ///
    /// The cache counts after how many cycles mappings were used again, late ones included: of a
    /// mapping that left before C cycles were over it remembers the key until they are. A released
    /// mapping stays for the power of two of cycles within which all but `late` in a thousand of
    /// those reuses came; the three directions are judged apart, because receive rings and transmit
    /// buffers come back after different times. Until 32 reuses of a direction are known, it stays
    /// for 7 cycles. The counts fade, so that what changed is noticed.
    Adaptive {
        /// How many reuses in a thousand may come too late.
        late: u16,
    },
}

/// Gaps by their number of binary digits: 0, 1, 2-3, 4-7, ... 128-255 cycles.
const BUCKETS: usize = 9;

/// Reuses of one direction after which its counts are believed.
const ENOUGH: u32 = 32;

/// Whole cycles that mappings stay until then: too short a time shows, because late reuses are
/// counted, too long a one does not.
const AT_FIRST: u8 = 7;

/// Reuses of one direction after which its counts are halved.
const FADE: u32 = 1 << 14;

/// The gaps between release and reuse, in cycles, by direction.
#[derive(Debug, Clone)]
pub(super) struct Gaps {
    residency: ResidencyPolicy,
    longest: Cycles,
    seen: [[u32; BUCKETS]; 4],
    /// By direction, how many whole cycles a released mapping stays.
    patience: [u8; 4],
}

impl Gaps {
    pub(super) fn new(residency: ResidencyPolicy, longest: Cycles) -> Self {
        let patience = match residency {
            ResidencyPolicy::Fixed => longest.get(),
            ResidencyPolicy::Adaptive { .. } => longest.get().min(AT_FIRST),
        };
        Self {
            residency,
            longest,
            seen: [[0; BUCKETS]; 4],
            patience: [patience; 4],
        }
    }

    /// Whether gaps are counted at all.
    #[inline]
    pub(super) fn counted(&self) -> bool {
        matches!(self.residency, ResidencyPolicy::Adaptive { .. })
    }

    /// A mapping whose key has `word` is used again, `age` cycles after its release.
    #[inline]
    pub(super) fn count(&mut self, word: u64, age: u8) {
        let bucket = (u8::BITS - age.leading_zeros()) as usize;
        let seen = self.seen.get_mut((word & 3) as usize);
        if let Some(count) = seen.and_then(|seen| seen.get_mut(bucket)) {
            *count = count.saturating_add(1);
        }
    }

    /// How many whole cycles a released mapping whose key has `word` stays.
    #[inline]
    pub(super) fn patience(&self, word: u64) -> u8 {
        let kind = (word & 3) as usize;
        self.patience
            .get(kind)
            .copied()
            .unwrap_or(self.longest.get())
    }

    /// The least of what [`patience`](Self::patience) says.
    pub(super) fn least(&self) -> u8 {
        self.patience.iter().copied().min().unwrap_or(0)
    }

    /// A cycle ends: what was counted decides how long mappings stay from now on.
    pub(super) fn end_cycle(&mut self) {
        let ResidencyPolicy::Adaptive { late } = self.residency else {
            return;
        };
        for (seen, patience) in self.seen.iter_mut().zip(&mut self.patience) {
            let total: u32 = seen.iter().fold(0, |sum, count| sum.saturating_add(*count));
            if total < ENOUGH {
                continue;
            }
            let allowed = u64::from(total) * u64::from(late) / 1000;
            // From the longest gaps down, as long as those that come too late are few enough.
            let (mut digits, mut beyond) = (BUCKETS as u32 - 1, 0_u64);
            while let Some(count) = seen.get(digits as usize) {
                beyond = beyond.saturating_add(u64::from(*count));
                if beyond > allowed || digits == 0 {
                    break;
                }
                digits -= 1;
            }
            // All gaps of `digits` binary digits are at most this long.
            let gap = u8::try_from((1_u32 << digits) - 1).unwrap_or(u8::MAX);
            *patience = gap.min(self.longest.get());
            if total > FADE {
                for count in seen {
                    *count /= 2;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(gaps: &[(u8, u32)], late: u16) -> u8 {
        let mut seen = Gaps::new(
            ResidencyPolicy::Adaptive { late },
            Cycles::new(200).unwrap(),
        );
        for &(gap, times) in gaps {
            for _ in 0..times {
                seen.count(1, gap);
            }
        }
        seen.end_cycle();
        seen.patience(1)
    }

    #[test]
    fn patience_covers_all_but_the_late_ones() {
        assert_eq!(settled(&[(0, 31)], 10), 7, "too few to believe");
        assert_eq!(settled(&[(0, 1000)], 10), 0);
        assert_eq!(settled(&[(0, 990), (7, 10)], 10), 0);
        assert_eq!(settled(&[(0, 989), (7, 11)], 10), 7);
        assert_eq!(settled(&[(0, 989), (4, 11)], 10), 7);
        assert_eq!(settled(&[(0, 50), (255, 50)], 10), 200, "never above C");
        assert_eq!(settled(&[(0, 999), (255, 1)], 0), 200);
    }

    #[test]
    fn directions_are_judged_apart() {
        let mut seen = Gaps::new(
            ResidencyPolicy::Adaptive { late: 0 },
            Cycles::new(9).unwrap(),
        );
        for _ in 0..100 {
            seen.count(2, 0);
        }
        seen.end_cycle();
        assert_eq!(
            (seen.patience(1), seen.patience(2), seen.patience(3)),
            (7, 0, 7)
        );
    }
}
