//! The times for which a layer withholds buffers after their unmap.

use ringfence_types::Direction;

/// Delays up to this are exact, and the buckets of longer ones are at most 1/64 wide.
const EXACT: u64 = 64;
/// Binary digits of [`EXACT`].
const DIGITS: u32 = EXACT.trailing_zeros();

/// A distribution of delays in nanoseconds, in at most 3776 buckets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Delays {
    /// Number of delays in each bucket; trailing empty ones are absent.
    buckets: Vec<u64>,
    count: u64,
    max_ns: u64,
    total_ns: u128,
}

impl Delays {
    /// Adds a delay.
    pub fn record(&mut self, ns: u64) {
        let bucket = bucket(ns);
        if self.buckets.len() <= bucket {
            self.buckets.resize(bucket + 1, 0);
        }
        self.buckets[bucket] += 1;
        self.count += 1;
        self.max_ns = self.max_ns.max(ns);
        self.total_ns += u128::from(ns);
    }

    /// Adds all delays of `other`.
    pub fn add(&mut self, other: &Self) {
        if self.buckets.len() < other.buckets.len() {
            self.buckets.resize(other.buckets.len(), 0);
        }
        for (own, more) in self.buckets.iter_mut().zip(&other.buckets) {
            *own += more;
        }
        self.count += other.count;
        self.max_ns = self.max_ns.max(other.max_ns);
        self.total_ns += other.total_ns;
    }

    /// Returns the mean delay; `None` without a delay.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.total_ns as f64 / self.count as f64)
    }

    /// Returns the delay that `percent` of a hundred delays do not exceed, rounded up by at most
    /// 1/64 of it. `None` without a delay.
    pub fn percentile(&self, percent: u64) -> Option<u64> {
        let rank = (u128::from(self.count) * u128::from(percent))
            .div_ceil(100)
            .max(1);
        let mut below = 0;
        let index = self.buckets.iter().position(|in_bucket| {
            below += u128::from(*in_bucket);
            below >= rank
        })?;
        Some(last_of(index).min(self.max_ns))
    }
}

/// Returns the bucket of a delay: one for each value below [`EXACT`], then [`EXACT`] for each power
/// of two.
fn bucket(ns: u64) -> usize {
    if ns < EXACT {
        return ns as usize;
    }
    let power = ns.ilog2() - DIGITS;
    let within = (ns >> power) - EXACT;
    (EXACT * (u64::from(power) + 1) + within) as usize
}

/// Returns the longest delay of a bucket.
fn last_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < EXACT {
        return bucket;
    }
    let (power, within) = (bucket / EXACT - 1, bucket % EXACT);
    let first = (EXACT + within) << power;
    first + ((1 << power) - 1)
}

/// The delays of the buffers that a layer returned, by what the device does with them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReleaseDelays {
    /// Buffers that the device may write: a driver waits for their contents.
    pub receive: Delays,
    /// Buffers that the device may only read.
    pub transmit: Delays,
}

impl ReleaseDelays {
    /// Adds the delay of a buffer.
    pub fn record(&mut self, direction: Direction, ns: u64) {
        match direction {
            Direction::ToDevice => self.transmit.record(ns),
            Direction::FromDevice | Direction::Bidirectional => self.receive.record(ns),
        }
    }

    /// Returns the delays of all buffers.
    pub fn all(&self) -> Delays {
        let mut all = self.receive.clone();
        all.add(&self.transmit);
        all
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_cover_all_values_without_gaps() {
        assert_eq!(bucket(u64::MAX), 3775);
        assert_eq!(last_of(3775), u64::MAX);
        for index in 0..3775 {
            let last = last_of(index);
            assert_eq!(bucket(last), index, "{last}");
            assert_eq!(bucket(last + 1), index + 1, "{last}");
        }
    }

    #[test]
    fn buffers_that_the_device_writes_are_received() {
        let mut delays = ReleaseDelays::default();
        for (direction, ns) in [
            (Direction::ToDevice, 3),
            (Direction::FromDevice, 5),
            (Direction::Bidirectional, 7),
        ] {
            delays.record(direction, ns);
        }
        let ends = |delays: &Delays| (delays.percentile(1), delays.percentile(100));
        assert_eq!(ends(&delays.transmit), (Some(3), Some(3)));
        assert_eq!(ends(&delays.receive), (Some(5), Some(7)));
        assert_eq!(ends(&delays.all()), (Some(3), Some(7)));
        assert_eq!(delays.all().percentile(50), Some(5));
        assert_eq!(Delays::default().percentile(50), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 300,
            rng_seed: prop::test_runner::RngSeed::Fixed(99),
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn percentiles_agree_with_a_sorted_list(
            values in prop::collection::vec((any::<u64>(), 0..64_u32), 1..300),
            percent in 1..=100_u64,
        ) {
            let mut sorted: Vec<u64> = values.iter().map(|(ns, shift)| ns >> shift).collect();
            let mut delays = Delays::default();
            sorted.iter().for_each(|ns| delays.record(*ns));
            sorted.sort_unstable();
            let rank = (sorted.len() as u64 * percent).div_ceil(100).max(1) as usize;
            let exact = sorted[rank - 1];
            let found = delays.percentile(percent).unwrap();
            prop_assert!(found >= exact && found - exact <= exact / 64, "{found} for {exact}");
            prop_assert_eq!(delays.percentile(100), sorted.last().copied());
            let total: u128 = sorted.iter().copied().map(u128::from).sum();
            let mut twice = delays.clone();
            twice.add(&delays);
            for delays in [delays, twice] {
                prop_assert_eq!(delays.mean(), Some(total as f64 / sorted.len() as f64));
            }
        }
    }
}
