//! Sessions of a hostile driver, of endpoints and of an embedder with a virtio-iommu device:
//! requests of any bytes, accesses, events, complete and damaged snapshots, failing sinks. After
//! every step the device, its sink and a brute-force reference agree.
//!
//! The session and the reference come from the crate's own tests.

#[path = "../../../crates/virtio-iommu/tests/common/mod.rs"]
mod common;

use crate::OutcomeHook;

/// Outcomes that the corpus reaches: every error, every kind of denial.
pub const OUTCOMES: &[&str] = common::outcomes::OUTCOMES;

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    common::session::run(data, reached);
}
