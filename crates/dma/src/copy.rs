//! Copies between buffers and the memory that a device uses in place of them.

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{MemoryError, PhysAddr, PhysMemory};

const WORD: u64 = 8;

/// Returns the mask of the bytes of a word from byte `lead` on.
#[inline]
const fn from_byte(lead: u64) -> u64 {
    u64::MAX << (lead % WORD * 8)
}

/// Returns the mask of the bytes of a word below byte `end`; all bytes if `end` is a multiple of 8.
#[inline]
const fn below_byte(end: u64) -> u64 {
    u64::MAX >> ((WORD - 1 - end.wrapping_sub(1) % WORD) * 8)
}

/// Stores the bytes of `value` that `mask` selects. Other CPUs may change the other bytes.
#[inline]
fn merge(word: &AtomicU64, value: u64, mask: u64) {
    if mask == u64::MAX {
        word.store(value, Ordering::Relaxed);
    } else {
        let merge = |old: u64| Some(old & !mask | value & mask);
        let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, merge);
    }
}

/// Returns the words that hold the `bytes` bytes from `at`.
#[inline]
fn words_of<M: PhysMemory>(
    memory: &M,
    at: PhysAddr,
    bytes: u64,
) -> Result<&[AtomicU64], MemoryError> {
    let words = at.offset_in(WORD).saturating_add(bytes).div_ceil(WORD);
    let outside = MemoryError::Outside { at, words };
    let words = usize::try_from(words).map_err(|_| outside)?;
    memory.words(at.align_down(WORD), words)
}

/// Returns an error if a byte of the `bytes` bytes from `at` lies outside memory.
pub(crate) fn check(memory: &impl PhysMemory, at: PhysAddr, bytes: u64) -> Result<(), MemoryError> {
    words_of(memory, at, bytes).map(drop)
}

/// Zeroes the `bytes` bytes from `at`.
///
/// # Errors
/// Some byte lies outside memory. Nothing was written.
#[inline]
pub(crate) fn zero(memory: &impl PhysMemory, at: PhysAddr, bytes: u64) -> Result<(), MemoryError> {
    if bytes == 0 {
        return Ok(());
    }
    let lead = at.offset_in(WORD);
    let target = words_of(memory, at, bytes)?;
    let (first, last) = (from_byte(lead), below_byte(lead.wrapping_add(bytes)));
    match target {
        [word] => merge(word, 0, first & last),
        [head, middle @ .., tail] => {
            merge(head, 0, first);
            middle
                .iter()
                .for_each(|word| word.store(0, Ordering::Relaxed));
            merge(tail, 0, last);
        }
        [] => {}
    }
    Ok(())
}

/// Reads the bytes from `at`. Loads each word once.
///
/// # Errors
/// Some byte lies outside memory. Nothing was read.
#[inline]
pub(crate) fn read(
    memory: &impl PhysMemory,
    at: PhysAddr,
    into: &mut [u8],
) -> Result<(), MemoryError> {
    let lead = at.offset_in(WORD) as usize;
    let mut words = words_of(memory, at, into.len() as u64)?.iter();
    let load = |word: &AtomicU64| word.load(Ordering::Relaxed).to_le_bytes();
    let head = if lead == 0 { 0 } else { WORD as usize - lead };
    let (first, rest) = into.split_at_mut(head.min(into.len()));
    if !first.is_empty()
        && let Some(word) = words.next()
    {
        let bytes = load(word).into_iter().skip(lead);
        first
            .iter_mut()
            .zip(bytes)
            .for_each(|(to, byte)| *to = byte);
    }
    let (whole, tail) = rest.as_chunks_mut::<{ WORD as usize }>();
    for (to, word) in whole.iter_mut().zip(&mut words) {
        *to = load(word);
    }
    if let Some(word) = words.next() {
        tail.iter_mut()
            .zip(load(word))
            .for_each(|(to, byte)| *to = byte);
    }
    Ok(())
}

