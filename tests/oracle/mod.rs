//! The attack classes that translation modes have an answer to, each with the answer that is
//! expected of every kind of mode.
//!
//! The rows are those of the project's attack matrix for the classes A01 to A11, A19, A20 and A35.
//! A21 stands in `non_coherent.rs`, A36 in `power.rs`; A25 is the mapping layer's own
//! (`crates/dma/tests/layer/bad_input.rs`), and so is A34 (`bounce.rs` there).

mod attacks;
mod non_coherent;
mod power;
