//! The work that a mode leaves at a line rate, by the model of F&S (SOSP 2024, section 2.2) and the
//! counts of a replay.

use serde::Serialize;

use crate::machine::{DeviceSide, MachineProfile};
use crate::row::Row;

/// Bytes of a transfer if the profile has no device's side: a page, as in F&S.
const PAGE_BYTES: u32 = 4096;

/// Most page walkers and translation streams that are reported, and most that `--walkers` takes.
const MAX_PARALLEL: u32 = 1024;

/// The needs of a mode at one line rate. Everything here is modelled: the inputs are the counts of
/// one replay and the numbers of a profile. `None`: a number is unknown, or no number suffices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LineRate {
    /// Name of the trace.
    pub trace: String,
    /// Name of the mode.
    pub mode: String,
    /// The line rate in Gb/s.
    pub gbps: f64,
    /// Fewest page walkers with which the ceiling T = p / (l0 + M x lm / k) reaches the line rate,
    /// in units of the machine's walkers. `None` also if l0 alone takes longer than the line.
    pub walkers: Option<u32>,
    /// Fewest translation streams with which n x p / (l0 + M x lm) reaches the line rate. A stream
    /// is all that the machine has: its transfers in flight and its walkers.
    pub streams: Option<u32>,
    /// Invalidation commands per second.
    pub invalidations_per_second: Option<f64>,
    /// Processors that wait for these invalidations, one after the other.
    pub invalidation_cores: Option<f64>,
    /// Memory bandwidth of copies in GB/s: each copied byte is read once and written once.
    pub copy_gigabytes_per_second: Option<f64>,
}

impl LineRate {
    /// Returns the needs of `row` at `gbps`. The row must have a price of invalidations and a
    /// device's side from `profile`.
    pub fn new(row: &Row, profile: &MachineProfile, gbps: f64) -> Self {
        let side = profile.device_side;
        let bytes = side.map_or(PAGE_BYTES, |side| side.transfer_bytes);
        let reads = side.zip(row.reads_per_page);
        let pages_per_second = gbps * 1e9 / (8.0 * f64::from(bytes));
        let invalidations = (row.accesses > 0)
            .then(|| row.invalidations as f64 / row.accesses as f64 * pages_per_second);
        let seconds = profile
            .invalidation_cycles
            .zip(profile.clock_ghz)
            .map(|(cycles, ghz)| cycles as f64 / (ghz * 1e9));
        Self {
            trace: row.trace.clone(),
            mode: row.mode.clone(),
            gbps,
            walkers: reads.and_then(|(side, reads)| {
                fewest(
                    |k| side.ceiling_gbps(reads, k) >= gbps,
                    bound(&side, reads, gbps),
                )
            }),
            streams: reads.and_then(|(side, reads)| {
                let one = side.ceiling_gbps(reads, 1);
                fewest(|n| f64::from(n) * one >= gbps, gbps / one)
            }),
            invalidations_per_second: invalidations,
            invalidation_cores: match invalidations {
                Some(0.0) => Some(0.0),
                each => each.zip(seconds).map(|(each, seconds)| each * seconds),
            },
            copy_gigabytes_per_second: row.copied_per_byte.map(|copied| 2.0 * copied * gbps / 8.0),
        }
    }
}

/// Returns the real number of walkers at which the ceiling is the line rate.
fn bound(side: &DeviceSide, reads: f64, gbps: f64) -> f64 {
    let budget = 8.0 * f64::from(side.transfer_bytes) / gbps - side.transfer_ns;
    if budget > 0.0 {
        reads * side.read_ns / budget
    } else {
        f64::INFINITY
    }
}

