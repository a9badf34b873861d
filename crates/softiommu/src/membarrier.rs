//! Heavy fences: Linux's `membarrier`, which interrupts every CPU that runs a thread of the
//! process.
//!
//! Source: membarrier(2), `MEMBARRIER_CMD_PRIVATE_EXPEDITED`.

use rustix::thread::{MembarrierCommand, membarrier};

/// Returns true if the kernel supports heavy fences. Registers the process, as the kernel requires
/// before first use.
pub(crate) fn has_heavy_fence() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

/// Executes a full fence in every running thread of the process. Threads that are not running
/// executed one when they were scheduled out.
///
/// # Panics
/// Panics if the kernel rejects the call despite the registration, for example because of a later
/// seccomp filter.
pub(crate) fn heavy_fence() {
    let done = membarrier(MembarrierCommand::PrivateExpedited);
    assert!(done.is_ok(), "membarrier, which was granted: {done:?}");
}
