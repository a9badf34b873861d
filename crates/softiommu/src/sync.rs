//! All that this crate takes from the machine's concurrency, in one place: `tests/loom.rs` compiles
//! the other files against its own version of this one, so what loom tries is what ships.

use std::cell::Cell;
use std::hint;
use std::sync::atomic::compiler_fence;
use std::thread;

pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Mutex, MutexGuard};

pub(crate) use crate::membarrier::{has_heavy_fence, heavy_fence};
pub(crate) use crate::prefetchw::prefetch_write;
pub(crate) use crate::zeroed::zeroed;

/// Binary logarithm of the entries of a table.
pub(crate) const INDEX_BITS: u32 = 9;

/// Looks at a reader's slot before the waiting thread gives up its processor. A checkpoint is well
/// under a microsecond away when the reader runs, and a time slice away when it does not.
const SPINS: u32 = 256;

/// Waits in a row that find nobody online before a gate is parked. To go online at a parked gate
/// costs some twenty microseconds where other threads of the process are running: 3 ns an unmap,
/// less than the fence that parking saves.
pub(crate) const IDLE_AFTER: usize = 8192;

/// Orders what the thread does before it and after it against the heavy fences of others. It costs
/// no instruction.
#[inline]
pub(crate) fn light_fence() {
    compiler_fence(Ordering::SeqCst);
}

/// Called between two looks at what is waited for; `looks` counts them.
#[inline]
pub(crate) fn pause(looks: u32) {
    if looks < SPINS {
        hint::spin_loop();
    } else {
        thread::yield_now();
    }
}

thread_local! {
    /// How many bursts the thread holds open: the crate's only thread-local state. See
    /// `guard_count.rs`.
    pub(crate) static READ_SECTIONS: Cell<usize> = const { Cell::new(0) };
}
