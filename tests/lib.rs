//! Tests across crates.

/// The example of `crates/dma/README.md`, compiled and run as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../crates/dma/README.md")]
pub struct Readme;

/// The example of `docs/EMBEDDING-KERNEL.md`, compiled and run as a doc test.
#[cfg(doctest)]
#[doc = include_str!("../docs/EMBEDDING-KERNEL.md")]
pub struct EmbeddingKernel;
