//! All concurrency primitives of this crate. `tests/loom.rs` compiles the other files against its
//! own version of this one, so loom checks the code that ships.

use std::cell::Cell;
use std::hint;
use std::sync::atomic::compiler_fence;
use std::thread;

pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Mutex, MutexGuard};

pub(crate) use crate::membarrier::{has_heavy_fence, heavy_fence};
pub(crate) use crate::prefetchw::prefetch_write;
pub(crate) use crate::zeroed::zeroed;

/// Binary logarithm of the number of entries in a table.
pub(crate) const INDEX_BITS: u32 = 9;

/// Polls of a reader's slot before the waiter yields its CPU. The next checkpoint is well under a
/// microsecond away if the reader is running, and a time slice away if not.
const SPINS: u32 = 256;

/// Consecutive waits without an online reader before the QSBR state goes idle. Going online from
/// idle costs about 20 us if other threads of the process are running. That is 3 ns per unmap, less
/// than the fence that idling saves.
pub(crate) const IDLE_AFTER: usize = 8192;

/// Orders the thread's earlier and later accesses with respect to other threads' heavy fences.
/// Costs no instruction.
#[inline]
pub(crate) fn light_fence() {
    compiler_fence(Ordering::SeqCst);
}

/// Pauses between two polls; `polls` is the number of polls so far.
#[inline]
pub(crate) fn pause(polls: u32) {
    if polls < SPINS {
        hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

thread_local! {
    /// Number of read sections that the thread has open; the crate's only thread-local state. See
    /// `guard_count.rs`.
    pub(crate) static READ_SECTIONS: Cell<usize> = const { Cell::new(0) };
}
