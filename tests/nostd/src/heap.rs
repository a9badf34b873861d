//! A minimal allocator: it allocates from the start of a fixed block and never frees.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};

const BYTES: usize = 16 << 20;

/// Alignment of the block, and the largest supported alignment.
const ALIGN: usize = 4096;

#[repr(C, align(4096))]
struct Block(UnsafeCell<[u8; BYTES]>);

/// A bump allocator over a static block.
pub(crate) struct Bump {
    block: Block,
    used: AtomicUsize,
}

// SAFETY: the block's bytes are accessed only through pointers returned by `alloc`, each range
// once, because `used` only increases and changes atomically.
unsafe impl Sync for Bump {}

impl Bump {
    pub(crate) const fn new() -> Self {
        Self {
            block: Block(UnsafeCell::new([0; BYTES])),
            used: AtomicUsize::new(0),
        }
    }
}

// SAFETY: `alloc` returns null or the start of `layout.size()` bytes inside the block that were
// never returned before. The pointer is aligned because the block and the offset are.
unsafe impl GlobalAlloc for Bump {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() > ALIGN {
            return ptr::null_mut();
        }
        let bounds = |used: usize| {
            let start = used.checked_next_multiple_of(layout.align())?;
            let end = start.checked_add(layout.size())?;
            (end <= BYTES).then_some((start, end))
        };
        let before = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                bounds(used).map(|(_, end)| end)
            });
        match before.ok().and_then(bounds) {
            // SAFETY: `start` lies inside the block, because its end does.
            Some((start, _)) => unsafe { self.block.0.get().cast::<u8>().add(start) },
            None => ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, _at: *mut u8, _layout: Layout) {}
}
