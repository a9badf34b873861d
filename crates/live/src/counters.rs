//! Counters of running guests and their output as Prometheus text.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A counter that saturates at its maximum.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `amount`; the sum saturates at `u64::MAX`.
    pub fn add(&self, amount: u64) {
        let before = self.0.fetch_add(amount, Ordering::Relaxed);
        if before.checked_add(amount).is_none() {
            // Overflow requires that another process reported a number near the maximum.
            self.0.store(u64::MAX, Ordering::Relaxed);
        }
    }

    /// Adds a number that another process reported. The number is arbitrary, so the sum saturates.
    fn add_reported(&self, amount: u64) {
        let add = |value: u64| Some(value.saturating_add(amount));
        let _ = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// Returns the value and resets it to zero.
    fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }

    /// Returns the value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Bound of the first bucket as a power of two of nanoseconds (1.024 us).
const SHORTEST: u32 = 10;
/// Number of buckets with a bound; the last bound is 2.1 s.
const BUCKETS: usize = 22;

/// A histogram of durations, with a bucket for each power of two.
#[derive(Debug, Default)]
pub struct Histogram {
    /// Number of durations in each bucket. A bucket includes its bound; the last bucket has none.
    counts: [Counter; BUCKETS + 1],
    nanoseconds: Counter,
}

impl Histogram {
    /// Records one duration.
    pub fn record(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // Subtract 1 so that a bucket includes its bound.
        let bits = u64::BITS - nanoseconds.saturating_sub(1).leading_zeros();
        let at = (bits.saturating_sub(SHORTEST) as usize).min(BUCKETS);
        if let Some(count) = self.counts.get(at) {
            count.add(1);
        }
        self.nanoseconds.add(nanoseconds);
    }

    /// Returns the number of recorded durations.
    pub fn count(&self) -> u64 {
        self.counts
            .iter()
            .map(Counter::get)
            .fold(0, u64::saturating_add)
    }

    /// Writes the Prometheus format: cumulative buckets, the sum in seconds, the count.
    fn write(&self, text: &mut String, name: &str, device: &str) {
        let mut total: u64 = 0;
        let mut bound: u64 = 1 << SHORTEST;
        let (last, bounded) = self.counts.split_last().unwrap_or((&NONE, &[]));
        for count in bounded {
            total = total.saturating_add(count.get());
            let seconds = bound as f64 / 1e9;
            let _ = writeln!(
                text,
                "{name}_bucket{{device=\"{device}\",le=\"{seconds}\"}} {total}"
            );
            bound <<= 1;
        }
        // Use the sum of the buckets read above: other threads may have added values since.
        total = total.saturating_add(last.get());
        let _ = writeln!(
            text,
            "{name}_bucket{{device=\"{device}\",le=\"+Inf\"}} {total}"
        );
        let seconds = self.nanoseconds.get() as f64 / 1e9;
        let _ = writeln!(text, "{name}_sum{{device=\"{device}\"}} {seconds}");
        let _ = writeln!(text, "{name}_count{{device=\"{device}\"}} {total}");
    }
}

static NONE: Counter = Counter(AtomicU64::new(0));

