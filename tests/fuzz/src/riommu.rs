//! Sessions of a hostile driver and of devices with the ring IOMMU: writes to registers, tables
//! that change between and during walks, accesses, hand-overs. After every step the registers,
//! memory and the interrupt equal those of a brute-force reference of docs/RIOMMU-DEVICE.md, and an
//! access had an outcome that the reference permits.
//!
//! The session and the reference come from the crate's own tests.

#[path = "../../../crates/riommu-device/tests/common/mod.rs"]
mod common;

use crate::OutcomeHook;

/// Outcomes that the corpus reaches.
pub const OUTCOMES: &[&str] = &[
    "permitted",
    "stale",
    "changed meanwhile",
    "reason 1",
    "reason 2",
    "reason 3",
    "reason 4",
    "reason 5",
    "reason 6",
    "reason 7",
    "reason 8",
    "reason 9",
    "reason 10",
    "reason 11",
    "reason 12",
    "reason 13",
    "fault lost",
    "queue outside memory",
    "malformed invalidation",
    "interrupt",
    "hand-over",
    "reset",
];

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    common::session::run(data, reached);
}
