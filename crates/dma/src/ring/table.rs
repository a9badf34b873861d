//! One ring: the driver's half of an rRING (rIOMMU Fig. 9b, Fig. 11), repaired.
//!
//! What is repaired here (errata 7 to 9):
//! - a slot that is not free is never taken, however many mappings there are;
//! - only a live mapping is unmapped, by its own range;
//! - an entry becomes valid with its second word, stored last, and is cleared there first;
//! - an unmapped slot is not free before an invalidation of the ring: a cached copy would lead to
//!   the buffer that was there.

use core::ops::Range;

use ringfence_pgtable::{Coherency, RING_ENTRY_BYTES, RingPte, RingTable, RingWords, ring_words};
use ringfence_types::{Permissions, PhysAddr, PhysMemory, PhysRange, RingId, RingIova, RingSlot};

use super::dirty_lines::DirtyRingLines;
use super::error::RingRefusal;
use super::slot_links::SlotLinks;
use super::slots::{SlotChoice, Slots, Stalls};
use crate::MapReason;
use crate::space::UnmapRefusal;

/// One ring of a device. Every call is given the same memory.
#[derive(Debug)]
pub struct Ring {
    id: RingId,
    /// The address of slot 0.
    base: RingIova,
    table: RingTable,
    coherency: Coherency,
    /// The slots that the next maps take, from the tail on: they are taken from `slots` already.
    /// Never past the end of the ring.
    reserved: Range<u32>,
    slots: Slots,
    links: SlotLinks,
    /// Walkers snoop, and there has never been a list: an entry is all that a map or an unmap
    /// changes in memory.
    plain: bool,
}

impl Ring {
    /// The ring `id` over `table`, whose entries are clear in memory.
    pub(super) fn new(
        id: RingId,
        table: RingTable,
        choice: SlotChoice,
        coherency: Coherency,
    ) -> Self {
        Self {
            id,
            base: RingIova::start(id, RingSlot::FIRST),
            table,
            coherency,
            reserved: 0..0,
            slots: Slots::all(table.slots(), choice),
            links: SlotLinks::default(),
            plain: coherency == Coherency::Coherent,
        }
    }

    /// The rid.
    #[inline]
    pub fn id(&self) -> RingId {
        self.id
    }

    /// N: how many slots it has.
    #[inline]
    pub fn slots(&self) -> u32 {
        self.table.slots()
    }

    /// Where its entries are.
    #[inline]
    pub(super) fn table(&self) -> RingTable {
        self.table
    }

    /// The rid, the table and the slots of a ring that has no mappings, and never had.
    pub(super) fn into_unused(self) -> Option<(RingId, RingTable, Slots)> {
        (self.slots.free() == self.slots()).then_some((self.id, self.table, self.slots))
    }

    /// How many slots are mapped.
    #[inline]
    pub fn live(&self) -> u32 {
        self.slots()
            .saturating_sub(self.free())
            .saturating_sub(self.withheld())
    }

    /// How many slots are free.
    #[inline]
    fn free(&self) -> u32 {
        self.slots.free() + self.reserved.end.wrapping_sub(self.reserved.start)
    }

    /// How many slots are unmapped and wait for the end of their burst.
    #[inline]
    pub fn withheld(&self) -> u32 {
        self.slots.withheld()
    }

    /// Maps put off so far.
    #[inline]
    pub fn stalls(&self) -> Stalls {
        self.slots.stalls()
    }

    /// Whether walkers snoop.
    #[inline]
    pub fn coherency(&self) -> Coherency {
        self.coherency
    }

