//! The prefetchers against sequences computed by hand, against naive transcriptions, and on rings.

mod golden;
mod hostile;
mod naive;
mod rings;

use proptest::test_runner::{Config, RngSeed};

/// Proptest with a seed of its own: every run is the same.
fn cases(cases: u32, seed: u64) -> Config {
    Config {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..Config::default()
    }
}
