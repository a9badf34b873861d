//! Statistics of reuse, and the residency that follows from them.

use super::Cycles;

/// Time and number of released mappings that a cache keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Retention {
    /// Time for which a released mapping stays.
    pub residency: ResidencyPolicy,
    /// Maximum number of released mappings. The cache removes further mappings with their last
    /// user. With 0 it keeps only mappings in use, so that buffers of the same pages share one.
    pub released_max: usize,
}

impl Retention {
    /// Keeps no released mapping.
    pub const NONE: Self = Self {
        residency: ResidencyPolicy::Fixed,
        released_max: 0,
    };
}

impl From<ResidencyPolicy> for Retention {
    /// Keeps any number of released mappings.
    fn from(residency: ResidencyPolicy) -> Self {
        Self {
            residency,
            released_max: usize::MAX,
        }
    }
}

/// Residency of released mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResidencyPolicy {
    /// Always C cycles, as in the PVIOMMU paper.
    Fixed,
    /// Until the cache is full, or until its owner drains it. Cycles only order the mappings by
    /// age, for the eviction of the oldest.
    UntilFull,
    /// Adapts to the observed reuse, up to C cycles.
    ///
    /// The cache counts the cycles between release and reuse. After an early eviction it keeps the
    /// key until C cycles are over, so that it counts late reuses as well. A released mapping
    /// stays for 2^n - 1 whole cycles. The cache chooses the lowest n for which at most `late` in a
    /// thousand of the counted reuses took longer.
    ///
    /// The cache counts the three directions separately, because receive rings and transmit buffers
    /// have different intervals. A mapping stays for 7 cycles until the cache knows 32 reuses of
    /// its direction. Old counts decay, so that the cache follows a changed workload.
    Adaptive {
        /// Maximum number of late reuses in a thousand.
        late: u16,
    },
}

/// Buckets by the number of binary digits of the gap: 0, 1, 2-3, 4-7, ... 128-255 cycles.
const BUCKETS: usize = 9;

/// Minimum number of reuses of one direction before its counts are used.
const MIN_REUSES: u32 = 32;

/// Residency before that number of reuses, in whole cycles. The counts reveal a residency that is
/// too short, because they include late reuses. They do not reveal one that is too long.
const INITIAL_CYCLES: u8 = 7;

/// Number of reuses of one direction at which its counts are halved.
const HALVING_COUNT: u32 = 1 << 14;

/// Gaps between release and reuse in cycles, by direction.
#[derive(Debug, Clone)]
pub(super) struct ReuseGaps {
    residency: ResidencyPolicy,
    max_cycles: Cycles,
    /// Counts of reuses, by direction and bucket.
    counts: [[u32; BUCKETS]; 4],
    /// Residency of released mappings in whole cycles, by direction.
    keep_cycles: [u8; 4],
}

impl ReuseGaps {
    pub(super) fn new(residency: ResidencyPolicy, max_cycles: Cycles) -> Self {
        let keep_cycles = match residency {
            ResidencyPolicy::Fixed | ResidencyPolicy::UntilFull => max_cycles.get(),
            ResidencyPolicy::Adaptive { .. } => max_cycles.get().min(INITIAL_CYCLES),
        };
        Self {
            residency,
            max_cycles,
            counts: [[0; BUCKETS]; 4],
            keep_cycles: [keep_cycles; 4],
        }
    }

    /// Returns true if the policy needs the counts.
    #[inline]
    pub(super) fn is_adaptive(&self) -> bool {
        matches!(self.residency, ResidencyPolicy::Adaptive { .. })
    }

    /// Counts the reuse of a mapping `age` cycles after its release. The low two bits of the key's
    /// `word` are the direction.
    #[inline]
    pub(super) fn count(&mut self, word: u64, age: u8) {
        let bucket = (u8::BITS - age.leading_zeros()) as usize;
        let counts = self.counts.get_mut((word & 3) as usize);
        if let Some(count) = counts.and_then(|counts| counts.get_mut(bucket)) {
            *count = count.saturating_add(1);
        }
    }

    /// Returns the residency of a released mapping in whole cycles. The low two bits of the key's
    /// `word` are the direction.
    #[inline]
    pub(super) fn keep_cycles(&self, word: u64) -> u8 {
        let direction = (word & 3) as usize;
        self.keep_cycles
            .get(direction)
            .copied()
            .unwrap_or(self.max_cycles.get())
    }

    /// Returns the lowest [`keep_cycles`](Self::keep_cycles) of all directions.
    pub(super) fn min_keep_cycles(&self) -> u8 {
        self.keep_cycles.iter().copied().min().unwrap_or(0)
    }

    /// Ends a cycle: computes the residencies from the counts.
    pub(super) fn end_cycle(&mut self) {
        let ResidencyPolicy::Adaptive { late } = self.residency else {
            return;
        };
        for (counts, keep_cycles) in self.counts.iter_mut().zip(&mut self.keep_cycles) {
            let total: u32 = counts
                .iter()
                .fold(0, |sum, count| sum.saturating_add(*count));
            if total < MIN_REUSES {
                continue;
            }
            let allowed = u64::from(total) * u64::from(late) / 1000;
            // Shorten the residency as long as the share of late reuses stays within the allowance.
            let (mut digits, mut late_reuses) = (BUCKETS as u32 - 1, 0_u64);
            while let Some(count) = counts.get(digits as usize) {
                late_reuses = late_reuses.saturating_add(u64::from(*count));
                if late_reuses > allowed || digits == 0 {
                    break;
                }
                digits -= 1;
            }
            // Longest gap of `digits` binary digits.
            let gap = u8::try_from((1_u32 << digits) - 1).unwrap_or(u8::MAX);
            *keep_cycles = gap.min(self.max_cycles.get());
            if total > HALVING_COUNT {
                for count in counts {
                    *count /= 2;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep_cycles_after(reuses: &[(u8, u32)], late: u16) -> u8 {
        let mut gaps = ReuseGaps::new(
            ResidencyPolicy::Adaptive { late },
            Cycles::new(200).unwrap(),
        );
        for &(gap, times) in reuses {
            for _ in 0..times {
                gaps.count(1, gap);
            }
        }
        gaps.end_cycle();
        gaps.keep_cycles(1)
    }

    #[test]
    fn residency_covers_all_but_the_late_reuses() {
        assert_eq!(keep_cycles_after(&[(0, 31)], 10), 7, "too few reuses");
        assert_eq!(keep_cycles_after(&[(0, 1000)], 10), 0);
        assert_eq!(keep_cycles_after(&[(0, 990), (7, 10)], 10), 0);
        assert_eq!(keep_cycles_after(&[(0, 989), (7, 11)], 10), 7);
        assert_eq!(keep_cycles_after(&[(0, 989), (4, 11)], 10), 7);
        assert_eq!(
            keep_cycles_after(&[(0, 50), (255, 50)], 10),
            200,
            "never above C"
        );
        assert_eq!(keep_cycles_after(&[(0, 999), (255, 1)], 0), 200);
    }

    #[test]
    fn directions_have_separate_counts() {
        let mut gaps = ReuseGaps::new(
            ResidencyPolicy::Adaptive { late: 0 },
            Cycles::new(9).unwrap(),
        );
        for _ in 0..100 {
            gaps.count(2, 0);
        }
        gaps.end_cycle();
        assert_eq!(
            (
                gaps.keep_cycles(1),
                gaps.keep_cycles(2),
                gaps.keep_cycles(3)
            ),
            (7, 0, 7)
        );
    }
}
