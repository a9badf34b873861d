//! Memory for tables: zero, and not touched before it is used.

use std::sync::atomic::AtomicU64;

/// `words` words, all zero. The pages behind them are the operating system's zero pages until something is stored, so a domain
/// costs memory for the tables it has, not for those it may have.
pub(crate) fn zeroed(words: usize) -> Box<[AtomicU64]> {
    let memory = Box::<[AtomicU64]>::new_zeroed_slice(words);
    // SAFETY: an `AtomicU64` has the size and bit validity of a `u64`, for which all zeros is a value.
    unsafe { memory.assume_init() }
}