/// Returns the smallest number up to [`MAX_PARALLEL`] that suffices, next to the real number
/// `near`. More of them never suffice less.
fn fewest(suffices: impl Fn(u32) -> bool, near: f64) -> Option<u32> {
    if !near.is_finite() {
        return suffices(1).then_some(1);
    }
    // Rounding moves the answer by one at most. `as` saturates.
    let first = (near.floor() as u32).saturating_sub(1).max(1);
    let mut candidates = first..=first.saturating_add(3).min(MAX_PARALLEL);
    candidates.find(|number| suffices(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fands() -> MachineProfile {
        let all = MachineProfile::builtin();
        let profile = all.into_iter().find(|p| p.name == "cascade-lake-2024");
        profile.unwrap()
    }

    fn row(reads: f64) -> Row {
        Row {
            trace: "t".into(),
            mode: "m".into(),
            accesses: 1000,
            invalidations: 1000,
            reads_per_page: Some(reads),
            copied_per_byte: Some(0.0),
            ..Row::default()
        }
    }

    /// Published and derived points: F&S section 2.2 has l0 = 65 ns and lm = 197 ns, so a line
    /// allows at most 1.33, 0.50 and 0.086 reads for each page at 100, 200 and 400 Gb/s, and l0
    /// ends at 504 Gb/s.
    #[test]
    fn walkers_follow_the_published_model() {
        for (gbps, reads, walkers, streams) in [
            (100.0, 1.33, Some(1), Some(1)),
            (100.0, 1.34, Some(2), Some(2)),
            (200.0, 0.50, Some(1), Some(1)),
            (200.0, 0.51, Some(2), Some(2)),
            (200.0, 1.00, Some(2), Some(2)),
            (400.0, 0.085, Some(1), Some(1)),
            (400.0, 0.087, Some(2), Some(2)),
            // 197 / (81.92 - 65) = 11.6.
            (400.0, 1.00, Some(12), Some(4)),
            (400.0, 0.0, Some(1), Some(1)),
            // 800 Gb/s is 40.96 ns for a page: l0 alone takes longer.
            (800.0, 0.0, None, Some(2)),
            (800.0, 1.0, None, Some(7)),
        ] {
            let found = LineRate::new(&row(reads), &fands(), gbps);
            assert_eq!(
                (found.walkers, found.streams),
                (walkers, streams),
                "{gbps} {reads}"
            );
        }
    }

    #[test]
    fn the_number_is_the_first_that_suffices() {
        let side = fands().device_side.unwrap();
        for step in 0..400 {
            let reads = f64::from(step) * 0.05;
            for gbps in [
                1.0, 100.0, 200.0, 399.0, 400.0, 504.0, 505.0, 800.0, 20_000.0,
            ] {
                let found = LineRate::new(&row(reads), &fands(), gbps);
                let walkers = (1..=MAX_PARALLEL).find(|k| side.ceiling_gbps(reads, *k) >= gbps);
                let one = side.ceiling_gbps(reads, 1);
                let streams = (1..=MAX_PARALLEL).find(|n| f64::from(*n) * one >= gbps);
                assert_eq!(
                    (found.walkers, found.streams),
                    (walkers, streams),
                    "{gbps} {reads}"
                );
            }
        }
    }

    #[test]
    fn cores_and_bandwidth_follow_the_counts() {
        // 4 KiB at 400 Gb/s are 12.2 million pages per second. 0.7 us each are 8.5 cores.
        let known = MachineProfile {
            invalidation_cycles: Some(2310),
            ..fands()
        };
        let found = LineRate::new(&row(1.0), &known, 400.0);
        let each = found.invalidations_per_second.unwrap();
        assert!((each - 12_207_031.25).abs() < 1.0, "{each}");
        let cores = found.invalidation_cores.unwrap();
        assert!((cores - 8.545).abs() < 0.001, "{cores}");
        // One for 64 pages.
        let fewer = Row {
            accesses: 64_000,
            ..row(1.0)
        };
        let cores = LineRate::new(&fewer, &known, 400.0)
            .invalidation_cores
            .unwrap();
        assert!((cores - 8.545 / 64.0).abs() < 0.001, "{cores}");
        // The profile does not state the cost: unknown, except for none at all.
        assert_eq!(
            LineRate::new(&row(1.0), &fands(), 400.0).invalidation_cores,
            None
        );
        let never = Row {
            invalidations: 0,
            ..row(1.0)
        };
        assert_eq!(
            LineRate::new(&never, &fands(), 400.0).invalidation_cores,
            Some(0.0)
        );
        // Every byte copied once: one read and one write of 50 GB/s.
        let copied = Row {
            copied_per_byte: Some(1.0),
            ..row(0.0)
        };
        let found = LineRate::new(&copied, &fands(), 400.0);
        assert_eq!(found.copy_gigabytes_per_second, Some(100.0));
    }

    #[test]
    fn without_counts_or_a_device_side_numbers_are_unknown() {
        let found = LineRate::new(&row(1.0), &MachineProfile::r210_2015(), 100.0);
        assert_eq!((found.walkers, found.streams), (None, None));
        // 3.05 million pages per second and 2150 cycles at 3.1 GHz.
        let cores = found.invalidation_cores.unwrap();
        assert!((cores - 2.117).abs() < 0.001, "{cores}");
        let found = LineRate::new(&Row::default(), &fands(), 100.0);
        assert_eq!(
            (
                found.walkers,
                found.invalidations_per_second,
                found.invalidation_cores
            ),
            (None, None, None)
        );
        assert_eq!(found.copy_gigabytes_per_second, None);
    }
}
