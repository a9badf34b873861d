//! The pool of bounce slots: memory that the device can reach, and the copies to and from it.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{Direction, PhysAddr, PhysMemory, PhysRange};

use crate::copy::zero;
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
            .and_then(|()| memory.copy_bytes(from, to, original.bytes()).ok());
        if done.is_none() {
            self.free(&slot);
        }
        done.map(|()| slot)
    }

    /// Copies the device's data back and frees the run.
    #[cold]
    #[inline(never)]
    pub(crate) fn finish(&self, memory: &impl PhysMemory, slot: &BounceSlot, direction: Direction) {
        copy_out(memory, slot, direction, slot.whole());
        self.free(slot);
    }

    /// Zeroes the whole run, so that its padding holds no data of an earlier user (attack A34).
    fn scrub(&self, memory: &impl PhysMemory, slot: &BounceSlot) -> Option<()> {
        let start = slot.copy.start().align_down(SLOT);
        zero(memory, start, u64::from(slot.count) * SLOT).ok()
    }
}

/// A part of a buffer: the offset of its first byte, and its length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl BounceSlot {
    /// Returns the part that is the whole buffer.
    pub(crate) fn whole(&self) -> Part {
        Part {
            offset: 0,
            bytes: self.original.bytes(),
        }
    }
}

/// Copies `part` from the buffer to the slot, unless the device only writes it.
pub(crate) fn copy_in(
    memory: &impl PhysMemory,
    slot: &BounceSlot,
    direction: Direction,
    part: Part,
) {
    if direction != Direction::FromDevice {
        copy_part(memory, slot.original, slot.copy, part);
    }
}

/// Copies `part` from the slot to the buffer, unless the device only reads it.
pub(crate) fn copy_out(
    memory: &impl PhysMemory,
    slot: &BounceSlot,
    direction: Direction,
    part: Part,
) {
    if direction != Direction::ToDevice {
        copy_part(memory, slot.copy, slot.original, part);
    }
}

fn copy_part(memory: &impl PhysMemory, from: PhysRange, to: PhysRange, part: Part) {
    let from = from.start().wrapping_add(part.offset);
    let to = to.start().wrapping_add(part.offset);
    let _ = memory.copy_bytes(from, to, part.bytes);
}
