//! The device's side of a machine: the throughput at which address translation ends.
//!
//! F&S (SOSP'24), section 2.2: the maximum throughput of a device is T = p / (l0 + M x lm). A
//! transfer of p bytes takes l0 without translation; translation adds M memory reads of lm each.
//! The paper fits l0 and lm to measurements, so both include the parallelism of that machine.

use serde::{Deserialize, Serialize};

use crate::profile::ProfileError;

/// Constants of the model for one machine and its device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSide {
    /// p: bytes of one transfer.
    pub transfer_bytes: u32,
    /// l0: average nanoseconds of a transfer without translation.
    pub transfer_ns: f64,
    /// lm: average nanoseconds of one memory read by the page walker.
    pub read_ns: f64,
    /// Line rate of the device in Gb/s.
    pub line_rate_gbps: f64,
}

/// Largest plausible number of nanoseconds or Gb/s. A larger value is a typing error.
const MAX: f64 = 1e9;

impl DeviceSide {
    /// Checks every constant for a possible value.
    pub(super) fn validate(&self) -> Result<(), ProfileError> {
        if self.transfer_bytes == 0 {
            return Err(ProfileError::OutOfRange {
                field: "device_side.transfer_bytes",
                value: 0.0,
            });
        }
        for (field, value) in [
            ("device_side.transfer_ns", self.transfer_ns),
            ("device_side.read_ns", self.read_ns),
            ("device_side.line_rate_gbps", self.line_rate_gbps),
        ] {
            if !(value > 0.0 && value <= MAX) {
                return Err(ProfileError::OutOfRange { field, value });
            }
        }
        Ok(())
    }

    /// Returns the ceiling in Gb/s with `reads` memory reads per transfer and `walkers` times the
    /// page walkers of this machine.
    ///
    /// More walkers overlap the reads of different transfers: each waits for `reads` / `walkers`.
    /// They do not shorten l0. The paper has one machine and no such factor; this is our extension.
    pub fn ceiling_gbps(&self, reads: f64, walkers: u32) -> f64 {
        let walking = reads * self.read_ns / f64::from(walkers.max(1));
        // Bits per nanosecond are Gb/s.
        8.0 * f64::from(self.transfer_bytes) / (self.transfer_ns + walking)
    }

    /// Returns the throughput with `reads` memory reads per transfer, as a share of the throughput
    /// without translation. The line rate limits both.
    pub fn relative_throughput(&self, reads: f64) -> f64 {
        let reached = |reads| self.ceiling_gbps(reads, 1).min(self.line_rate_gbps);
        reached(reads) / reached(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FANDS: DeviceSide = DeviceSide {
        transfer_bytes: 4096,
        transfer_ns: 65.0,
        read_ns: 197.0,
        line_rate_gbps: 100.0,
    };

    #[test]
    fn walkers_shorten_the_reads_and_nothing_else() {
        let without = FANDS.ceiling_gbps(0.0, 1);
        assert!((without - 504.1).abs() < 0.1, "{without}");
        for walkers in [1, 2, 64] {
            assert!((FANDS.ceiling_gbps(0.0, walkers) - without).abs() < 1e-9);
        }
        let mut last = FANDS.ceiling_gbps(4.0, 0);
        assert!((last - FANDS.ceiling_gbps(4.0, 1)).abs() < 1e-9);
        for walkers in [2, 4, 8, 1024] {
            let more = FANDS.ceiling_gbps(4.0, walkers);
            assert!(last < more && more < without, "{walkers}: {last} {more}");
            last = more;
        }
        // Two walkers with twice the reads are one walker.
        let one = FANDS.ceiling_gbps(2.0, 1);
        assert!((FANDS.ceiling_gbps(4.0, 2) - one).abs() < 1e-9);
    }

    #[test]
    fn the_line_rate_hides_reads_until_the_ceiling_is_below_it() {
        // 100 Gb/s is 327.68 ns per transfer: (327.68 - 65) / 197 = 1.333 reads.
        assert!((FANDS.relative_throughput(1.33) - 1.0).abs() < 1e-12);
        let less = FANDS.relative_throughput(1.34);
        assert!(less < 1.0 && less > 0.99, "{less}");
        // A line faster than l0 allows does not limit.
        let fast = DeviceSide {
            line_rate_gbps: 800.0,
            ..FANDS
        };
        let share = 65.0 / (65.0 + 197.0);
        assert!((fast.relative_throughput(1.0) - share).abs() < 1e-12);
    }
}
