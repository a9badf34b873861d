//! What is counted while guests run, and how it reads: Prometheus text.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A number that only grows, up to its maximum.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it.
    pub fn add(&self, amount: u64) {
        let before = self.0.fetch_add(amount, Ordering::Relaxed);
        if before.checked_add(amount).is_none() {
            // Only after another process has said a number near the maximum.
            self.0.store(u64::MAX, Ordering::Relaxed);
        }
    }

    /// Adds what another process counted. A process may say any number, so the counter stays at its
    /// maximum.
    fn add_told(&self, amount: u64) {
        let add = |value: u64| Some(value.saturating_add(amount));
        let _ = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// Its value, and from here on zero.
    fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }

    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Shortest time that is told from shorter ones, as a power of two in nanoseconds (1 us).
const SHORTEST: u32 = 10;
/// Buckets with a bound; the last one ends at 2 s.
const BUCKETS: usize = 22;

/// Times, by powers of two.
#[derive(Debug, Default)]
pub struct Histogram {
    /// How many took at most `bound(index)`, and more than the one before; the last: how many took
    /// longer.
    counts: [Counter; BUCKETS + 1],
    nanoseconds: Counter,
}

impl Histogram {
    /// Adds one that took `time`.
    pub fn record(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // A bucket holds its bound.
        let bits = u64::BITS - nanoseconds.saturating_sub(1).leading_zeros();
        let at = (bits.saturating_sub(SHORTEST) as usize).min(BUCKETS);
        if let Some(count) = self.counts.get(at) {
            count.add(1);
        }
        self.nanoseconds.add(nanoseconds);
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.counts
            .iter()
            .map(Counter::get)
            .fold(0, u64::saturating_add)
    }

    /// In the format of Prometheus: how many took at most each bound, the sum in seconds, how many
    /// there are.
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
        // As read here: the sum of what is above, whatever is added meanwhile.
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
            /// How long requests took, from being taken off the ring to being given back.
            pub service: Histogram,
        }

        impl $name {
            /// All numbers, in an order of their own, and from here on they are zero. For a process
            /// that counts for another one.
            pub(crate) fn take(&self) -> Vec<u64> {
                self.numbers().map(Counter::take).collect()
            }

            /// Adds what [`take`](Self::take) gave. What there is too much is left out.
            pub(crate) fn add_all(&self, numbers: &[u64]) {
                self.numbers().zip(numbers).for_each(|(counter, number)| counter.add_told(*number));
            }

            fn numbers(&self) -> impl Iterator<Item = &Counter> {
                let counters = [$(&self.$field,)+];
                let Histogram { counts, nanoseconds } = &self.service;
                counters.into_iter().chain(counts).chain([nanoseconds])
            }

            /// Name, meaning and value of each.
            fn each(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($field), concat!($($text),+), self.$field.get()),)+]
            }
        }
    };
}

counters! {
    /// Of one device.
    DeviceCounters {
        /// Messages of the client.
        messages,
        /// Messages that were refused.
        refused,
        /// Doorbells.
        doorbells,
        /// Requests of the driver.
        requests,
        /// Requests that ended with an error.
        failed,
        /// Requests that could not even be answered.
        malformed,
        /// Mappings asked for.
        maps,
        /// Unmappings asked for.
        unmaps,
        /// Pages of the guest that were locked into the host's memory when they were mapped.
        locked,
        /// Of these, pages that were let go when they were unmapped.
        unlocked,
        /// Accesses that the IOMMU stopped.
        faults,
        /// Of these, accesses to what had been unmapped shortly before.
        stale,
        /// Accesses to try the IOMMU that it let through.
        strays_through,
        /// Flushes.
        flushes,
        /// Bytes of data towards the guest.
        bytes_read,
        /// Bytes of data from the guest.
        bytes_written,
        /// Interrupts.
        interrupts,
        /// Frames from the guest that the peer was given.
        frames_sent,
        /// Frames for the guest that it was given.
        frames_received,
        /// Frames that were dropped: of a wrong length, for nobody, or for a buffer that could not
        /// hold them.
        frames_dropped,
        /// Misses asked of a vhost-user front-end.
        iotlb_misses,
        /// Translations that it told.
        iotlb_updates,
        /// Translations that it took back, in ranges.
        iotlb_invalidations,
        /// Queues that could not be used any further.
        broken_queues,
        /// Times that the device's own process was told to map and unmap.
        rounds,
        /// Calls to map and unmap that it was let make.
        calls,
        /// Pages of accesses that the hardware's model found in its IOTLB.
        unit_hits,
        /// Pages of accesses that it walked the tables for.
        unit_walks,
        /// Words of tables that it read for that.
        unit_reads,
        /// Invalidations that it was sent.
        unit_invalidations,
        /// Walks of the second stage, to find a page's frame or to give it one.
        second_stage_walks,
        /// Pages whose entry was found through the pointer to the last table.
        last_table_hits,
        /// Frames given to pages that had none.
        frames,
        /// Of these, frames that the host was asked for while the guest waited.
        frames_awaited,
        /// Times that the pool of frames was filled up.
        pool_refills,
    }
}

/// Name of the times that requests took.
const SERVICE: &str = "ringfence_service_seconds";

/// The counters of `devices`, each by its name, in the text format of Prometheus.
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
        "# HELP {SERVICE} How long requests took, from being taken off the ring to being given back."
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

    /// A process that counts for this one may say any number, any number of times.
    #[test]
    fn what_a_process_says_ends_at_the_maximum() {
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

    /// This process counts on after another one has said the maximum.
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
