//! The pool of bounce slots: memory that the device can reach, and the copies to and from it.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{Direction, PhysAddr, PhysMemory, PhysRange};

use crate::token::BounceSlot;

/// Bytes in one slot, the unit of allocation (as in Linux's swiotlb).
const SLOT: u64 = 2048;
/// Slots per bitmap word, which is also the longest run.
const RUN: u64 = 64;

/// A pool of low memory in slots of 2 KiB. A mapping takes a run of slots and keeps the buffer's
/// offset in the first slot, because some devices depend on low address bits. The longest mapping
/// is 128 KiB less that offset.
#[derive(Debug)]
pub struct BouncePool {
    base: PhysAddr,
    /// Bitmap with one bit per slot; 1 = in use.
    taken: Vec<AtomicU64>,
}

impl BouncePool {
    /// Creates a pool with as many whole runs of 128 KiB as fit in `memory`. `None` if none fits or
    /// if `memory` is not aligned to 2 KiB.
    pub fn new(memory: PhysRange) -> Option<Self> {
        let words = memory.bytes() / (SLOT * RUN);
        if words == 0 || words > u64::from(u32::MAX) || !memory.start().is_aligned(SLOT) {
            return None;
        }
        Some(Self {
            base: memory.start(),
            taken: (0..words).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// Returns the number of slots in use.
    pub fn in_use(&self) -> u64 {
        self.taken
            .iter()
            .map(|word| u64::from(word.load(Ordering::Relaxed).count_ones()))
            .sum()
    }

    fn alloc(&self, original: PhysRange) -> Option<BounceSlot> {
        let offset = original.start().offset_in(SLOT);
        let count = offset.checked_add(original.bytes())?.div_ceil(SLOT);
        if count > RUN {
            return None;
        }
        let run = if count == RUN {
            u64::MAX
        } else {
            (1 << count) - 1
        };
        for (index, word) in self.taken.iter().enumerate() {
            let mut seen = word.load(Ordering::Relaxed);
            while let Some(first) = (0..=RUN - count).find(|first| seen & (run << first) == 0) {
                let taken = seen | run << first;
                match word.compare_exchange(seen, taken, Ordering::Acquire, Ordering::Relaxed) {
                    Ok(_) => {
                        let slot = index as u64 * RUN + first;
                        let start = self.base.checked_add(slot * SLOT + offset)?;
                        return Some(BounceSlot {
                            word: index as u32,
                            first: first as u8,
                            count: count as u8,
                            copy: PhysRange::new(start, original.bytes())?,
                            original,
                        });
                    }
                    Err(now) => seen = now,
                }
            }
        }
        None
    }

    pub(crate) fn free(&self, slot: &BounceSlot) {
        let count = u64::from(slot.count);
        let run = if count == RUN {
            u64::MAX
        } else {
            (1 << count) - 1
        };
        if let Some(word) = self.taken.get(slot.word as usize) {
            word.fetch_and(!(run << slot.first), Ordering::Release);
        }
    }

    /// Allocates a run of slots and copies the bytes of `original` into it, whatever the direction.
    /// The device may write only part of a buffer, and the driver must find the other bytes
    /// unchanged.
    #[cold]
    #[inline(never)]
    pub(crate) fn copied(
        &self,
        memory: &impl PhysMemory,
        original: PhysRange,
    ) -> Option<BounceSlot> {
        let slot = self.alloc(original)?;
        let (from, to) = (original.start(), slot.copy.start());
        let done = self
            .scrub(memory, &slot)
            .and_then(|()| copy(memory, from, to, original.bytes()));
        if done.is_none() {
            self.free(&slot);
        }
        done.map(|()| slot)
    }

    /// Copies the device's data back and frees the run.
    #[cold]
    #[inline(never)]
    pub(crate) fn finish(&self, memory: &impl PhysMemory, slot: &BounceSlot, direction: Direction) {
        copy_out(memory, slot, direction);
        self.free(slot);
    }

    /// Zeroes the whole run, so that its padding holds no data of an earlier user (attack A34).
    fn scrub(&self, memory: &impl PhysMemory, slot: &BounceSlot) -> Option<()> {
        let start = slot.copy.start().align_down(SLOT);
        let words = usize::from(slot.count) * (SLOT as usize / 8);
        for word in memory.words(start, words).ok()? {
            word.store(0, Ordering::Relaxed);
        }
        Some(())
    }
}

pub(crate) fn copy_in(memory: &impl PhysMemory, slot: &BounceSlot, direction: Direction) {
    if direction != Direction::FromDevice {
        let (from, to) = (slot.original, slot.copy);
        let _ = copy(memory, from.start(), to.start(), from.bytes());
    }
}

pub(crate) fn copy_out(memory: &impl PhysMemory, slot: &BounceSlot, direction: Direction) {
    if direction != Direction::ToDevice {
        let (from, to) = (slot.copy, slot.original);
        let _ = copy(memory, from.start(), to.start(), from.bytes());
    }
}

/// Copies `bytes` bytes between addresses of equal alignment. Other bytes in the first and last
/// words keep their values.
fn copy(memory: &impl PhysMemory, from: PhysAddr, to: PhysAddr, bytes: u64) -> Option<()> {
    let lead = from.offset_in(8);
    let words = usize::try_from((lead + bytes).div_ceil(8)).ok()?;
    let source = memory.words(from.align_down(8), words).ok()?;
    let target = memory.words(to.align_down(8), words).ok()?;
    for (index, (source, target)) in source.iter().zip(target).enumerate() {
        let mut mask = u64::MAX;
        if index == 0 {
            mask &= u64::MAX << (lead * 8);
        }
        if index + 1 == words {
            let tail = words as u64 * 8 - (lead + bytes);
            mask &= u64::MAX >> (tail * 8);
        }
        let value = source.load(Ordering::Relaxed) & mask;
        if mask == u64::MAX {
            target.store(value, Ordering::Relaxed);
        } else {
            let merge = |old: u64| Some(old & !mask | value);
            let _ = target.fetch_update(Ordering::Relaxed, Ordering::Relaxed, merge);
        }
    }
    Some(())
}
