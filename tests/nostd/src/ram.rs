//! A small memory for tables: a counter allocates frames, which are never freed.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::cell::Cell;
use core::sync::atomic::AtomicU64;

use ringfence_types::{
    FrameSource, MemoryError, OutOfFrames, PageSize, PhysAddr, PhysMemory, TABLE_WORDS,
};

const PAGE: u64 = PageSize::Size4K.bytes();

/// Memory from address 0, and its free frames.
pub(crate) struct Ram {
    pages: Vec<Box<[AtomicU64; TABLE_WORDS]>>,
    next: Cell<u64>,
}

impl Ram {
    pub(crate) fn new(pages: usize) -> Self {
        let page = || Box::new([const { AtomicU64::new(0) }; TABLE_WORDS]);
        Self {
            pages: (0..pages).map(|_| page()).collect(),
            // Address 0 stays unused.
            next: Cell::new(1),
        }
    }
}

impl PhysMemory for Ram {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        let outside = MemoryError::Outside { at, words: 1 };
        self.words(at, 1)?.first().ok_or(outside)
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        if !at.is_aligned(PAGE) {
            return Err(MemoryError::Misaligned { at });
        }
        let page = self.pages.get((at.get() / PAGE) as usize);
        page.map(|page| &**page)
            .ok_or(MemoryError::Outside { at, words: 512 })
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        if !at.is_aligned(8) {
            return Err(MemoryError::Misaligned { at });
        }
        let words = count as u64;
        let first = (at.offset_in(PAGE) / 8) as usize;
        self.table(at.align_down(PAGE))?
            .get(first..first.saturating_add(count))
            .ok_or(MemoryError::Outside { at, words })
    }

    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}

    fn drain(&self) {}
}

impl FrameSource for Ram {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        let frame = self.next.get();
        if frame >= self.pages.len() as u64 {
            return Err(OutOfFrames);
        }
        self.next.set(frame + 1);
        Ok(PhysAddr::new(frame * PAGE))
    }

    fn free(&self, _frame: PhysAddr) {}
}
