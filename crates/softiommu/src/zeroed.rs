//! Memory for tables: zero, and not touched before it is used.

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::slice_from_raw_parts_mut;
use std::sync::atomic::AtomicU64;

/// `words` words, all zero. The pages behind them are the operating system's zero pages until
/// something is stored, so a domain costs memory for the tables it has, not for those it may have.
/// `None` where there is no address space for all of them, or `words` is 0: a guest makes domains,
/// and the process has to outlive that.
pub(crate) fn zeroed(words: usize) -> Option<Box<[AtomicU64]>> {
    let layout = Layout::array::<AtomicU64>(words)
        .ok()
        .filter(|layout| layout.size() != 0)?;
    // SAFETY: the layout has a size.
    let memory = unsafe { alloc_zeroed(layout) };
    if memory.is_null() {
        return None;
    }
    let memory = slice_from_raw_parts_mut(memory.cast::<AtomicU64>(), words);
    // SAFETY: the memory is of the global allocator, has the layout of so many `AtomicU64`, and is
    // nobody else's. An `AtomicU64` has the size and bit validity of a `u64`, for which all zeros
    // is a value.
    Some(unsafe { Box::from_raw(memory) })
}
