//! A ring that one driver on one processor owns: no lock, no token a mapping, one burst.

use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_pgtable::{Coherency, RING_ENTRY_BYTES, RingPte, RingTable, RingWords};
use ringfence_types::{
    Batch, CachedLevels, Direction, DomainId, Flushed, Invalidation, InvalidationError,
    Invalidator, Pending, PhysAddr, PhysMemory, PhysRange, RequesterId, RingId, RingIova, RingSlot,
};

use super::cursor::Cursor;
use super::dirty_lines::{DirtyRingLines, LINE};
use super::error::{RingError, RingRefusal};
use super::mapping::{RingMapping, RingTag, RingUnmapError};
use super::slots::{Slots, Stalls};
use super::table::{Ring, buffer_too_long};
use crate::MapReason;
use crate::flush::Withheld;
use crate::mapping::HeldBuffer;

/// A [`Ring`] and the buffers that are in its keeping. Unmapped buffers come back when their burst
/// ends, after one invalidation for all of them; there is no other way to them. What is withheld
/// when it is dropped is leaked: the device may still reach it.
///
/// The promises are those of a [`Ring`]; what differs is how slots are found. One driver maps and
/// unmaps in the order of the ring, so two places go round it, one filling entries and one clearing
/// them, and only who leaves the order looks a slot up. Where walkers do not snoop a place ends
/// with its cache line, so that what is to be written back is thought of once a line, and never
/// where they do.
#[derive(Debug)]
pub struct OwnedRing<'m, B> {
    map_cursor: MapCursor<'m>,
    unmap_cursor: UnmapCursor<'m, B>,
    lines: DirtyRingLines,
    coherency: Coherency,
    /// Of `burst.domain` and `device`.
    tag: RingTag,
    device: RequesterId,
    /// The ring's table, kept mapped.
    entries: &'m [RingWords],
    table: RingTable,
    slots: Slots,
    burst: UnmappedSlots,
}

/// What every map changes, on a line of its own: stores to one line that follow each other leave
/// the processor together, and how many lines they change in turn is what a map costs.
#[derive(Debug)]
#[repr(align(64))]
struct MapCursor<'m> {
    /// The slots that the next maps take; set aside in `slots` already.
    next: Cursor<'m>,
    /// The slot after those that are set aside, of which `next` need not have all.
    end: usize,
}

/// The same of every unmap.
#[derive(Debug)]
#[repr(align(64))]
struct UnmapCursor<'m, B> {
    /// From the slot after the one unmapped last on.
    next: Cursor<'m>,
    /// Where the run of cleared slots that ends there begins. They are not in `slots` nor in
    /// `burst` yet.
    run: RingIova,
    withheld: Vec<HeldBuffer<B>>,
}

/// The slots of one ring that were unmapped in the open burst, as runs: a driver that unmaps in
/// order has one. The run that unmaps are at is the ring's until the burst ends.
#[derive(Debug)]
struct UnmappedSlots {
    domain: DomainId,
    ring: RingId,
    /// First slot and number of slots.
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
    /// The ring of `device`, whose context entry names `domain`, in `mem`. No other device is in
    /// that domain.
    ///
    /// # Errors
    /// [`RingError::Memory`]: the table is not in `mem`. [`RingError::NotEmpty`]: the ring has had mappings.
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

    /// The rid.
    #[inline]
    pub fn id(&self) -> RingId {
        self.burst.ring
    }

    /// What its mappings know it by.
    #[inline]
    pub(super) fn tag(&self) -> RingTag {
        self.tag
    }

    /// How many slots are mapped.
    pub fn live(&self) -> u32 {
        let next = self.slot_of(self.map_cursor.next.at());
        let set_aside = self.map_cursor.end.saturating_sub(next) as u32;
        self.slots
            .count()
            .saturating_sub(self.slots.free())
            .saturating_sub(set_aside)
            .saturating_sub(self.withheld())
    }

    /// How many slots are unmapped and wait for the end of their burst.
    pub fn withheld(&self) -> u32 {
        self.slots.withheld().wrapping_add(self.run_slots())
    }

    /// Maps put off so far.
    pub fn stalls(&self) -> Stalls {
        self.slots.stalls()
    }

