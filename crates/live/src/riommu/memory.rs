//! The guest's memory as the words that the ring unit reads.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU64;

use ringfence_types::{MemoryError, PhysAddr, PhysMemory, TABLE_WORDS};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

const WORD_BYTES: usize = 8;

/// Guest memory that a client shares. Its walks snoop the CPU's caches.
pub(super) struct GuestWords<'m>(pub(super) &'m GuestMemoryMmap);

impl PhysMemory for GuestWords<'_> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        let words = self.words(at, 1)?;
        words.first().ok_or(MemoryError::Outside { at, words: 1 })
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        let bytes = (TABLE_WORDS * WORD_BYTES) as u64;
        if !at.is_aligned(bytes) {
            return Err(MemoryError::Misaligned { at });
        }
        let words = TABLE_WORDS as u64;
        let table = self.words(at, TABLE_WORDS)?;
        table
            .first_chunk()
            .ok_or(MemoryError::Outside { at, words })
    }

    /// The words must lie in one range that the client shares.
    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        let Self(guest) = self;
        let outside = MemoryError::Outside {
            at,
            words: count as u64,
        };
        let bytes = count.checked_mul(WORD_BYTES).ok_or(outside)?;
        let slice = guest.get_slice(GuestAddress(at.get()), bytes);
        let slice = slice.map_err(|_| outside)?;
        let first = slice.ptr_guard_mut().as_ptr().cast::<AtomicU64>();
        if !at.is_aligned(WORD_BYTES as u64) || !first.is_aligned() {
            return Err(MemoryError::Misaligned { at });
        }
        // SAFETY: `get_slice` has checked that the `bytes` bytes from `first` lie in one mapping of
        // `guest`, which stays mapped while `self` borrows it. `first` is aligned for a word. Every
        // 8 bytes are a valid `AtomicU64`. This process accesses the memory that clients share only
        // through volatile copies and these atomics; what the guest stores is untrusted.
        Ok(unsafe { std::slice::from_raw_parts(first, count) })
    }

    /// No write-back is needed: the walks are loads of a CPU.
    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}

    fn drain(&self) {}
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use vm_memory::Bytes;

    use super::*;

    fn memory() -> GuestMemoryMmap {
        let ranges = [
            (GuestAddress(0x1000), 0x2000),
            (GuestAddress(0x8000), 0x1000),
        ];
        GuestMemoryMmap::from_ranges(&ranges).unwrap()
    }

    #[test]
    fn words_are_those_of_the_guest() {
        let memory = memory();
        let words = GuestWords(&memory);
        memory
            .write_obj(0x1122_3344_5566_7788_u64, GuestAddress(0x2ff8))
            .unwrap();
        let last = words.word(PhysAddr::new(0x2ff8)).unwrap();
        assert_eq!(last.load(Ordering::Relaxed), 0x1122_3344_5566_7788);
        last.store(5, Ordering::Relaxed);
        assert_eq!(memory.read_obj::<u64>(GuestAddress(0x2ff8)).unwrap(), 5);
        assert!(words.table(PhysAddr::new(0x8000)).is_ok());
    }

    #[test]
    fn words_outside_memory_are_refused() {
        let memory = memory();
        let words = GuestWords(&memory);
        for (at, count) in [
            (0, 1),
            (0xff8, 2),
            (0x2ff8, 2),
            (0x3000, 1),
            (0x7ff8, 2),
            (u64::MAX - 7, 1),
            (u64::MAX - 7, 2),
            (0x1000, usize::MAX),
            (0x1000, usize::MAX / 8),
        ] {
            let found = words.words(PhysAddr::new(at), count).map(<[_]>::len);
            let outside = MemoryError::Outside {
                at: PhysAddr::new(at),
                words: count as u64,
            };
            assert_eq!(found, Err(outside), "{at:#x} {count}");
        }
        for at in [0x1001, 0x1004] {
            let at = PhysAddr::new(at);
            assert_eq!(words.word(at).err(), Some(MemoryError::Misaligned { at }));
        }
        let at = PhysAddr::new(0x1008);
        assert_eq!(words.table(at).err(), Some(MemoryError::Misaligned { at }));
    }
}
