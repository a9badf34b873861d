//! Bounce buffers: the CPU copies data between memory that the device cannot reach and memory that
//! it can (HW15, OS17).
//!
//! Only identity spaces need them. A space with translation allocates I/O virtual addresses below
//! the device's mask.

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{Direction, PhysAddr, PhysMemory, PhysRange};

use crate::flush::Flush;
use crate::map::{MapArgs, map_error};
use crate::mapping::LiveMapping;
use crate::sg::segments;
use crate::space::{MapResult, Space};
use crate::{
    Attachment, Cpu, Dma, MapError, MapReason, Mapping, Platform, SgMapping, SgRequest, UnmapError,
    UnmapReason,
};

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

/// A run of slots that holds the device's copy of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BounceSlot {
    word: u32,
    first: u8,
    count: u8,
    /// The device's copy, at the buffer's offset in the first slot.
    copy: PhysRange,
    /// The driver's memory.
    original: PhysRange,
}

impl BounceSlot {
    /// Returns the memory that the device uses.
    pub fn copy(&self) -> PhysRange {
        self.copy
    }

    /// Returns the driver's memory.
    pub fn original(&self) -> PhysRange {
        self.original
    }
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
    fn copied(&self, memory: &impl PhysMemory, original: PhysRange) -> Option<BounceSlot> {
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

impl<S: Space, F: Flush<S, B>, B> Dma<S, F, B> {
    /// Copies `memory` to bounce slots and maps the copy.
    #[cold]
    pub(crate) fn map_bounced<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        buffer: B,
        memory: PhysRange,
        direction: Direction,
    ) -> Result<(B, BounceSlot, MapResult), (B, MapError)> {
        let Some(slot) = self.copied(platform, memory) else {
            let error = map_error(at, Some(memory), MapReason::BeyondMask);
            return Err((buffer, error));
        };
        match self.map_cold(cpu, platform, at, MapArgs::one(&slot.copy, direction)) {
            Ok(placed) => Ok((buffer, slot, placed)),
            Err(reason) => {
                self.free_slots(&[slot]);
                Err((buffer, map_error(at, Some(memory), reason)))
            }
        }
    }

    fn copied<P: Platform>(&self, platform: &P, memory: PhysRange) -> Option<BounceSlot> {
        self.bounce.as_ref()?.copied(platform.memory(), memory)
    }

    /// Frees the slots of a mapping whose domain was detached: no device uses them any more.
    #[cold]
    fn free_detached_copies(&self, error: &UnmapError<B>, slots: &[BounceSlot]) {
        if let UnmapReason::Detached(_) = error.reason {
            self.free_slots(slots);
        }
    }

    fn free_slots(&self, slots: &[BounceSlot]) {
        if let Some(pool) = &self.bounce {
            slots.iter().for_each(|slot| pool.free(slot));
        }
    }

    /// Maps a list with pieces that the device cannot reach, by copying those pieces. Only for
    /// spaces without a table, where a failure leaves no entries to clear.
    #[cold]
    pub(crate) fn map_list_bounced<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        request: SgRequest<'_, B>,
    ) -> Result<(SgMapping<B>, usize), (B, MapError)> {
        let direction = request.direction;
        let mut ranges = Vec::with_capacity(request.pieces.len());
        let mut bounced = Vec::new();
        let mut failed = None;
        for piece in request.pieces {
            let placed = match self.map_cold(cpu, platform, at, MapArgs::one(piece, direction)) {
                Err(MapReason::BeyondMask) => match self.copied(platform, *piece) {
                    Some(slot) => {
                        bounced.push(slot);
                        self.map_cold(cpu, platform, at, MapArgs::one(&slot.copy, direction))
                    }
                    None => Err(MapReason::BeyondMask),
                },
                other => other,
            };
            match placed {
                Ok(placed) => ranges.push(placed.range),
                Err(reason) => {
                    failed = Some((*piece, reason));
                    break;
                }
            }
        }
        let told = segments(ranges.iter().copied(), request.limits, request.out);
        match (failed, ranges.first(), told) {
            (None, Some(first), Some(used)) => {
                let mapping = SgMapping {
                    live: LiveMapping::new(at, *first, direction, request.buffer),
                    contiguous: false,
                    piece_ranges: Vec::new(),
                    bounced,
                    steps: 0,
                };
                Ok((mapping, used))
            }
            (failed, ..) => {
                self.free_slots(&bounced);
                Err(match failed {
                    Some((piece, reason)) => (request.buffer, map_error(at, Some(piece), reason)),
                    None => request.into_map_error(at, MapReason::TooManySegments),
                })
            }
        }
    }

