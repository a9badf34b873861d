//! CPU utilisation of the benchmarks of X14.

use super::super::finding::{FindingRow, Measured};
use super::super::published::Nic;
use super::super::transactions::{
    FITTED_MODE, TRANSACTION, Transaction, TransactionModel, fitted_cell, of_mode,
};
use super::super::x03_benchmarks::Frame;
use super::Column;
use ringfence_lab::LabError;

/// Model of the CPU utilisation of a benchmark on an adapter.
pub(super) enum CpuModel {
    /// The cycles of a frame over those of the wire.
    Frames(Frame),
    /// The cycles of a transaction over its round trip, for request-response.
    Transactions {
        model: TransactionModel,
        /// Microseconds of `none` and of each mode.
        round_trips: Vec<(&'static str, Measured)>,
    },
}

impl CpuModel {
    /// The model of transactions on `nic` whose utilisation in strict+ is the printed one, where
    /// `lists` are the costs of strict+.
    ///
    /// # Errors
    /// `round_trips` lacks strict+.
    pub(super) fn of_transactions(
        nic: Nic,
        lists: &Column,
        round_trips: Vec<(&'static str, Measured)>,
    ) -> Result<Self, LabError> {
        let transaction = Transaction::new(lists.added(), of_mode(&round_trips, FITTED_MODE)?);
        let model = TransactionModel::fitted(fitted_cell(nic)?.value, &transaction);
        Ok(Self::Transactions { model, round_trips })
    }

    /// CPU utilisation in per cent in `mode`, whose costs are `column`.
    ///
    /// # Errors
    /// The mode has no round trip.
    pub(super) fn percent(&self, mode: &str, column: &Column) -> Result<Measured, LabError> {
        Ok(match self {
            Self::Frames(frame) => {
                let percent = 100.0 * frame.cpu(column.extra);
                Measured::timed(percent, column.parts.order_spread)
            }
            Self::Transactions { model, round_trips } => {
                let round_trip = of_mode(round_trips, mode)?;
                model.percent(&Transaction::new(column.added(), round_trip))
            }
        })
    }

    /// CPU utilisation in per cent without protection.
    ///
    /// # Errors
    /// `none` has no round trip.
    pub(super) fn percent_of_none(&self) -> Result<f64, LabError> {
        Ok(match self {
            Self::Frames(frame) => 100.0 * frame.cpu(0.0),
            Self::Transactions { model, round_trips } => {
                let free = Measured::cost(0.0, 0.0, 0.0);
                let transaction = Transaction::new(free, of_mode(round_trips, "none")?);
                model.percent(&transaction).median
            }
        })
    }

    /// Rows of the model's inputs, named `group`, that the frame's do not have.
    pub(super) fn rows(&self, group: &str) -> Vec<FindingRow> {
        let Self::Transactions { model, round_trips } = self else {
            return Vec::new();
        };
        let c_none = Measured::cost(0.0, model.c_none(), 0.0);
        let fitted = FindingRow::new(format!("{group}: {TRANSACTION}"), "cycles", c_none).fitted();
        let others = round_trips
            .iter()
            .filter(|(mode, _)| !mode.starts_with("riommu"));
        let others = others.map(|(mode, microseconds)| {
            FindingRow::new(format!("{group}, {mode}: round trip"), "us", *microseconds)
        });
        std::iter::once(fitted).chain(others).collect()
    }
}