macro_rules! counters {
    ($(#[$outer:meta])* $name:ident { $($(#[doc = $text:literal])+ $field:ident),+ $(,)? }) => {
        $(#[$outer])*
        #[derive(Debug, Default)]
        pub struct $name {
            $($(#[doc = $text])+ pub $field: Counter,)+
            /// Time that requests took, from the read of the available ring to the write of the
            /// used ring.
            pub service: Histogram,
        }

        impl $name {
            /// Returns all values in a fixed order and resets them to zero. For a process that
            /// counts on behalf of another.
            pub(crate) fn take(&self) -> Vec<u64> {
                self.numbers().map(Counter::take).collect()
            }

            /// Adds the values of another process's [`take`](Self::take). Ignores surplus values.
            pub(crate) fn add_all(&self, numbers: &[u64]) {
                let pairs = self.numbers().zip(numbers);
                pairs.for_each(|(counter, number)| counter.add_reported(*number));
            }

            fn numbers(&self) -> impl Iterator<Item = &Counter> {
                let counters = [$(&self.$field,)+];
                let Histogram { counts, nanoseconds } = &self.service;
                counters.into_iter().chain(counts).chain([nanoseconds])
            }

            /// Returns the name, help text and value of each counter.
            fn each(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($field), concat!($($text),+), self.$field.get()),)+]
            }
        }
    };
}

counters! {
    /// Counters of one device.
    DeviceCounters {
        /// Messages received from the client.
        messages,
        /// Messages from the client that were refused.
        refused,
        /// Doorbells that the driver rang.
        doorbells,
        /// Requests of the driver that were completed.
        requests,
        /// Requests that ended with an error.
        failed,
        /// Requests that could not be answered: malformed, or with unusable buffers.
        malformed,
        /// Mappings that the driver requested.
        maps,
        /// Unmaps that the driver requested.
        unmaps,
        /// Guest pages locked in the host's memory when they were mapped.
        locked,
        /// Locked guest pages that were unlocked when they were unmapped.
        unlocked,
        /// Accesses that the IOMMU blocked.
        faults,
        /// Blocked accesses to ranges that had been unmapped shortly before.
        stale,
        /// Injected test accesses that the IOMMU permitted.
        injected_permitted,
        /// Reads that a cached entry of the ring IOMMU permitted after the driver had cleared its
        /// slot.
        reads_after_clear,
        /// Writes that a cached entry of the ring IOMMU permitted after the driver had cleared its
        /// slot.
        writes_after_clear,
        /// Injected reads of a request's data after its completion that the IOMMU permitted.
        kept_reads,
        /// Injected reads after a completion that returned other bytes than the request's.
        kept_reads_changed,
        /// Flush requests from the guest.
        flushes,
        /// Bytes of data transferred to the guest.
        bytes_read,
        /// Bytes of data transferred from the guest.
        bytes_written,
        /// Interrupts sent to the guest.
        interrupts,
        /// Frames from the guest that the link accepted.
        frames_sent,
        /// Frames delivered to the guest.
        frames_received,
        /// Frames that were dropped: wrong length, no peer, or a buffer that was too small.
        frames_dropped,
        /// IOTLB misses sent to a vhost-user front-end.
        iotlb_misses,
        /// Translations received from the front-end.
        iotlb_updates,
        /// Ranges of translations that the front-end invalidated.
        iotlb_invalidations,
        /// Queues that broke and need a reset.
        broken_queues,
        /// Batches of mapping calls sent to the device's sandbox process.
        rounds,
        /// Mapping calls that the sandbox process was allowed to make.
        calls,
        /// Pages of accesses that the hardware IOMMU model found in its IOTLB.
        unit_hits,
        /// Pages of accesses for which the hardware IOMMU model walked the tables.
        unit_walks,
        /// Table words that these walks read.
        unit_reads,
        /// Invalidations that the hardware IOMMU model received.
        unit_invalidations,
        /// Second-stage walks to find or allocate the frame of a page.
        second_stage_walks,
        /// Pages whose entry was found through the pointer to the last table.
        last_table_hits,
        /// Frames allocated to pages that had none.
        frames,
        /// Frames that the host allocated while the guest waited.
        frames_awaited,
        /// Refills of the pool of frames.
        pool_refills,
    }
}

/// Metric name of the service time histogram.
const SERVICE: &str = "ringfence_service_seconds";

/// Formats the counters of `devices`, each with its name, as Prometheus text.
pub fn prometheus(devices: &[(&str, &DeviceCounters)]) -> String {
    let mut text = String::new();
    let all: Vec<_> = devices
        .iter()
        .map(|(device, counters)| (device, counters.each()))
        .collect();
    let Some((_, first)) = all.first() else {
        return text;
    };
    for (at, (name, help, _)) in first.iter().enumerate() {
        let _ = writeln!(text, "# HELP ringfence_{name}_total {}", help.trim());
        let _ = writeln!(text, "# TYPE ringfence_{name}_total counter");
        for (device, values) in &all {
            if let Some((_, _, value)) = values.get(at) {
                let _ = writeln!(
                    text,
                    "ringfence_{name}_total{{device=\"{device}\"}} {value}"
                );
            }
        }
    }
    let _ = writeln!(
        text,
        "# HELP {SERVICE} How long requests took, from being taken off the ring to being given \
        back."
    );
    let _ = writeln!(text, "# TYPE {SERVICE} histogram");
    for (device, counters) in devices {
        counters.service.write(&mut text, SERVICE, device);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_fall_into_the_bucket_that_ends_with_them() {
        let counters = DeviceCounters::default();
        for nanoseconds in [
            0,
            1,
            1024,
            1025,
            2048,
            2049,
            1 << 31,
            (1 << 31) + 1,
            u64::MAX,
        ] {
            counters.service.record(Duration::from_nanos(nanoseconds));
        }
        let text = prometheus(&[("blk", &counters)]);
        for line in [
            "# TYPE ringfence_service_seconds histogram",
            "ringfence_service_seconds_bucket{device=\"blk\",le=\"0.000001024\"} 3",
            "ringfence_service_seconds_bucket{device=\"blk\",le=\"0.000002048\"} 5",
            "ringfence_service_seconds_bucket{device=\"blk\",le=\"0.000004096\"} 6",
            "ringfence_service_seconds_bucket{device=\"blk\",le=\"2.147483648\"} 7",
            "ringfence_service_seconds_bucket{device=\"blk\",le=\"+Inf\"} 9",
            "ringfence_service_seconds_count{device=\"blk\"} 9",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}\n{text}");
        }
    }

    /// Another process may report any number, any number of times.
    #[test]
    fn counters_of_a_process_end_at_the_maximum() {
        let counters = DeviceCounters::default();
        let numbers = vec![u64::MAX; counters.numbers().count()];
        counters.add_all(&numbers);
        counters.add_all(&numbers);
        assert!(counters.numbers().all(|counter| counter.get() == u64::MAX));
        assert_eq!(counters.service.count(), u64::MAX);
        let text = prometheus(&[("blk", &counters)]);
        let last = format!(
            "ringfence_service_seconds_count{{device=\"blk\"}} {}",
            u64::MAX
        );
        assert!(text.lines().any(|line| line == last), "{text}");
    }

    /// This process continues to count after another has reported the maximum.
    #[test]
    fn a_counter_stays_at_its_maximum() {
        let counters = DeviceCounters::default();
        counters.add_all(&vec![u64::MAX; counters.numbers().count()]);
        counters.numbers().for_each(|counter| counter.add(2));
        counters.service.record(Duration::from_micros(3));
        assert!(counters.numbers().all(|counter| counter.get() == u64::MAX));
    }

    #[test]
    fn bounds_are_numbers_and_grow() {
        let counters = DeviceCounters::default();
        let text = prometheus(&[("blk", &counters)]);
        let bounds: Vec<f64> = text
            .lines()
            .filter_map(|line| line.split_once("le=\"")?.1.split_once('"'))
            .map(|(bound, _)| bound.parse().expect("a number"))
            .collect();
        assert_eq!(bounds.len(), BUCKETS + 1);
        assert!(bounds.is_sorted_by(|a, b| a < b));
    }
}
