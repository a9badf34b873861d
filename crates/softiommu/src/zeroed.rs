//! Zeroed memory for tables, committed on first write.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::slice_from_raw_parts_mut;
use std::sync::atomic::AtomicU64;

/// Allocates `words` zeroed words. The kernel backs them with memory on the first write, so a
/// domain costs memory only for the tables it uses.
///
/// `None` if the address space is exhausted or `words` is 0. Guests create domains, so an
/// allocation failure must not abort the process.
pub(crate) fn zeroed(words: usize) -> Option<Box<[AtomicU64]>> {
    let layout = Layout::array::<AtomicU64>(words)
        .ok()
        .filter(|layout| layout.size() != 0)?;
    // SAFETY: the layout has a non-zero size.
    let memory = unsafe { alloc_zeroed(layout) };
    if memory.is_null() {
        return None;
    }
    let memory = slice_from_raw_parts_mut(memory.cast::<AtomicU64>(), words);
    // SAFETY: the memory comes from the global allocator, has the layout of `words` `AtomicU64`s,
    // and has no other owner. An `AtomicU64` has the size and bit validity of a `u64`, for which
    // all zeros is a valid value.
    Some(unsafe { Box::from_raw(memory) })
}
