//! A ring that one driver on one CPU owns: no lock, small mapping tokens, one burst.

use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_pgtable::{Coherency, RING_ENTRY_BYTES, RingPte, RingTable, RingWords};
use ringfence_types::{
    Batch, CachedLevels, Direction, DomainId, Flushed, Invalidation, InvalidationError,
    Invalidator, Pending, PhysAddr, PhysMemory, PhysRange, RequesterId, RingId, RingIova, RingSlot,
};

use super::cursor::Cursor;
use super::dirty_lines::{DirtyRingLines, LINE};
use super::mapping::{RingMapping, RingTag, RingUnmapError};
use super::slots::{Slots, Stalls};
use super::table::{Ring, buffer_too_long};
use crate::MapReason;
use crate::error::{RingError, RingRefusal};
use crate::token::{HeldBuffer, Withheld};

/// A [`Ring`] that also holds its drivers' buffers. It returns unmapped buffers at the end of their
/// burst, after one invalidation, and in no other way. Dropping it leaks the buffers that it
/// withholds, because the device may still reach them.
///
/// The guarantees are those of [`Ring`]; the slot lookup differs. Two cursors, one for map and one
/// for unmap, follow ring order. Only out-of-order unmaps look up their slot. If walkers do not
/// snoop, a cursor ends with its cache line, so the code checks for write-backs once per line. If
/// they snoop, it never checks.
#[derive(Debug)]
pub struct OwnedRing<'m, B> {
    map_cursor: MapCursor<'m>,
    unmap_cursor: UnmapCursor<'m, B>,
    lines: DirtyRingLines,
    coherency: Coherency,
    /// Identifies `burst.domain` and `device`.
    tag: RingTag,
    device: RequesterId,
    /// The ring's table, mapped for the ring's lifetime.
    entries: &'m [RingWords],
    table: RingTable,
    slots: Slots,
    burst: UnmappedSlots,
}

/// The state that every map changes, on its own cache line. Consecutive stores to one line leave
/// the CPU together. The cost of a map depends on how many different lines it stores to.
#[derive(Debug)]
#[repr(align(64))]
struct MapCursor<'m> {
    /// The slots of the next maps; already reserved in `slots`.
    next: Cursor<'m>,
    /// The end of the reserved slots. `next` may end earlier.
    end: usize,
}

/// The state that every unmap changes, on its own cache line.
#[derive(Debug)]
#[repr(align(64))]
struct UnmapCursor<'m, B> {
    /// Begins at the slot after the last unmapped one.
    next: Cursor<'m>,
    /// Start of the run of cleared slots that ends at `next`. The run is not yet in `slots` or
    /// `burst`.
    run: RingIova,
    withheld: Vec<HeldBuffer<B>>,
}

/// The slots of one ring that were unmapped in the open burst, as runs. A driver that unmaps in
/// order has one run. `unmap_cursor` holds the current run until it ends.
#[derive(Debug)]
struct UnmappedSlots {
    domain: DomainId,
    ring: RingId,
    /// First slot and number of slots of each run.
    runs: Vec<(u32, u32)>,
}

impl UnmappedSlots {
    fn release(this: Flushed<Self>, slots: &mut Slots) -> Self {
        let mut cleared = this.into_batch();
        for (first, count) in cleared.runs.drain(..) {
            slots.release(first, count);
        }
        cleared
    }
}

impl Batch for UnmappedSlots {
    fn covered_by(&self, request: &Invalidation) -> bool {
        request.covers(self.domain, &self.ring.pages(), CachedLevels::Leaves)
    }
}

impl<'m, B> OwnedRing<'m, B> {
    /// Creates the owned ring of `device` in `mem`. The device's context entry names `domain`, and
    /// no other device uses that domain.
    ///
    /// # Errors
    /// [`RingError::Memory`] if the table is not in `mem`. [`RingError::NotEmpty`] if the ring has
    /// had mappings.
    pub fn new<M: PhysMemory + ?Sized>(
        ring: Ring,
        mem: &'m M,
        domain: DomainId,
        device: RequesterId,
    ) -> Result<Self, RingError> {
        let coherency = ring.coherency();
        let (ring, table, slots) = ring.into_unused().ok_or(RingError::NotEmpty)?;
        let words = mem.words(table.base(), slots.count() as usize * 2);
        let (entries, _) = words.map_err(|_| RingError::Memory)?.as_chunks();
        let base = RingIova::start(ring, RingSlot::FIRST);
        let cursor = |slots| Cursor::new(base, entries, slots).ok_or(RingError::Memory);
        Ok(Self {
            map_cursor: MapCursor {
                next: cursor(0..0)?,
                end: 0,
            },
            unmap_cursor: UnmapCursor {
                next: cursor(0..0)?,
                run: base,
                withheld: Vec::new(),
            },
            lines: DirtyRingLines::none(),
            coherency,
            tag: RingTag::new(domain, device),
            device,
            entries,
            table,
            slots,
            burst: UnmappedSlots {
                domain,
                ring,
                runs: Vec::new(),
            },
        })
    }

