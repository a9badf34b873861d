//! Sparse memory of a few pages, written by an input.
//!
//! A record of 11 bytes is a word of memory:
//!
//! | bytes | meaning |
//! |---|---|
//! | 0 | bits 0..=3 page; bits 4..=7, if not 0, the page that the word's address field points to |
//! | 1..=2 | index of the word |
//! | 3..=10 | the word |
//!
//! Pages without a record are outside memory.

use std::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{MemoryError, PhysAddr, PhysMemory, TABLE_WORDS};

/// Maximum number of pages.
const PAGES: usize = 16;
/// Size of a page in bytes.
pub(crate) const PAGE_BYTES: u64 = 4096;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Sparse memory: its pages by number, `None` for those outside memory.
pub(crate) struct Memory([Option<Box<[AtomicU64; TABLE_WORDS]>>; PAGES]);

impl Memory {
    /// Returns memory with the words of `records`; ignores trailing bytes.
    pub(crate) fn parse(records: &[u8]) -> Self {
        let mut memory = Self([const { None }; PAGES]);
        for record in records.chunks_exact(11) {
            let (page, target) = (record[0] & 15, record[0] >> 4);
            let index = usize::from(u16::from_le_bytes([record[1], record[2]])) % TABLE_WORDS;
            let mut word = u64::from_le_bytes(record[3..].try_into().expect("8 bytes"));
            if target != 0 {
                word = (word & !ADDRESS) | (u64::from(target) * PAGE_BYTES);
            }
            let page = memory.0[usize::from(page)]
                .get_or_insert_with(|| Box::new([const { AtomicU64::new(0) }; TABLE_WORDS]));
            page[index].store(word, Ordering::Relaxed);
        }
        memory
    }

    fn page(&self, at: PhysAddr) -> Option<&[AtomicU64; TABLE_WORDS]> {
        let number = usize::try_from(at.get() / PAGE_BYTES).ok()?;
        self.0.get(number)?.as_deref()
    }
}

impl PhysMemory for Memory {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        Ok(&self.words(at, 1)?[0])
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        if !at.is_aligned(PAGE_BYTES) {
            return Err(MemoryError::Misaligned { at });
        }
        self.page(at).ok_or(MemoryError::Outside { at, words: 512 })
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        if !at.is_aligned(8) {
            return Err(MemoryError::Misaligned { at });
        }
        let first = (at.offset_in(PAGE_BYTES) / 8) as usize;
        self.page(at)
            .and_then(|page| page.get(first..first + count))
            .ok_or(MemoryError::Outside {
                at,
                words: count as u64,
            })
    }

    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}

    fn drain(&self) {}
}
