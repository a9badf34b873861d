//! A ring that one driver on one processor owns: no lock, no token a mapping, one burst.

use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use ringfence_pgtable::{Coherency, RING_ENTRY_BYTES, RingPte, RingTable, RingWords};
use ringfence_types::{
    Batch, DeviceId, Direction, DomainId, Flushed, Invalidation, InvalidationError, Invalidator,
    Pending, PhysAddr, PhysMemory, PhysRange, RingId, RingIova, RingSlot,
};

use super::cursor::Cursor;
use super::error::{RingError, RingRefusal};
use super::lines::Lines;
use super::mapping::{RingMapping, RingUnmapError, Tag};
use super::slots::{Slots, Stalls};
use super::table::{Ring, too_long};
use crate::MapReason;
use crate::flush::Withheld;
use crate::mapping::Custody;

/// A [`Ring`] and the buffers that are in its keeping. Unmapped buffers come back when their burst ends, after one invalidation for all
/// of them; there is no other way to them. What is withheld when it is dropped is leaked: the device may still reach it.
///
/// The promises are those of a [`Ring`]; what differs is how slots are found. One driver maps and unmaps in the order of the ring, so two
/// places go round it, one filling entries and one clearing them, and only who leaves the order looks a slot up.
#[derive(Debug)]
pub struct OwnedRing<'m, B> {
    filling: Filling<'m>,
    clearing: Clearing<'m, B>,
    lines: Lines,
    coherency: Coherency,
    /// Of `burst.domain` and `device`.
    tag: Tag,
    device: DeviceId,
    /// The ring's table, kept mapped.
    entries: &'m [RingWords],
    table: RingTable,
    slots: Slots,
    burst: Cleared,
}

/// What every map changes, on a line of its own: stores to one line that follow each other leave the processor together, and how many lines
/// they change in turn is what a map costs.
#[derive(Debug)]
#[repr(align(64))]
struct Filling<'m> {
    /// The slots that the next maps take; set aside in `slots` already.
    next: Cursor<'m>,
}

/// The same of every unmap.
#[derive(Debug)]
#[repr(align(64))]
struct Clearing<'m, B> {
    /// From the slot after the one unmapped last to the ring's end.
    next: Cursor<'m>,
    /// Where the run of cleared slots that ends there begins. They are not in `slots` nor in `burst` yet.
    run: RingIova,
    withheld: Vec<Custody<B>>,
}

/// The slots of one ring that were unmapped in the open burst, as runs: a driver that unmaps in order has one. The run that unmaps are at
/// is the ring's until the burst ends.
#[derive(Debug)]
struct Cleared {
    domain: DomainId,
    ring: RingId,
    /// First slot and number of slots.
    runs: Vec<(u32, u32)>,
}

impl Cleared {
    fn release(this: Flushed<Self>, slots: &mut Slots) -> Self {
        let mut cleared = this.into_batch();
        for (first, count) in cleared.runs.drain(..) {
            slots.release(first, count);
        }
        cleared
    }
}

impl Batch for Cleared {
    fn covered_by(&self, request: &Invalidation) -> bool {
        request.covers(self.domain, &self.ring.pages())
    }
}

