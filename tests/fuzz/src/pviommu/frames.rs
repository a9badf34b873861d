//! Frames by number, and the memory of the frames for tables.

use std::cell::{OnceCell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{FrameSource, MemoryError, OutOfFrames, PhysAddr, PhysMemory, TABLE_WORDS};

use super::PAGE;

type Words = [AtomicU64; TABLE_WORDS];

/// A fixed number of pages from address 4096 on. A page is allocated at its first access, because
/// an input needs few of them.
pub(super) struct Tables(Box<[OnceCell<Box<Words>>]>);

impl Tables {
    pub(super) fn new(count: u64) -> Self {
        Self((0..count).map(|_| OnceCell::new()).collect())
    }

    fn page(&self, at: PhysAddr, words: u64) -> Result<&Words, MemoryError> {
        let number = (at.get() / PAGE).checked_sub(1);
        let number = number.and_then(|number| usize::try_from(number).ok());
        let page = number.and_then(|number| self.0.get(number));
        let zeroed = || Box::new([const { AtomicU64::new(0) }; TABLE_WORDS]);
        let page = page.map(|page| &**page.get_or_init(zeroed));
        page.ok_or(MemoryError::Outside { at, words })
    }
}

impl PhysMemory for Tables {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.words(at, 1).map(|words| &words[0])
    }

    fn table(&self, at: PhysAddr) -> Result<&Words, MemoryError> {
        if !at.is_aligned(PAGE) {
            return Err(MemoryError::Misaligned { at });
        }
        self.page(at, TABLE_WORDS as u64)
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        if !at.is_aligned(8) {
            return Err(MemoryError::Misaligned { at });
        }
        let first = (at.offset_in(PAGE) / 8) as usize;
        let words = count as u64;
        let found = self.page(at, words)?.get(first..first + count);
        found.ok_or(MemoryError::Outside { at, words })
    }

    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}

    fn drain(&self) {}
}

/// Frames from an address on; zeroed if they are in memory.
#[derive(Clone)]
pub(super) struct Source {
    memory: Rc<Tables>,
    first: u64,
    pool: Rc<RefCell<Pool>>,
}

struct Pool {
    /// Numbers of free frames, the next one last.
    free: Vec<u64>,
    /// By number: true if the frame is free.
    is_free: Vec<bool>,
}

impl Source {
    pub(super) fn new(memory: &Rc<Tables>, first: u64, count: u64) -> Self {
        let pool = Pool {
            free: (0..count).rev().collect(),
            is_free: (0..count).map(|_| true).collect(),
        };
        Self {
            memory: Rc::clone(memory),
            first,
            pool: Rc::new(RefCell::new(pool)),
        }
    }
}

impl FrameSource for Source {
    fn alloc_zeroed(&self) -> Result<PhysAddr, OutOfFrames> {
        let mut pool = self.pool.borrow_mut();
        let number = pool.free.pop().ok_or(OutOfFrames)?;
        pool.is_free[number as usize] = false;
        let frame = PhysAddr::new(self.first + number * PAGE);
        if let Ok(words) = self.memory.table(frame) {
            words
                .iter()
                .for_each(|word| word.store(0, Ordering::Relaxed));
        }
        Ok(frame)
    }

    fn free(&self, frame: PhysAddr) {
        let number = (frame.get() - self.first) / PAGE;
        let mut pool = self.pool.borrow_mut();
        let was_free = std::mem::replace(&mut pool.is_free[number as usize], true);
        assert!(!was_free, "{frame} is freed twice");
        pool.free.push(number);
    }
}
