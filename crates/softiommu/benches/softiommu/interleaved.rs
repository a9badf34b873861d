//! Interleaved timing of variants, so that load from other virtual machines slows all of them.

use std::time::Instant;

use crate::ACCESSES;
use crate::clock::quantile;

/// A variant and its measured times.
pub(crate) struct Side<'a> {
    name: String,
    work: Box<dyn FnMut() + 'a>,
    nanos: Vec<f64>,
}

pub(crate) fn side<'a>(name: &str, work: impl FnMut() + 'a) -> Side<'a> {
    Side {
        name: name.to_owned(),
        work: Box::new(work),
        nanos: Vec::new(),
    }
}

/// Runs all variants interleaved and prints each next to the first.
pub(crate) fn run(title: &str, samples: usize, sides: &mut [Side<'_>]) {
    for _ in 0..samples {
        for side in sides.iter_mut() {
            (side.work)();
            let start = Instant::now();
            (side.work)();
            side.nanos
                .push(start.elapsed().as_nanos() as f64 / ACCESSES as f64);
        }
    }
    println!("{title}");
    println!(
        "  {:<52} {:>8} {:>8} {:>8} {:>8}",
        "ns", "median", "10%", "90%", "/first"
    );
    let mut first = f64::NAN;
    for side in sides {
        let [median, low, high] = [0.5, 0.1, 0.9].map(|share| quantile(&mut side.nanos, share));
        if first.is_nan() {
            first = median;
        }
        println!(
            "  {:<52} {median:>8.2} {low:>8.2} {high:>8.2} {:>8.3}",
            side.name,
            median / first
        );
    }
}
