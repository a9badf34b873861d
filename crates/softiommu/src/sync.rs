//! All that this crate takes from the machine's concurrency, in one place: `tests/loom.rs` compiles the other files against its
//! own version of this one, so what loom tries is what ships.

use std::cell::Cell;
use std::hint;
use std::thread;

pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Mutex, MutexGuard};

pub(crate) use crate::zeroed::zeroed;

/// Binary logarithm of the entries of a table.
pub(crate) const INDEX_BITS: u32 = 9;

/// Looks at a reader's slot before the waiting thread gives up its processor. A checkpoint is well under a microsecond away when
/// the reader runs, and a time slice away when it does not.
const SPINS: u32 = 256;

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
    /// How many bursts the thread holds open: the crate's only thread-local state. See `pinned.rs`.
    pub(crate) static BURSTS: Cell<usize> = const { Cell::new(0) };
}
