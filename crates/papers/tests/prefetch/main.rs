//! The prefetchers against sequences computed by hand, against naive implementations, and on rings.

mod golden;
mod hostile;
mod naive;
mod rings;

use proptest::test_runner::{Config, RngSeed};

/// Proptest configuration with a fixed seed: every run is identical.
fn cases(cases: u32, seed: u64) -> Config {
    Config {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..Config::default()
    }
}
