//! The driver's side of one rRING (rIOMMU Fig. 9b, Fig. 11), with these repairs (errata 7 to 9):
//!
//! - A map never takes a slot that is in use, whatever the number of mappings.
//! - An unmap clears only a live mapping, with that mapping's exact range.
//! - The second word of an entry, stored last, makes it valid. Unmap clears that word first.
//! - An unmapped slot becomes free only after an invalidation of the ring, because a cached copy
//!   would still lead to its old buffer.

use core::ops::Range;

use ringfence_pgtable::{Coherency, RING_ENTRY_BYTES, RingPte, RingTable, RingWords, ring_words};
use ringfence_types::{Permissions, PhysAddr, PhysMemory, PhysRange, RingId, RingIova, RingSlot};

use super::dirty_lines::DirtyRingLines;
use super::slot_links::SlotLinks;
use super::slots::{SlotChoice, Slots, Stalls};
use crate::MapReason;
use crate::error::RingRefusal;
use crate::error::UnmapRefusal;

/// One ring of a device. All calls must pass the same memory.
#[derive(Debug)]
pub struct Ring {
    id: RingId,
    /// The address of slot 0.
    base: RingIova,
    table: RingTable,
    coherency: Coherency,
    /// The slots of the next maps, from the tail up; already reserved in `slots`. Never past the
    /// end of the ring.
    reserved: Range<u32>,
    slots: Slots,
    links: SlotLinks,
    /// True if walkers snoop and the ring has never mapped a list. A map or an unmap then changes
    /// only the entry in memory.
    plain: bool,
}

impl Ring {
    /// Creates the ring `id` over `table`, whose entries are zero in memory.
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

    /// Returns the ring's index, the rid.
    #[inline]
    pub fn id(&self) -> RingId {
        self.id
    }

    /// Returns the number of slots, N in the figure.
    #[inline]
    pub fn slots(&self) -> u32 {
        self.table.slots()
    }

    /// Returns the location of the entries.
    #[inline]
    pub fn table(&self) -> RingTable {
        self.table
    }

    /// Returns the rid, the table and the slots of a ring that has never had a mapping. `None` if
    /// it has had one.
    pub(super) fn into_unused(self) -> Option<(RingId, RingTable, Slots)> {
        (self.slots.free() == self.slots()).then_some((self.id, self.table, self.slots))
    }

    /// Returns the number of mapped slots.
    #[inline]
    pub fn live(&self) -> u32 {
        self.slots()
            .saturating_sub(self.free())
            .saturating_sub(self.withheld())
    }

    /// Returns the number of free slots, reserved ones included.
    #[inline]
    fn free(&self) -> u32 {
        self.slots.free() + self.reserved.end.wrapping_sub(self.reserved.start)
    }

    /// Returns the number of slots that are unmapped and wait for the end of their burst.
    #[inline]
    pub fn withheld(&self) -> u32 {
        self.slots.withheld()
    }

    /// Returns the number of maps that failed because the ring was full.
    #[inline]
    pub fn stalls(&self) -> Stalls {
        self.slots.stalls()
    }

    /// Returns the coherency of the page-table walkers.
    #[inline]
    pub fn coherency(&self) -> Coherency {
        self.coherency
    }

    /// Fig. 11 `map`: takes a slot for the buffer and fills its entry. A walker that does not snoop
    /// sees the entry after [`DirtyRingLines::sync`] of the calling CPU's `lines` for this ring.
    ///
    /// # Errors
    /// [`MapReason::RingFull`] or [`MapReason::Ring`]. Only a counter has changed.
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

    /// Maps each piece at its own slot. Returns the first piece's address, which represents the
    /// list.
    ///
    /// # Errors
    /// As for [`map`](Self::map). Either all pieces are mapped, or none.
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
        // Check every failure before filling the first entry: undoing an entry would race with the
        // device.
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

    /// Fig. 11 `unmap` without the end of the burst. Clears the entry of the mapping of `bytes`
    /// bytes at `iova`, or all entries of the list that begins there. The slots are withheld.
    ///
    /// # Errors
    /// No live mapping has exactly this range. Nothing changed.
    #[inline(always)]
    pub fn unmap<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut DirtyRingLines,
        iova: RingIova,
        bytes: u64,
    ) -> Result<(), UnmapRefusal> {
        // For an address in this ring with offset zero, only the slot's bits remain. Any other
        // address yields a value beyond every slot.
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

    /// Frees the slots of the mappings that were unmapped at each slot from `first` to `last`. The
    /// caller has invalidated the ring.
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

    /// Returns the addresses of the slots of the list that begins at `iova`.
    pub(crate) fn list(&self, iova: RingIova) -> impl Iterator<Item = RingIova> + '_ {
        let slots = core::iter::successors(Some(iova.slot().get()), |slot| self.links.next(*slot));
        slots.map(|slot| self.start(slot))
    }

    /// Returns the address of a slot of this ring.
    #[inline]
    fn start(&self, slot: u32) -> RingIova {
        // A slot of this ring fits in the slot field of an address.
        let relative = u64::from(slot) << RingIova::OFFSET_BITS;
        RingIova::from(self.base.iova().wrapping_add(relative))
    }

    /// Returns the next slot in ring order.
    fn tail(&self) -> u32 {
        if self.reserved.start < self.slots() {
            self.reserved.start
        } else {
            0
        }
    }

    /// Reserves the next slots. The caller has used all reserved ones.
    #[inline(never)]
    fn refill<M: PhysMemory + ?Sized>(&mut self, mem: &M) -> Result<(), MapReason> {
        let tail = self.tail();
        self.reserved = self
            .slots
            .reserve(tail)
            .ok_or_else(|| self.full(mem, tail))?;
        Ok(())
    }

    /// Checks that the next `pieces` maps find free slots.
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

    /// Creates the error of a map that found `slot` in use.
    #[cold]
    fn full<M: PhysMemory + ?Sized>(&mut self, mem: &M, slot: u32) -> MapReason {
        let table = self.table;
        let is_live = |slot| entry_of(&table, mem, slot).is_some_and(RingPte::is_set);
        let full = self.slots.full(self.id, slot, &self.reserved, is_live);
        MapReason::RingFull(full)
    }

    /// Returns the entry of `slot`. `None` if there is no such slot or it lies outside memory.
    #[inline]
    fn entry<'m, M: PhysMemory + ?Sized>(&self, mem: &'m M, slot: u32) -> Option<&'m RingWords> {
        entry_of(&self.table, mem, slot)
    }

    /// Returns the physical address of the entry of `slot`, which must be in the ring.
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

/// Returns the entry of `slot`. `None` if there is no such slot or it lies outside memory.
#[inline]
fn entry_of<'m, M: PhysMemory + ?Sized>(
    table: &RingTable,
    mem: &'m M,
    slot: u32,
) -> Option<&'m RingWords> {
    ring_words(mem, table.entry(RingSlot::new(slot)?)?).ok()
}

/// Creates the error of a buffer that an entry cannot express.
#[cold]
pub(super) fn buffer_too_long(error: ringfence_pgtable::RingFormatError) -> MapReason {
    MapReason::Ring(RingRefusal::Format(error))
}
