//! Attack classes that need a platform of their own: A21 and A36.
//!
//! `crates/attack` executes the other classes on every mode. The mapping layer's own tests cover
//! variants of A25 (`crates/dma/tests/layer/bad_input.rs`) and A34 (`bounce.rs` in the same
//! directory).

mod non_coherent;
mod power;