    /// Makes the bytes of `memory` reachable by the device in `direction`, and takes `buffer` into
    /// custody. The device may be told of it after [`sync_map`](Self::sync_map).
    ///
    /// # Errors
    /// The buffer comes back. [`MapReason::RingFull`] is back-pressure: try again later.
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
        // The entry took 30 bits of length.
        let end = start.iova().wrapping_add(entry.bytes());
        Ok(RingMapping::new(end.into(), self.tag, buffer))
    }

    /// Makes what was mapped visible to a walker that does not snoop, line by line. Nothing is to
    /// be done where it does.
    #[inline]
    pub fn sync_map<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        if self.coherency == Coherency::NonCoherent {
            self.sync(mem);
        }
    }

    /// Writes back what has changed and waits. The places end here, and what changes next is
    /// written back again.
    fn sync<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        self.lines.sync(mem);
        self.map_cursor.next.stop();
        self.unmap_cursor.next.stop();
    }

    /// Takes a mapping down; its buffer comes back with the others of the burst.
    ///
    /// # Errors
    /// The mapping comes back: it is another ring's, or was unmapped before.
    #[inline(always)]
    pub fn unmap<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        mapping: RingMapping<B>,
    ) -> Result<Withheld, RingUnmapError<B>> {
        let end = mapping.end();
        let is_ours = mapping.is_of(self.tag);
        // In the order of the ring, the mapping is the one of the slot that unmaps are at.
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

    /// Ends the burst: writes back what was cleared, invalidates the ring once, and hands every
    /// buffer to `each`.
    ///
    /// # Errors
    /// The invalidation failed: buffers and slots stay withheld for another attempt.
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

    /// Goes on to the next slots that are set aside, and sets some aside if there are none.
    #[cold]
    #[inline(never)]
    fn refill<M: PhysMemory + ?Sized>(&mut self, mem: &M) -> Result<(), MapReason> {
        let mut tail = self.slot_of(self.map_cursor.next.at());
        if tail >= self.map_cursor.end {
            if tail >= self.entries.len() {
                tail = 0;
            }
            // A ring has no more slots than 32 bits.
            let Some(ready) = self.slots.reserve(tail as u32) else {
                // So that its slots count as withheld.
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

    /// Clears the entry of the mapping that ends before `end`, wherever that is; whether there is
    /// one.
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
        // The run that unmaps are at goes on, or another begins.
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

    /// Ends the run that unmaps are at, and begins another there.
    fn end_run(&mut self) {
        let slots = self.run_slots();
        if slots > 0 {
            let first = self.slot_of(self.unmap_cursor.run) as u32;
            self.burst.runs.push((first, slots));
            self.slots.withhold(slots);
            self.unmap_cursor.run = self.unmap_cursor.next.at();
        }
    }

    /// How many slots the run that unmaps are at has.
    fn run_slots(&self) -> u32 {
        let next = self.slot_of(self.unmap_cursor.next.at());
        // Not below the run's first one.
        next.wrapping_sub(self.slot_of(self.unmap_cursor.run)) as u32
    }

    fn base(&self) -> RingIova {
        RingIova::start(self.id(), RingSlot::FIRST)
    }

    /// The slots from `first` to `end` or, where walkers do not snoop, to the end of the line;
    /// `None` if the ring has not got them.
    fn slots_in_line(&self, first: usize, end: usize) -> Option<Cursor<'m>> {
        let end = match self.coherency {
            Coherency::Coherent => end,
            Coherency::NonCoherent => {
                end.min(first.saturating_add(entries_in_line(self.address_of(first))))
            }
        };
        Cursor::new(self.base(), self.entries, first..end)
    }

    /// The slot of an address in this ring; of any other, more than a slot can be.
    #[inline]
    fn slot_of(&self, at: RingIova) -> usize {
        let relative = at.iova().get() ^ self.base().iova().get();
        usize::try_from(relative >> RingIova::OFFSET_BITS).unwrap_or(usize::MAX)
    }

    /// Where the entry of a slot is.
    fn address_of(&self, slot: usize) -> PhysAddr {
        let bytes = (slot as u64).wrapping_mul(RING_ENTRY_BYTES);
        self.table.base().wrapping_add(bytes)
    }
}

/// How many entries the cache line has from the one at `at` on.
fn entries_in_line(at: PhysAddr) -> usize {
    (LINE.wrapping_sub(at.offset_in(LINE)) / RING_ENTRY_BYTES) as usize
}