/// Writes the bytes from `at`, and keeps the other bytes of the first and last word.
///
/// # Errors
/// Some byte lies outside memory. Nothing was written.
#[inline]
pub(crate) fn write(
    memory: &impl PhysMemory,
    at: PhysAddr,
    from: &[u8],
) -> Result<(), MemoryError> {
    let mut lead = at.offset_in(WORD);
    let mut left = from;
    for word in words_of(memory, at, from.len() as u64)? {
        let room = WORD.saturating_sub(lead) as usize;
        let (now, later) = left.split_at(room.min(left.len()));
        let mut bytes = [0; WORD as usize];
        let destination = bytes.iter_mut().skip(lead as usize);
        destination.zip(now).for_each(|(to, byte)| *to = *byte);
        let end = lead.saturating_add(now.len() as u64);
        let mask = from_byte(lead) & below_byte(end);
        merge(word, u64::from_le_bytes(bytes), mask);
        (lead, left) = (0, later);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use ringfence_memory::Arena;
    use ringfence_types::TABLE_WORDS;

    use super::*;

    /// Memory that copies in the way of the trait.
    struct ByWords<'a>(&'a Arena);

    impl PhysMemory for ByWords<'_> {
        fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
            self.0.word(at)
        }

        fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
            self.0.table(at)
        }

        fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
            self.0.words(at, count)
        }

        fn write_back(&self, _: PhysAddr, _: u64) {}

        fn drain(&self) {}
    }

    /// Compares with bytes of an array, for all offsets and lengths of up to four words.
    #[test]
    fn copies_and_zeroes_change_exactly_their_bytes() {
        let arena = Arena::new(8192).unwrap();
        let (from, to) = (PhysAddr::new(0x100), PhysAddr::new(0x1200));
        let by_words_to = PhysAddr::new(0x1400);
        for lead in 0..8 {
            for bytes in 0..24 {
                let source: Vec<u8> = (1..=40).collect();
                let mut wanted = vec![0xee_u8; 40];
                arena.write_bytes(from, &source).unwrap();
                arena.write_bytes(to, &wanted).unwrap();
                arena.write_bytes(by_words_to, &wanted).unwrap();
                let (at, end) = (lead as usize, (lead + bytes) as usize);
                let (start, target) = (from.wrapping_add(lead), to.wrapping_add(lead));
                arena.copy_bytes(start, target, bytes).unwrap();
                let by_words = by_words_to.wrapping_add(lead);
                ByWords(&arena).copy_bytes(start, by_words, bytes).unwrap();
                wanted[at..end].copy_from_slice(&source[at..end]);
                let mut found = vec![0; 40];
                arena.read_bytes(to, &mut found).unwrap();
                assert_eq!(found, wanted, "copy of {bytes} bytes at {lead}");
                arena.read_bytes(by_words_to, &mut found).unwrap();
                assert_eq!(found, wanted, "copy of {bytes} bytes at {lead} by words");
                zero(&arena, to.wrapping_add(lead), bytes).unwrap();
                wanted[at..end].fill(0);
                arena.read_bytes(to, &mut found).unwrap();
                assert_eq!(found, wanted, "zeroes of {bytes} bytes at {lead}");
                write(&arena, to.wrapping_add(lead), &source[at..end]).unwrap();
                wanted[at..end].copy_from_slice(&source[at..end]);
                arena.read_bytes(to, &mut found).unwrap();
                assert_eq!(found, wanted, "write of {bytes} bytes at {lead}");
                let mut part = vec![0; bytes as usize];
                read(&arena, to.wrapping_add(lead), &mut part).unwrap();
                assert_eq!(part, wanted[at..end], "read of {bytes} bytes at {lead}");
            }
        }
        let (next, last) = (to.wrapping_add(1), PhysAddr::new(8190 & !7));
        let memories: [&dyn Fn(PhysAddr, PhysAddr, u64) -> bool; 2] = [
            &|from, to, bytes| arena.copy_bytes(from, to, bytes).is_ok(),
            &|from, to, bytes| ByWords(&arena).copy_bytes(from, to, bytes).is_ok(),
        ];
        for copies in memories {
            assert!(!copies(from, next, 1));
            assert!(!copies(from, last, 16));
            assert!(!copies(last, from, 16));
            assert!(!copies(from, to, u64::MAX));
        }
        assert!(zero(&arena, PhysAddr::new(u64::MAX - 7), 64).is_err());
        assert!(read(&arena, PhysAddr::new(8190), &mut [0; 3]).is_err());
        assert!(write(&arena, PhysAddr::new(8190), &[0; 3]).is_err());
    }
}
