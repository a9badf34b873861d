//! X07 and the streams that it uses.

mod bounds;
mod dmas;
mod lines;
mod predictors;
mod sample;
mod streams;
mod synthetic;

use ringfence_experiments::prefetch::{Predictor, PrefetchRow};

fn of(rows: &[PrefetchRow], predictor: Predictor) -> impl Iterator<Item = &PrefetchRow> {
    rows.iter().filter(move |row| row.predictor == predictor)
}
