//! Released bytes that a device still reaches, over the time of a trace.

use ringfence_types::Nanos;

/// Number of bins. A trace of any length has at most as many.
const BINS: usize = 128;

/// Changes within one bin.
#[derive(Debug, Clone, Copy, Default)]
struct Bin {
    /// Bytes of windows that open, less bytes of windows that close.
    bytes: i128,
    /// The same, each multiplied by its time.
    byte_moments: i128,
}

/// Opening and closing of stale windows, in bins whose width doubles when a trace outgrows them.
#[derive(Debug, Clone)]
pub struct Timeline {
    origin: Option<Nanos>,
    width_ns: u64,
    bins: [Bin; BINS],
}

impl Default for Timeline {
    fn default() -> Self {
        Self {
            origin: None,
            width_ns: 1,
            bins: [Bin::default(); BINS],
        }
    }
}

impl Timeline {
    /// Records that a window of `bytes` bytes opens.
    pub fn open(&mut self, bytes: u64, now: Nanos) {
        self.change(i128::from(bytes), now);
    }

    /// Records that a window of `bytes` bytes closes.
    pub fn close(&mut self, bytes: u64, now: Nanos) {
        self.change(-i128::from(bytes), now);
    }

    fn change(&mut self, bytes: i128, now: Nanos) {
        let origin = *self.origin.get_or_insert(now);
        let time = now.since(origin);
        while time / self.width_ns >= BINS as u64 {
            self.double();
        }
        let bin = &mut self.bins[(time / self.width_ns) as usize];
        bin.bytes = bin.bytes.saturating_add(bytes);
        let moment = bytes.saturating_mul(i128::from(time));
        bin.byte_moments = bin.byte_moments.saturating_add(moment);
    }

    fn double(&mut self) {
        let mut wider = [Bin::default(); BINS];
        for (wide, pair) in wider.iter_mut().zip(self.bins.chunks_exact(2)) {
            wide.bytes = pair[0].bytes.saturating_add(pair[1].bytes);
            wide.byte_moments = pair[0].byte_moments.saturating_add(pair[1].byte_moments);
        }
        self.bins = wider;
        self.width_ns = self.width_ns.saturating_mul(2);
    }

    /// Returns the bytes in open windows up to `end`, averaged over each bin.
    pub fn until(&self, end: Nanos) -> StaleBytes {
        let Some(origin) = self.origin else {
            return StaleBytes::default();
        };
        let end = end.since(origin);
        let mut wide = self.clone();
        while end > wide.width_ns.saturating_mul(BINS as u64) {
            wide.double();
        }
        let mut out = StaleBytes {
            bin_ns: wide.width_ns,
            length_ns: end,
            mean_bytes: Vec::new(),
        };
        let mut open = 0i128;
        for (index, bin) in wide.bins.iter().enumerate() {
            let start = wide.width_ns.saturating_mul(index as u64);
            let stop = end.min(wide.width_ns.saturating_add(start));
            let length = i128::from(stop.saturating_sub(start));
            if length == 0 {
                break;
            }
            let changed = bin.bytes.saturating_mul(i128::from(stop));
            let area = open
                .saturating_mul(length)
                .saturating_add(changed.saturating_sub(bin.byte_moments));
            out.mean_bytes.push(area as f64 / length as f64);
            open = open.saturating_add(bin.bytes);
        }
        out
    }
}

/// Released bytes that a device still reached, averaged over equal parts of the time from the
/// first unmap to the end of the trace.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StaleBytes {
    /// Length of a part in nanoseconds; the last part may be shorter.
    pub bin_ns: u64,
    /// Length of the whole time in nanoseconds.
    pub length_ns: u64,
    /// Mean number of bytes in each part; at most 128 parts.
    pub mean_bytes: Vec<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_hold_the_mean_of_what_is_open() {
        let mut timeline = Timeline::default();
        timeline.open(1000, Nanos(500));
        timeline.open(50, Nanos(500 + 64));
        timeline.close(1000, Nanos(500 + 32));
        let bytes = timeline.until(Nanos(500 + 128));
        assert_eq!((bytes.bin_ns, bytes.length_ns), (1, 128));
        assert_eq!(bytes.mean_bytes.len(), 128);
        assert_eq!(bytes.mean_bytes[..32], [1000.0; 32]);
        assert_eq!(bytes.mean_bytes[32..64], [0.0; 32]);
        assert_eq!(bytes.mean_bytes[64..], [50.0; 64]);
    }

    /// The area does not depend on the width of the bins.
    #[test]
    fn a_long_trace_keeps_its_area_in_bounded_bins() {
        let mut timeline = Timeline::default();
        let mut area = 0;
        let mut random = 1u64;
        let mut now = 7;
        for _ in 0..5000 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let (bytes, length) = (random >> 52, random >> 30 & 0xffff);
            timeline.open(bytes, Nanos(now));
            timeline.close(bytes, Nanos(now + length));
            area += bytes * length;
            now += length / 2;
        }
        let bytes = timeline.until(Nanos(now + 0x10000));
        assert!(bytes.mean_bytes.len() <= BINS);
        let end = now + 0x10000 - 7;
        let widths = (0..bytes.mean_bytes.len() as u64)
            .map(|bin| (end - bin * bytes.bin_ns).min(bytes.bin_ns));
        let summed: f64 = widths
            .zip(&bytes.mean_bytes)
            .map(|(width, mean)| width as f64 * mean)
            .sum();
        assert!((summed / area as f64 - 1.0).abs() < 1e-9, "{summed} {area}");
    }

    #[test]
    fn times_and_lengths_of_a_hostile_trace_are_bounded() {
        let mut timeline = Timeline::default();
        timeline.open(u64::MAX, Nanos(0));
        timeline.close(u64::MAX, Nanos(u64::MAX));
        timeline.open(u64::MAX, Nanos(u64::MAX));
        let bytes = timeline.until(Nanos(u64::MAX));
        assert!(bytes.mean_bytes.len() <= BINS);
        assert!(bytes.mean_bytes.iter().all(|mean| mean.is_finite()));
        assert_eq!(Timeline::default().until(Nanos(5)), StaleBytes::default());
    }
}
