//! Tests across crates.

/// The example of `crates/dma/README.md`, compiled and run as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../crates/dma/README.md")]
pub struct Readme;