impl<'m, B> OwnedRing<'m, B> {
    /// The ring of `device`, whose context entry names `domain`, in `mem`. No other device is in that domain.
    ///
    /// # Errors
    /// [`RingError::Memory`]: the table is not in `mem`. [`RingError::NotEmpty`]: the ring has had mappings.
    pub fn new<M: PhysMemory + ?Sized>(
        ring: Ring,
        mem: &'m M,
        domain: DomainId,
        device: DeviceId,
    ) -> Result<Self, RingError> {
        let coherency = ring.coherency();
        let (ring, table, slots) = ring.into_unused().ok_or(RingError::NotEmpty)?;
        let words = mem.words(table.base(), slots.count() as usize * 2);
        let (entries, _) = words.map_err(|_| RingError::Memory)?.as_chunks();
        let base = RingIova::start(ring, RingSlot::FIRST);
        let cursor = |slots| Cursor::new(base, entries, slots).ok_or(RingError::Memory);
        Ok(Self {
            filling: Filling {
                next: cursor(0..0)?,
            },
            clearing: Clearing {
                next: cursor(0..entries.len())?,
                run: base,
                withheld: Vec::new(),
            },
            lines: Lines::none(),
            coherency,
            tag: Tag::new(domain, device),
            device,
            entries,
            table,
            slots,
            burst: Cleared {
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
    pub(super) fn tag(&self) -> Tag {
        self.tag
    }

    /// How many slots are mapped.
    pub fn live(&self) -> u32 {
        let set_aside = self.filling.next.slots() as u32;
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

    /// Makes the bytes of `memory` reachable by the device in `direction`, and takes `buffer` into custody. The device may be told of it
    /// after [`doorbell`](Self::doorbell).
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
            Err(error) => return Err((buffer, too_long(error))),
        };
        if self.filling.next.slots() == 0
            && let Err(reason) = self.refill()
        {
            return Err((buffer, reason));
        }
        let Some((words, start)) = self.filling.next.step() else {
            return Err((buffer, MapReason::Ring(RingRefusal::Memory)));
        };
        entry.store(words);
        if self.coherency == Coherency::NonCoherent {
            let at = self.address_of(start);
            self.lines.filled(mem, &self.table, at);
        }
        // The entry took 30 bits of length.
        let end = start.iova().wrapping_add(entry.bytes());
        Ok(RingMapping::new(end.into(), self.tag, buffer))
    }

    /// Makes what was mapped visible to a walker that does not snoop, line by line. Nothing is to be done where it does.
    #[inline]
    pub fn doorbell<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        self.lines.sync(mem);
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
        // In the order of the ring, the mapping is the one of the slot that unmaps are at.
        let mut bytes = self.clearing.next.bytes_to(end);
        while bytes > u64::from(RingIova::MAX_OFFSET) {
            if !self.go_to(end) {
                return Err(RingUnmapError(mapping));
            }
            bytes = self.clearing.next.bytes_to(end);
        }
        match self.clearing.next.entry() {
            Some(words) if mapping.is_of(self.tag) && RingPte::is_set_to(words, bytes) => {
                self.clearing.next.step();
                RingPte::clear(words);
                if self.coherency == Coherency::NonCoherent {
                    let at = self.address_of(end);
                    self.lines.cleared(mem, &self.table, at);
                }
                self.clearing.withheld.push(mapping.into_custody());
                Ok(Withheld)
            }
            _ => Err(RingUnmapError(mapping)),
        }
    }

    /// Ends the burst: writes back what was cleared, invalidates the ring once, and hands every buffer to `each`.
    ///
    /// # Errors
    /// The invalidation failed: buffers and slots stay withheld for another attempt.
    pub fn end_burst<M: PhysMemory + ?Sized, I: Invalidator + ?Sized>(
        &mut self,
        mem: &M,
        invalidator: &mut I,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        if self.clearing.withheld.is_empty() {
            return Ok(());
        }
        self.lines.sync(mem);
        self.end_run();
        let request = Invalidation::Ring {
            domain: self.burst.domain,
            device: self.device,
            ring: self.id(),
        };
        let empty = Cleared {
            runs: Vec::new(),
            ..self.burst
        };
        let batch = core::mem::replace(&mut self.burst, empty);
        let (batch, result) = match Pending::submit(invalidator, request, batch) {
            Ok(pending) => match pending.wait(invalidator) {
                Ok(flushed) => (Cleared::release(flushed, &mut self.slots), Ok(())),
                Err((pending, error)) => (pending.abandon(), Err(error)),
            },
            Err((batch, error)) => (batch, Err(error)),
        };
        self.burst = batch;
        if result.is_ok() {
            self.clearing
                .withheld
                .drain(..)
                .map(ManuallyDrop::into_inner)
                .for_each(each);
        }
        result
    }

    /// Sets the next slots aside, of which there are none.
    #[cold]
    #[inline(never)]
    fn refill(&mut self) -> Result<(), MapReason> {
        let mut tail = self.slot_of(self.filling.next.at());
        if tail >= self.entries.len() {
            tail = 0;
        }
        // A ring has no more slots than 32 bits.
        let Some(ready) = self.slots.take(tail as u32) else {
            // So that its slots count as withheld.
            self.end_run();
            let (id, entries) = (self.id(), self.entries);
            let is_live = |slot| entries.get(slot as usize).is_some_and(RingPte::is_set);
            let full = self.slots.full(id, tail as u32, &(0..0), is_live);
            return Err(MapReason::RingFull(full));
        };
        self.filling.next = self
            .cursor(ready.start as usize..ready.end as usize)
            .ok_or(MapReason::Ring(RingRefusal::Memory))?;
        Ok(())
    }

    /// Ends the run that unmaps are at, and begins another at the slot of `end`. Whether that is one of this ring.
    #[cold]
    #[inline(never)]
    fn go_to(&mut self, end: RingIova) -> bool {
        match self.cursor(self.slot_of(end)..self.entries.len()) {
            Some(there) => {
                self.end_run();
                self.clearing.run = there.at();
                self.clearing.next = there;
                true
            }
            None => false,
        }
    }

    /// Ends the run that unmaps are at, and begins another there.
    fn end_run(&mut self) {
        let slots = self.run_slots();
        if slots > 0 {
            let first = self.slot_of(self.clearing.run) as u32;
            self.burst.runs.push((first, slots));
            self.slots.withhold(slots);
            self.clearing.run = self.clearing.next.at();
        }
    }

    /// How many slots the run that unmaps are at has.
    fn run_slots(&self) -> u32 {
        let next = self.slot_of(self.clearing.next.at());
        // Not below the run's first one.
        next.wrapping_sub(self.slot_of(self.clearing.run)) as u32
    }

    fn base(&self) -> RingIova {
        RingIova::start(self.id(), RingSlot::FIRST)
    }

    fn cursor(&self, slots: core::ops::Range<usize>) -> Option<Cursor<'m>> {
        Cursor::new(self.base(), self.entries, slots)
    }

    /// The slot of an address in this ring; of any other, more than a slot can be.
    #[inline]
    fn slot_of(&self, at: RingIova) -> usize {
        let relative = at.iova().get() ^ self.base().iova().get();
        usize::try_from(relative >> RingIova::OFFSET_BITS).unwrap_or(usize::MAX)
    }

    /// Where the entry of the slot at `at` is.
    #[inline]
    fn address_of(&self, at: RingIova) -> PhysAddr {
        self.table
            .base()
            .wrapping_add(self.slot_of(at) as u64 * RING_ENTRY_BYTES)
    }
}
