//! The matrix of modes and classes.

use ringfence_lab::LabError;
use ringfence_lab::modes::{Mode, Safety};
use serde::Serialize;

use crate::bench::PAGES_32_BIT;
use crate::class::{Class, Method};
use crate::evidence::{Evidence, Executed, Found};
use crate::expect::{self, Kind, Letter, Outcome};
use crate::untried;

/// The outcome of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// An attempt succeeded.
    Succeeded,
    /// No attempt succeeded.
    Stopped,
    /// The class cannot occur in this mode.
    NotApplicable,
    /// This program does not execute the class.
    NotExecuted,
}

/// One class on one mode.
#[derive(Debug, Clone, Serialize)]
pub struct Cell {
    /// Number of the class.
    pub class: &'static str,
    /// Name of the mode.
    pub mode: String,
    /// Outcome of the execution.
    pub status: Status,
    /// Reason why the class cannot occur or is not executed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    /// Outcome that the mode's properties predict; none for a class that is not executed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<Outcome>,
    /// Reason why the prediction differs from the attack matrix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub departure: Option<&'static str>,
    /// True if a success came later than the mode's stated bound.
    pub exceeds_bound: bool,
    /// True if the outcome differs from the prediction, a live grant was refused, or a variant that
    /// decides made no attempt without a [reason](crate::untried).
    pub unexpected: bool,
    /// Sum of the counts that decide.
    pub total: Evidence,
    /// Counts of each variant.
    #[serde(flatten)]
    pub executed: Executed,
}

/// Classes executed on modes.
#[derive(Debug, Clone, Serialize)]
pub struct Matrix {
    /// Names of the modes and their promised safety, in order.
    pub modes: Vec<(String, String)>,
    /// Numbers and descriptions of the classes, in order.
    pub classes: Vec<(&'static str, &'static str)>,
    /// Cells: for each class, those of all modes.
    pub cells: Vec<Cell>,
}

impl Matrix {
    /// Returns the cells of one class, in the order of the modes.
    pub fn row(&self, class: &str) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(move |cell| cell.class == class)
    }

    /// Returns the number of cells with this outcome.
    pub fn count(&self, status: Status) -> usize {
        let cells = self.cells.iter();
        cells.filter(|cell| cell.status == status).count()
    }

    /// Returns the cells whose outcome differs from the prediction.
    pub fn unexpected(&self) -> impl Iterator<Item = &Cell> {
        self.cells.iter().filter(|cell| cell.unexpected)
    }

    /// Returns the unexpected cells of modes that promise at least `own-pool`.
    pub fn broken_promises(&self) -> impl Iterator<Item = &Cell> {
        let strict = [Safety::OwnPool, Safety::Strict, Safety::ByteGranular];
        let strict = strict.map(|safety| safety.to_string());
        self.unexpected().filter(move |cell| {
            let mode = self.modes.iter().find(|(name, _)| *name == cell.mode);
            mode.is_some_and(|(_, safety)| strict.contains(safety))
        })
    }
}

/// Options of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Pages that the scan of class A37 reads, at most those of a 32-bit space.
    pub scan_pages: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            scan_pages: PAGES_32_BIT,
        }
    }
}

/// Executes `classes` on `modes`. Calls `progress` with the number of finished cells; an error of
/// it ends the run.
///
/// # Errors
/// A mode is not built in, or memory is short; those of `progress`.
pub fn run(
    modes: &[Mode],
    classes: &[&'static Class],
    options: &Options,
    mut progress: impl FnMut(u64) -> Result<(), LabError>,
) -> Result<Matrix, LabError> {
    let mut matrix = Matrix {
        modes: modes
            .iter()
            .map(|mode| (mode.name.clone(), mode.safety().to_string()))
            .collect(),
        classes: classes.iter().map(|class| (class.id, class.name)).collect(),
        cells: Vec::with_capacity(modes.len() * classes.len()),
    };
    for class in classes {
        for mode in modes {
            matrix.cells.push(cell(class, mode, options)?);
            progress(matrix.cells.len() as u64)?;
        }
    }
    Ok(matrix)
}

fn cell(class: &Class, mode: &Mode, options: &Options) -> Result<Cell, LabError> {
    let mut cell = Cell {
        class: class.id,
        mode: mode.name.clone(),
        status: Status::NotExecuted,
        reason: None,
        expected: None,
        departure: None,
        exceeds_bound: false,
        unexpected: false,
        total: Evidence::default(),
        executed: Executed::default(),
    };
    let found = match class.method {
        Method::Scenario(scenario) => scenario(mode)?,
        Method::Scan(scenario) => scenario(mode, options.scan_pages)?,
    };
    if let Some(expectation) = expect::expected(class.id, mode) {
        cell.expected = Some(expectation.outcome);
        cell.departure = expectation.departure;
    }
    let outcome = match found {
        Found::NotExecuted(reason) => {
            cell.reason = Some(reason);
            (cell.expected, cell.departure) = (None, None);
            return Ok(cell);
        }
        Found::NotApplicable(reason) => {
            cell.status = Status::NotApplicable;
            cell.reason = Some(reason);
            Outcome::NotApplicable
        }
        Found::Executed(executed) => {
            cell.total = executed.total();
            cell.executed = executed;
            if cell.total.successes > 0 {
                cell.status = Status::Succeeded;
                Outcome::Succeeded
            } else {
                cell.status = Status::Stopped;
                Outcome::Stopped
            }
        }
    };
    let bound = expect::bound(mode);
    let over = |last: Option<u64>, bound: Option<u64>| {
        bound.is_some_and(|bound| last.is_some_and(|last| last > bound))
    };
    let is_bounded = expect::letter(class.id, Kind::of(mode)) == Some(Letter::Bounded);
    cell.exceeds_bound = is_bounded && cell.executed.beyond_bound > 0
        || over(cell.total.last_success_ns, bound.ns)
        || over(cell.total.last_success_unmaps, bound.unmaps);
    let is_stopped = cell.status == Status::Stopped;
    let refused = is_stopped && cell.total.false_faults > 0;
    // Without an attempt, a stopped attack is no evidence.
    let untried = untried::any(class.id, &cell.executed);
    cell.unexpected = cell.expected != Some(outcome) || cell.exceeds_bound || refused || untried;
    Ok(cell)
}
