//! The write-backs of tables at their earliest and latest moment (A21), and caches of mappings
//! (A28, A29).
//!
//! `crates/attack` executes all classes on every mode. The mapping layer's own tests cover
//! variants of A25 (`crates/dma/tests/layer/bad_input.rs`) and A34 (`bounce.rs` in the same
//! directory).

mod caches;
mod non_coherent;
