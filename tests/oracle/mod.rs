//! Attack classes that need a separate platform (A21, A36), and caches of mappings (A28, A29).
//!
//! `crates/attack` executes the other classes on every mode. The mapping layer's own tests cover
//! variants of A25 (`crates/dma/tests/layer/bad_input.rs`) and A34 (`bounce.rs` in the same
//! directory).

mod caches;
mod non_coherent;
mod power;
