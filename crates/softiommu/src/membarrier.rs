//! Heavy fences: Linux's `membarrier`, which interrupts every processor that runs a thread of the
//! process.
//!
//! Source: membarrier(2), `MEMBARRIER_CMD_PRIVATE_EXPEDITED`.

use rustix::thread::{MembarrierCommand, membarrier};

/// Whether the system has heavy fences. Asks for them, as it wants, before the first is needed.
pub(crate) fn has_heavy_fence() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

/// A full fence in every thread of the process that is running; the others had one when they
/// stopped.
///
/// # Panics
/// If the system refuses what it has granted: a filter of system calls that came later.
pub(crate) fn heavy_fence() {
    let done = membarrier(MembarrierCommand::PrivateExpedited);
    assert!(done.is_ok(), "membarrier, which was granted: {done:?}");
}
