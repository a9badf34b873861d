//! CPU utilisation of request-response: the cycles of a transaction over its round trip.
//!
//! A transaction is a request and its reply. It costs the cycles that it takes without protection,
//! and those of the maps and unmaps of both frames, whether or not the reply waits for them. The
//! papers print utilisations and round trips, and no cycles of a transaction. So the cycles without
//! protection are fitted to one printed utilisation (decision 0013).

use super::finding::{Measured, Published};
use super::published::{CLOCK_GHZ, Nic, Sheet};
use ringfence_lab::LabError;

/// Mode whose printed utilisation the cycles without protection are fitted to.
pub(super) const FITTED_MODE: &str = "strict+";

/// Quantity of the rows of the cycles without protection.
pub(super) const TRANSACTION: &str = "cycles per transaction without protection";

/// Frames of a transaction: the request and its reply.
const FRAMES: f64 = 2.0;

/// A transaction in one mode.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Transaction {
    /// Cycles that the maps and unmaps of both frames take.
    added: Measured,
    /// Microseconds from one request to the next.
    round_trip: Measured,
}

impl Transaction {
    /// A transaction whose mode adds `per_frame` cycles to each frame. It takes `round_trip`
    /// microseconds.
    pub(super) fn new(per_frame: Measured, round_trip: Measured) -> Self {
        Self {
            added: per_frame.scaled(FRAMES),
            round_trip,
        }
    }
}

/// Returns the cycles of `microseconds` at the papers' clock.
fn cycles(microseconds: f64) -> f64 {
    microseconds * CLOCK_GHZ * 1e3
}

/// Cost model of the transactions on one adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct TransactionModel {
    /// Cycles of a transaction without protection; NaN if no positive number fits.
    c_none: f64,
}

impl TransactionModel {
    /// The model in which `transaction` uses `percent` % of the CPU.
    pub(super) fn fitted(percent: f64, transaction: &Transaction) -> Self {
        let all = percent / 100.0 * cycles(transaction.round_trip.median);
        let c_none = all - transaction.added.median;
        Self {
            c_none: if c_none > 0.0 { c_none } else { f64::NAN },
        }
    }

    /// Cycles of a transaction without protection.
    pub(super) fn c_none(&self) -> f64 {
        self.c_none
    }

    /// CPU utilisation in per cent of a transaction of `microseconds` to which a mode adds `added`
    /// cycles.
    fn utilisation(&self, added: f64, microseconds: f64) -> f64 {
        100.0 * (self.c_none + added) / cycles(microseconds)
    }

    /// CPU utilisation of `transaction` in per cent, at `ends` half spreads from the medians: 1 for
    /// the end with the most utilisation, -1 for that with the least.
    pub(super) fn percent_at(&self, transaction: &Transaction, ends: f64) -> f64 {
        let Transaction { added, round_trip } = transaction;
        self.utilisation(
            added.median + ends * added.spread / 2.0,
            round_trip.median - ends * round_trip.spread / 2.0,
        )
    }

    /// CPU utilisation of `transaction` in per cent. The spread is the distance between its ends.
    pub(super) fn percent(&self, transaction: &Transaction) -> Measured {
        let at = |ends| self.percent_at(transaction, ends);
        let Transaction { added, round_trip } = transaction;
        let median = self.utilisation(added.median, round_trip.median);
        Measured::counted(median).with_spread((at(1.0) - at(-1.0)).abs())
    }
}

/// Returns the printed utilisation that the cycles of `nic` are fitted to: EIOVAR Table 2, strict+.
///
/// # Errors
/// No such cell exists: a defect of Ringfence.
pub(super) fn fitted_cell(nic: Nic) -> Result<Published, LabError> {
    let wanted = [
        ("nic", nic.name()),
        ("metric", "cpu_pct"),
        ("protection", "strict"),
        ("benchmark", "rr"),
    ];
    Sheet::named("eiovar_table2")?.printed(&wanted, "eiovar")
}

/// Returns the value of `mode` in a list by mode.
///
/// # Errors
/// The list lacks the mode: a defect of Ringfence.
pub(super) fn of_mode<T: Copy>(list: &[(&str, T)], mode: &str) -> Result<T, LabError> {
    let found = list.iter().find(|(name, _)| *name == mode);
    found.map_or(
        Err(LabError::Internal("no such mode of request-response")),
        |(_, value)| Ok(*value),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(cycles: f64, spread: f64) -> Measured {
        Measured::cost(cycles, 0.0, 0.0).with_spread(spread)
    }

    /// 30 % of 10 us at 3.1 GHz are 9300 cycles, of which 2000 are of two frames.
    #[test]
    fn utilisation_is_cycles_of_both_frames_over_the_round_trip() {
        let fitted = Transaction::new(cost(1000.0, 0.0), cost(10.0, 0.0));
        let model = TransactionModel::fitted(30.0, &fitted);
        assert!((model.c_none() - 7300.0).abs() < 1e-9, "{model:?}");
        for (per_frame, microseconds, wanted) in [
            (1000.0, 10.0, 30.0),
            (0.0, 10.0, 730.0 / 31.0),
            (500.0, 10.0, 830.0 / 31.0),
            (1000.0, 20.0, 15.0),
        ] {
            let other = Transaction::new(cost(per_frame, 0.0), cost(microseconds, 0.0));
            let found = model.percent(&other);
            assert!(
                (found.median - wanted).abs() < 1e-9,
                "{found:?}, not {wanted}"
            );
            assert_eq!(found.spread, 0.0);
        }
    }

    /// The spread of a measured part of 0 is undefined.
    #[test]
    fn an_undefined_spread_leaves_the_median() {
        let fitted = Transaction::new(cost(1000.0, 0.0), cost(10.0, 0.0));
        let model = TransactionModel::fitted(30.0, &fitted);
        let found = model.percent(&Transaction::new(cost(1000.0, f64::NAN), cost(10.0, 0.0)));
        assert!((found.median - 30.0).abs() < 1e-9, "{found:?}");
        assert!(found.spread.is_nan());
    }

    /// The cycles of two frames vary by 400 around 2000, and the round trip by 2 us around 10.
    #[test]
    fn spread_is_the_distance_between_the_ends() {
        let fitted = Transaction::new(cost(1000.0, 0.0), cost(10.0, 0.0));
        let model = TransactionModel::fitted(30.0, &fitted);
        let found = model.percent(&Transaction::new(cost(1000.0, 200.0), cost(10.0, 2.0)));
        let wanted = 100.0 * (9500.0 / 27_900.0 - 9100.0 / 34_100.0);
        assert!((found.spread - wanted).abs() < 1e-9, "{found:?}");
        assert!((found.median - 30.0).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn no_positive_cost_fits_more_cycles_than_the_cell_has() {
        let slow = Transaction::new(cost(5000.0, 0.0), cost(10.0, 0.0));
        let model = TransactionModel::fitted(30.0, &slow);
        assert!(model.c_none().is_nan());
        assert!(model.percent(&slow).median.is_nan());
    }

    /// EIOVAR Table 2: 32 to 29 % on mlx, 13 to 12 % on brcm, in strict.
    #[test]
    fn cells_are_those_of_strict_with_freelists() {
        for (nic, percent) in [(Nic::Mlx, 29.0), (Nic::Brcm, 12.0)] {
            assert_eq!(fitted_cell(nic).unwrap().value, percent);
        }
        assert!(of_mode(&[("strict", 1)], "strict+").is_err());
    }
}
