//! A few pages at arbitrary addresses, for tables that an attacker wrote.

use std::collections::HashMap;

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{MemoryError, PageSize, PhysAddr, PhysMemory, TABLE_WORDS};

const PAGE: u64 = PageSize::Size4K.bytes();

/// Memory that exists only on pages where a word was set. No access crosses a page.
#[derive(Debug, Default)]
pub struct SparseMemory(HashMap<u64, Box<[AtomicU64; TABLE_WORDS]>>);

impl SparseMemory {
    /// Creates an empty memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the word at `at`, rounded down to a multiple of 8, and creates its page if necessary.
    pub fn set(&mut self, at: PhysAddr, word: u64) {
        let page = self
            .0
            .entry(at.get() / PAGE)
            .or_insert_with(|| Box::new([const { AtomicU64::new(0) }; TABLE_WORDS]));
        if let Some(to) = page.get((at.offset_in(PAGE) / 8) as usize) {
            to.store(word, Ordering::Relaxed);
        }
    }

    /// Creates the page that holds `at`.
    pub fn add(&mut self, at: PhysAddr) {
        let old = self
            .word(at.align_down(8))
            .map_or(0, |w| w.load(Ordering::Relaxed));
        self.set(at, old);
    }

    fn page(&self, at: PhysAddr, words: u64) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.0
            .get(&(at.get() / PAGE))
            .map(Box::as_ref)
            .ok_or(MemoryError::Outside { at, words })
    }
}

impl PhysMemory for SparseMemory {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.words(at, 1)?
            .first()
            .ok_or(MemoryError::Outside { at, words: 1 })
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        if !at.is_aligned(PAGE) {
            return Err(MemoryError::Misaligned { at });
        }
        self.page(at, TABLE_WORDS as u64)
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        if !at.is_aligned(8) {
            return Err(MemoryError::Misaligned { at });
        }
        let words = count as u64;
        let first = (at.offset_in(PAGE) / 8) as usize;
        self.page(at, words)?
            .get(first..)
            .and_then(|rest| rest.get(..count))
            .ok_or(MemoryError::Outside { at, words })
    }

    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}

    fn drain(&self) {}
}