    /// Unmaps a list with bounced pieces, copies the device's data back and frees the slots.
    #[cold]
    pub(crate) fn unmap_list_bounced<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        mapping: SgMapping<B>,
    ) -> Result<F::Outcome, UnmapError<B>> {
        let direction = mapping.direction();
        let SgMapping { live, bounced, .. } = mapping;
        let outcome = self.unmap_cold(cpu, platform, at, live);
        let outcome = outcome.inspect_err(|error| self.free_detached_copies(error, &bounced))?;
        if let Some(pool) = &self.bounce {
            for slot in &bounced {
                pool.finish(platform.memory(), slot, direction);
            }
        }
        Ok(outcome)
    }

    /// Like [`sync_for_cpu`](Self::sync_for_cpu), for a list.
    pub fn sync_sg_for_cpu<P: Platform>(&self, platform: &P, mapping: &SgMapping<B>) {
        for slot in &mapping.bounced {
            copy_out(platform.memory(), slot, mapping.direction());
        }
    }

    /// Like [`sync_for_device`](Self::sync_for_device), for a list.
    pub fn sync_sg_for_device<P: Platform>(&self, platform: &P, mapping: &SgMapping<B>) {
        for slot in &mapping.bounced {
            copy_in(platform.memory(), slot, mapping.direction());
        }
    }

    /// Unmaps a bounced mapping, copies the device's data back and frees the slots.
    #[cold]
    pub(crate) fn unmap_bounced<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        live: LiveMapping<B>,
        slot: BounceSlot,
    ) -> Result<F::Outcome, UnmapError<B>> {
        let Some(pool) = &self.bounce else {
            return Err(UnmapError {
                device: at.device,
                range: live.range,
                reason: UnmapReason::NotAllocated(live.into_still_mapped()),
            });
        };
        let direction = live.direction;
        let outcome = self.unmap_cold(cpu, platform, at, live);
        let outcome = outcome.inspect_err(|error| self.free_detached_copies(error, &[slot]))?;
        pool.finish(platform.memory(), &slot, direction);
        Ok(outcome)
    }

    /// Transfers a live mapping to the CPU, which then reads the data that the device wrote.
    pub fn sync_for_cpu<P: Platform>(&self, platform: &P, mapping: &Mapping<B>) {
        if let Some(slot) = &mapping.bounce {
            copy_out(platform.memory(), slot, mapping.direction());
        }
    }

    /// Transfers a live mapping to the device, which then reads the data that the CPU wrote.
    pub fn sync_for_device<P: Platform>(&self, platform: &P, mapping: &Mapping<B>) {
        if let Some(slot) = &mapping.bounce {
            copy_in(platform.memory(), slot, mapping.direction());
        }
    }
}

fn copy_in(memory: &impl PhysMemory, slot: &BounceSlot, direction: Direction) {
    if direction != Direction::FromDevice {
        let (from, to) = (slot.original, slot.copy);
        let _ = copy(memory, from.start(), to.start(), from.bytes());
    }
}

fn copy_out(memory: &impl PhysMemory, slot: &BounceSlot, direction: Direction) {
    if direction != Direction::ToDevice {
        let (from, to) = (slot.copy, slot.original);
        let _ = copy(memory, from.start(), to.start(), from.bytes());
    }
}