    /// Fig. 11 `map`: gives the buffer a slot and fills its entry. A walker that does not snoop
    /// sees the entry after [`DirtyRingLines::sync`] of the calling processor's `lines` of this
    /// ring.
    ///
    /// # Errors
    /// [`MapReason::RingFull`] or [`MapReason::Ring`]; nothing has changed but a counter.
    #[inline]
    pub fn map<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut DirtyRingLines,
        buffer: &PhysRange,
        permissions: Permissions,
    ) -> Result<RingIova, MapReason> {
        let entry = RingPte::new(buffer, permissions).map_err(buffer_too_long)?;
        if self.reserved.start == self.reserved.end {
            self.refill(mem)?;
        }
        let slot = self.reserved.start;
        let words = self
            .entry(mem, slot)
            .ok_or(MapReason::Ring(RingRefusal::Memory))?;
        self.reserved.start += 1;
        entry.store(words);
        if !self.plain && self.coherency == Coherency::NonCoherent {
            lines.filled(mem, &self.table, self.address_of(slot));
        }
        Ok(self.start(slot))
    }

    /// Maps each piece at a slot of its own. What comes back is the first piece's address and
    /// stands for the list.
    ///
    /// # Errors
    /// As for [`map`](Self::map); all pieces are mapped or none.
    pub fn map_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut DirtyRingLines,
        pieces: &[PhysRange],
        permissions: Permissions,
    ) -> Result<RingIova, MapReason> {
        let (Some(head), rest) = (pieces.first(), pieces.get(1..).unwrap_or_default()) else {
            return Err(MapReason::Empty);
        };
        // Whatever could go wrong is looked at before the first entry is filled: nothing has to be
        // undone under the device's eyes.
        for piece in rest {
            RingPte::new(piece, permissions).map_err(buffer_too_long)?;
        }
        if !rest.is_empty() {
            self.room_for(mem, pieces.len())?;
            mem.words(self.table.base(), self.slots() as usize * 2)
                .map_err(|_| MapReason::Ring(RingRefusal::Memory))?;
            self.links.reserve(self.slots());
            self.plain = false;
        }
        let head = self.map(mem, lines, head, permissions)?;
        let mut last = head;
        for piece in rest {
            // Cannot fail after the checks above.
            let next = self.map(mem, lines, piece, permissions)?;
            self.links.link(last.slot().get(), next.slot().get());
            last = next;
        }
        Ok(head)
    }

    /// Fig. 11 `unmap` without the end of the burst: clears the entry of the mapping of `bytes`
    /// bytes at `iova`, or those of the list that begins there. Its slots are withheld.
    ///
    /// # Errors
    /// No live mapping is exactly there; nothing has changed.
    #[inline(always)]
    pub fn unmap<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut DirtyRingLines,
        iova: RingIova,
        bytes: u64,
    ) -> Result<(), UnmapRefusal> {
        // Of an address in this ring and at a buffer's start, only the slot's bits are left; in any
        // other, more than a slot can be.
        let relative = iova.iova().get() ^ self.base.iova().get();
        let slot = relative.rotate_right(RingIova::OFFSET_BITS);
        let slot = u32::try_from(slot).map_err(|_| UnmapRefusal::NotAllocated)?;
        let words = self.entry(mem, slot).ok_or(UnmapRefusal::NotAllocated)?;
        if !RingPte::is_set_to(words, bytes) {
            return Err(UnmapRefusal::NotAllocated);
        }
        if !self.plain && self.links.is_linked(slot) {
            return self.unmap_list(mem, lines, slot);
        }
        self.withhold(mem, lines, slot, words);
        Ok(())
    }

    /// Clears the entries of the list that begins at `head`.
    #[inline(never)]
    fn unmap_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut DirtyRingLines,
        head: u32,
    ) -> Result<(), UnmapRefusal> {
        if self.links.is_inner(head) {
            return Err(UnmapRefusal::NotAllocated);
        }
        let mut next = Some(head);
        while let Some(slot) = next {
            if let Some(words) = self.entry(mem, slot) {
                self.withhold(mem, lines, slot, words);
            }
            next = self.links.next(slot);
        }
        Ok(())
    }

    /// Takes back the slots of what was unmapped at each slot from `first` to `last`, after an
    /// invalidation of the ring.
    pub(crate) fn release(&mut self, first: RingSlot, last: RingSlot) {
        let (first, last) = (first.get(), last.get());
        if self.links.is_empty() {
            self.slots
                .release(first, last.wrapping_sub(first).wrapping_add(1));
            return;
        }
        for head in first..=last {
            let mut next = Some(head);
            while let Some(slot) = next {
                next = self.links.unlink(slot);
                self.slots.release(slot, 1);
            }
        }
    }

    /// The addresses of the slots of the list that begins at `iova`.
    pub(crate) fn list(&self, iova: RingIova) -> impl Iterator<Item = RingIova> + '_ {
        let slots = core::iter::successors(Some(iova.slot().get()), |slot| self.links.next(*slot));
        slots.map(|slot| self.start(slot))
    }

    /// The address of a slot of this ring.
    #[inline]
    fn start(&self, slot: u32) -> RingIova {
        // A slot of this ring has no more bits than an address has for it.
        let relative = u64::from(slot) << RingIova::OFFSET_BITS;
        RingIova::from(self.base.iova().wrapping_add(relative))
    }

    /// The slot that comes next in the order of the ring.
    fn tail(&self) -> u32 {
        if self.reserved.start < self.slots() {
            self.reserved.start
        } else {
            0
        }
    }

    /// Sets the next slots aside, of which there are none.
    #[inline(never)]
    fn refill<M: PhysMemory + ?Sized>(&mut self, mem: &M) -> Result<(), MapReason> {
        let tail = self.tail();
        self.reserved = self
            .slots
            .reserve(tail)
            .ok_or_else(|| self.full(mem, tail))?;
        Ok(())
    }

    /// Whether `pieces` slots can be taken one after the other.
    fn room_for<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        pieces: usize,
    ) -> Result<(), MapReason> {
        let slots = self.slots();
        let pieces = u32::try_from(pieces)
            .ok()
            .filter(|pieces| *pieces <= slots)
            .ok_or(MapReason::Ring(RingRefusal::ListTooLong { slots }))?;
        let ready = self.reserved.end.wrapping_sub(self.reserved.start);
        match self.slots.first_busy(self.tail(), ready, pieces) {
            Some(slot) => Err(self.full(mem, slot)),
            None => Ok(()),
        }
    }

    /// The refusal of a map because `slot` is not free.
    #[cold]
    fn full<M: PhysMemory + ?Sized>(&mut self, mem: &M, slot: u32) -> MapReason {
        let table = self.table;
        let is_live = |slot| entry_of(&table, mem, slot).is_some_and(RingPte::is_set);
        let full = self.slots.full(self.id, slot, &self.reserved, is_live);
        MapReason::RingFull(full)
    }

    /// The entry of `slot`; `None` if there is no such slot, or it lies outside memory.
    #[inline]
    fn entry<'m, M: PhysMemory + ?Sized>(&self, mem: &'m M, slot: u32) -> Option<&'m RingWords> {
        entry_of(&self.table, mem, slot)
    }

    /// Where the entry of `slot`, which is in the ring, is.
    #[inline]
    fn address_of(&self, slot: u32) -> PhysAddr {
        self.table
            .base()
            .wrapping_add(u64::from(slot) * RING_ENTRY_BYTES)
    }

    /// Clears an entry and withholds its slot.
    #[inline]
    fn withhold<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut DirtyRingLines,
        slot: u32,
        words: &RingWords,
    ) {
        RingPte::clear(words);
        if !self.plain && self.coherency == Coherency::NonCoherent {
            lines.cleared(mem, &self.table, self.address_of(slot));
        }
        self.slots.withhold(1);
    }
}

/// The entry of `slot`; `None` if there is no such slot, or it lies outside memory.
#[inline]
fn entry_of<'m, M: PhysMemory + ?Sized>(
    table: &RingTable,
    mem: &'m M,
    slot: u32,
) -> Option<&'m RingWords> {
    ring_words(mem, table.entry(RingSlot::new(slot)?)?).ok()
}

/// The refusal of a buffer that an entry cannot express.
#[cold]
pub(super) fn buffer_too_long(error: ringfence_pgtable::RingFormatError) -> MapReason {
    MapReason::Ring(RingRefusal::Format(error))
}