    /// Returns the ring's index, the rid.
    #[inline]
    pub fn id(&self) -> RingId {
        self.burst.ring
    }

    /// Returns the tag of the ring's mappings.
    #[inline]
    pub(super) fn tag(&self) -> RingTag {
        self.tag
    }

    /// Returns the number of mapped slots.
    pub fn live(&self) -> u32 {
        let next = self.slot_of(self.map_cursor.next.at());
        let set_aside = self.map_cursor.end.saturating_sub(next) as u32;
        self.slots
            .count()
            .saturating_sub(self.slots.free())
            .saturating_sub(set_aside)
            .saturating_sub(self.withheld())
    }

    /// Returns the number of slots that are unmapped and wait for the end of their burst.
    pub fn withheld(&self) -> u32 {
        self.slots.withheld().wrapping_add(self.run_slots())
    }

    /// Returns the number of maps that failed because the ring was full.
    pub fn stalls(&self) -> Stalls {
        self.slots.stalls()
    }

    /// Maps the bytes of `memory` for the device in `direction`. The mapping owns `buffer`. The
    /// driver must call [`sync_map`](Self::sync_map) before it passes the address to the device.
    ///
    /// # Errors
    /// Returns the buffer. [`MapReason::RingFull`] is back-pressure: try again later.
    #[inline(always)]
    pub fn map<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        buffer: B,
        memory: &PhysRange,
        direction: Direction,
    ) -> Result<RingMapping<B>, (B, MapReason)> {
        let entry = match RingPte::new(memory, direction.permissions()) {
            Ok(entry) => entry,
            Err(error) => return Err((buffer, buffer_too_long(error))),
        };
        if self.map_cursor.next.slots() == 0
            && let Err(reason) = self.refill(mem)
        {
            return Err((buffer, reason));
        }
        let Some((words, start)) = self.map_cursor.next.step() else {
            return Err((buffer, MapReason::Ring(RingRefusal::Memory)));
        };
        entry.store(words);
        // `RingPte::new` checked that the length fits in 30 bits.
        let end = start.iova().wrapping_add(entry.bytes());
        Ok(RingMapping::new(end.into(), self.tag, buffer))
    }

    /// Makes new mappings visible to a walker that does not snoop, by cache lines. Does nothing if
    /// the walkers snoop.
    #[inline]
    pub fn sync_map<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        if self.coherency == Coherency::NonCoherent {
            self.sync(mem);
        }
    }

    /// Writes back all changed lines and waits. Stops both cursors, so that the next change marks
    /// its line again.
    fn sync<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        self.lines.sync(mem);
        self.map_cursor.next.stop();
        self.unmap_cursor.next.stop();
    }

    /// Unmaps a mapping. Its buffer is returned at the end of the burst.
    ///
    /// # Errors
    /// Returns the mapping if it belongs to another ring or was unmapped before.
    #[inline(always)]
    pub fn unmap<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        mapping: RingMapping<B>,
    ) -> Result<Withheld, RingUnmapError<B>> {
        let end = mapping.end();
        let is_ours = mapping.is_of(self.tag);
        // In ring order, the mapping is in the slot at the unmap cursor.
        let bytes = self.unmap_cursor.next.bytes_to(end);
        let cleared = bytes <= u64::from(RingIova::MAX_OFFSET)
            && match self.unmap_cursor.next.entry() {
                Some(words) if is_ours && RingPte::is_set_to(words, bytes) => {
                    self.unmap_cursor.next.step();
                    RingPte::clear(words);
                    true
                }
                _ => false,
            };
        if !(cleared || is_ours && self.clear_out_of_order(mem, end)) {
            return Err(RingUnmapError(mapping));
        }
        self.unmap_cursor.withheld.push(mapping.into_held_buffer());
        Ok(Withheld)
    }

    /// Ends the burst: writes cleared entries back, invalidates the ring once, and passes every
    /// buffer to `each`.
    ///
    /// # Errors
    /// The invalidation failed. Buffers and slots stay withheld; try again.
    pub fn end_burst<M: PhysMemory + ?Sized, I: Invalidator + ?Sized>(
        &mut self,
        mem: &M,
        invalidator: &mut I,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        if self.unmap_cursor.withheld.is_empty() {
            return Ok(());
        }
        self.sync_map(mem);
        self.end_run();
        let request = Invalidation::Ring {
            domain: self.burst.domain,
            device: self.device,
            ring: self.id(),
        };
        let empty = UnmappedSlots {
            runs: Vec::new(),
            ..self.burst
        };
        let batch = core::mem::replace(&mut self.burst, empty);
        let (batch, result) = match Pending::submit(invalidator, request, batch) {
            Ok(pending) => match pending.wait(invalidator) {
                Ok(flushed) => (UnmappedSlots::release(flushed, &mut self.slots), Ok(())),
                Err((pending, error)) => (pending.abandon(), Err(error)),
            },
            Err((batch, error)) => (batch, Err(error)),
        };
        self.burst = batch;
        if result.is_ok() {
            self.unmap_cursor
                .withheld
                .drain(..)
                .map(ManuallyDrop::into_inner)
                .for_each(each);
        }
        result
    }

    /// Advances the map cursor to the next reserved slots; reserves more if all are used.
    #[cold]
    #[inline(never)]
    fn refill<M: PhysMemory + ?Sized>(&mut self, mem: &M) -> Result<(), MapReason> {
        let mut tail = self.slot_of(self.map_cursor.next.at());
        if tail >= self.map_cursor.end {
            if tail >= self.entries.len() {
                tail = 0;
            }
            // A slot index fits in 32 bits.
            let Some(ready) = self.slots.reserve(tail as u32) else {
                // Counts the slots of the current run as withheld.
                self.end_run();
                let (id, entries) = (self.id(), self.entries);
                let is_live = |slot| entries.get(slot as usize).is_some_and(RingPte::is_set);
                let full = self.slots.full(id, tail as u32, &(0..0), is_live);
                return Err(MapReason::RingFull(full));
            };
            tail = ready.start as usize;
            self.map_cursor.end = ready.end as usize;
        }
        self.map_cursor.next = self
            .slots_in_line(tail, self.map_cursor.end)
            .ok_or(MapReason::Ring(RingRefusal::Memory))?;
        if self.coherency == Coherency::NonCoherent {
            self.lines.filled(mem, &self.table, self.address_of(tail));
        }
        Ok(())
    }

    /// Clears the entry of the mapping that ends before `end`, in any slot. Returns false if there
    /// is no such mapping.
    #[cold]
    #[inline(never)]
    fn clear_out_of_order<M: PhysMemory + ?Sized>(&mut self, mem: &M, end: RingIova) -> bool {
        let slot = self.slot_of(end);
        let Some(mut there) = self.slots_in_line(slot, self.entries.len()) else {
            return false;
        };
        let bytes = there.bytes_to(end);
        let Some((words, at)) = there.step() else {
            return false;
        };
        if !RingPte::is_set_to(words, bytes) {
            return false;
        }
        // Extend the current run if the slot is adjacent; otherwise start a new run.
        if at != self.unmap_cursor.next.at() {
            self.end_run();
            self.unmap_cursor.run = at;
        }
        self.unmap_cursor.next = there;
        RingPte::clear(words);
        if self.coherency == Coherency::NonCoherent {
            self.lines.cleared(mem, &self.table, self.address_of(slot));
        }
        true
    }

    /// Ends the current run of unmaps, and starts a new one at the cursor.
    fn end_run(&mut self) {
        let slots = self.run_slots();
        if slots > 0 {
            let first = self.slot_of(self.unmap_cursor.run) as u32;
            self.burst.runs.push((first, slots));
            self.slots.withhold(slots);
            self.unmap_cursor.run = self.unmap_cursor.next.at();
        }
    }

    /// Returns the number of slots in the current run of unmaps.
    fn run_slots(&self) -> u32 {
        let next = self.slot_of(self.unmap_cursor.next.at());
        // The cursor is never before the run's first slot.
        next.wrapping_sub(self.slot_of(self.unmap_cursor.run)) as u32
    }

    fn base(&self) -> RingIova {
        RingIova::start(self.id(), RingSlot::FIRST)
    }

    /// Returns a cursor from `first` to `end`, or to the end of the cache line if walkers do not
    /// snoop. `None` if the range exceeds the ring.
    fn slots_in_line(&self, first: usize, end: usize) -> Option<Cursor<'m>> {
        let end = match self.coherency {
            Coherency::Coherent => end,
            Coherency::NonCoherent => {
                end.min(first.saturating_add(entries_in_line(self.address_of(first))))
            }
        };
        Cursor::new(self.base(), self.entries, first..end)
    }

    /// Returns the slot of an address in this ring. For other addresses, returns an index beyond
    /// any slot.
    #[inline]
    fn slot_of(&self, at: RingIova) -> usize {
        let relative = at.iova().get() ^ self.base().iova().get();
        usize::try_from(relative >> RingIova::OFFSET_BITS).unwrap_or(usize::MAX)
    }

    /// Returns the physical address of a slot's entry.
    fn address_of(&self, slot: usize) -> PhysAddr {
        let bytes = (slot as u64).wrapping_mul(RING_ENTRY_BYTES);
        self.table.base().wrapping_add(bytes)
    }
}

/// Returns the number of entries in the cache line from the entry at `at` up.
fn entries_in_line(at: PhysAddr) -> usize {
    (LINE.wrapping_sub(at.offset_in(LINE)) / RING_ENTRY_BYTES) as usize
}
