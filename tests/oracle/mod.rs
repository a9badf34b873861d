//! The attack classes that translation modes defend against, each with the expected outcome for
//! every kind of mode.
//!
//! The rows are those of the project's attack matrix for the classes A01 to A09, A11, A19, A20 and
//! A35. The row A10 reads a page through its second, live mapping, which every mode permits; it
//! shows that this is no violation, and tells no modes apart.
//! `non_coherent.rs` tests A21 and `power.rs` A36. The mapping layer's own tests cover A25
//! (`crates/dma/tests/layer/bad_input.rs`) and A34 (`bounce.rs` in the same directory).

mod attacks;
mod non_coherent;
mod power;
