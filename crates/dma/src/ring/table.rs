//! One ring: the driver's half of an rRING (rIOMMU Fig. 9b, Fig. 11), repaired.
//!
//! A slot goes round: *free*, *live* from map to unmap, *withheld* from unmap to the end of its burst, free. Fig. 11 knows two of the
//! three: it counts mappings and trusts the tail. What is repaired here (errata 7 to 9):
//! - a slot that is not free is never taken, however many mappings there are;
//! - only a live mapping is unmapped, by its own range;
//! - an entry becomes valid with its second word, stored last, and is cleared there first;
//! - an unmapped slot is not free before an invalidation of the ring: a cached copy would lead to the buffer that was there.

use core::ops::Range;

use ringfence_pgtable::{Coherency, RING_ENTRY_BYTES, RingPte, RingTable, RingWords, ring_words};
use ringfence_types::{Permissions, PhysAddr, PhysMemory, PhysRange, RingId, RingIova, RingSlot};

use super::error::{RingFull, RingRefusal, Wait};
use super::free::FreeSlots;
use super::lines::Lines;
use super::list::Links;
use crate::MapReason;
use crate::space::UnmapRefusal;

/// Which slot a map takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotChoice {
    /// The one at the tail, as in Fig. 11; if that is not free, the map waits for it.
    Tail,
    /// The first free one from the tail on, round the ring. For drivers that unmap in another order than they map.
    NextFree,
}

/// Slots from `first` to before `end`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub(super) first: u32,
    end: u32,
}

impl Run {
    const EMPTY: Self = Self { first: 0, end: 0 };

    /// How many they are.
    #[inline]
    pub(super) fn slots(self) -> u32 {
        self.end.wrapping_sub(self.first)
    }
}

/// Maps that a ring has put off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stalls {
    /// The slot was live.
    pub unmap: u64,
    /// The slot waited for the end of its burst.
    pub burst_end: u64,
}

/// One ring of a device. Every call is given the same memory.
#[derive(Debug)]
pub struct Ring {
    id: RingId,
    /// The address of slot 0.
    base: RingIova,
    table: RingTable,
    choice: SlotChoice,
    coherency: Coherency,
    /// The slots that the next maps take, from the tail on: they are taken from `free` already. Never past the end of the ring.
    ready: Range<u32>,
    /// Slots that are neither mapped, nor withheld, nor ready.
    free: FreeSlots,
    /// Where unmaps are.
    gone: Run,
    /// Slots that are neither free nor live, but for those of `gone`. Modulo 2^32: some of `gone` may be free again.
    withheld: u32,
    links: Links,
    /// Walkers snoop, and there has never been a list: an entry is all that a map or an unmap changes in memory.
    plain: bool,
    stalls: Stalls,
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
            choice,
            coherency,
            ready: 0..0,
            free: FreeSlots::all(table.slots()),
            gone: Run::EMPTY,
            withheld: 0,
            links: Links::default(),
            plain: coherency == Coherency::Coherent,
            stalls: Stalls::default(),
        }
    }

    /// The rid.
    #[inline]
    pub fn id(&self) -> RingId {
        self.id
    }

    /// The address of slot 0.
    #[inline]
    pub(super) fn base(&self) -> RingIova {
        self.base
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
        self.free.count() + self.ready.end.wrapping_sub(self.ready.start)
    }

    /// How many slots are unmapped and wait for the end of their burst.
    #[inline]
    pub fn withheld(&self) -> u32 {
        self.withheld.wrapping_add(self.gone.slots())
    }

    /// Maps put off so far.
    #[inline]
    pub fn stalls(&self) -> Stalls {
        self.stalls
    }

    /// Whether walkers snoop.
    #[inline]
    pub fn coherency(&self) -> Coherency {
        self.coherency
    }

    /// Fig. 11 `map`: gives the buffer a slot and fills its entry. A walker that does not snoop sees the entry after
    /// [`Lines::sync`] of the calling processor's `lines` of this ring.
    ///
    /// # Errors
    /// [`MapReason::RingFull`] or [`MapReason::Ring`]; nothing has changed but a counter.
    #[inline]
    pub fn map<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut Lines,
        buffer: &PhysRange,
        permissions: Permissions,
    ) -> Result<RingIova, MapReason> {
        self.map_in(ByPort(mem, self.table), mem, lines, buffer, permissions)
    }

    #[inline(always)]
    pub(super) fn map_in<M: PhysMemory + ?Sized>(
        &mut self,
        entries: impl Entries,
        mem: &M,
        lines: &mut Lines,
        buffer: &PhysRange,
        permissions: Permissions,
    ) -> Result<RingIova, MapReason> {
        let entry = RingPte::new(buffer, permissions).map_err(too_long)?;
        if self.ready.start == self.ready.end {
            self.refill(entries)?;
        }
        let slot = self.ready.start;
        let words = entries
            .entry(u64::from(slot))
            .ok_or(MapReason::Ring(RingRefusal::Memory))?;
        self.ready.start += 1;
        entry.store(words);
        if !self.plain && self.coherency == Coherency::NonCoherent {
            lines.filled(mem, self.address_of(slot));
        }
        Ok(self.start(slot))
    }

    /// Maps each piece at a slot of its own. What comes back is the first piece's address and stands for the list.
    ///
    /// # Errors
    /// As for [`map`](Self::map); all pieces are mapped or none.
    pub fn map_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut Lines,
        pieces: &[PhysRange],
        permissions: Permissions,
    ) -> Result<RingIova, MapReason> {
        let (Some(head), rest) = (pieces.first(), pieces.get(1..).unwrap_or_default()) else {
            return Err(MapReason::Empty);
        };
        // Whatever could go wrong is looked at before the first entry is filled: nothing has to be undone under the device's eyes.
        for piece in rest {
            RingPte::new(piece, permissions).map_err(too_long)?;
        }
        if !rest.is_empty() {
            self.room_for(ByPort(mem, self.table), pieces.len())?;
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

    /// Fig. 11 `unmap` without the end of the burst: clears the entry of the mapping of `bytes` bytes at `iova`, or those of the list that
    /// begins there. Its slots are withheld.
    ///
    /// # Errors
    /// No live mapping is exactly there; nothing has changed.
    #[inline]
    pub fn unmap<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut Lines,
        iova: RingIova,
        bytes: u64,
    ) -> Result<(), UnmapRefusal> {
        // Of an address in this ring and at a buffer's start, only the slot's bits are left; in any other, more than a slot can be.
        let relative = iova.iova().get() ^ self.base.iova().get();
        let slot = relative.rotate_right(RingIova::OFFSET_BITS);
        let bytes = u32::try_from(bytes).map_err(|_| UnmapRefusal::NotAllocated)?;
        let entries = ByPort(mem, self.table);
        self.unmap_in(entries, mem, lines, slot, bytes).map(drop)
    }

    /// The same for what may be a `slot` of this ring. Returns the run of cleared slots that ends here, if this one begins another.
    #[inline(always)]
    pub(super) fn unmap_in<M: PhysMemory + ?Sized>(
        &mut self,
        entries: impl Entries,
        mem: &M,
        lines: &mut Lines,
        slot: u64,
        bytes: u32,
    ) -> Result<Option<Run>, UnmapRefusal> {
        let words = entries.entry(slot).ok_or(UnmapRefusal::NotAllocated)?;
        // The ring has it: it is a slot.
        let slot = slot as u32;
        if !RingPte::is_set_to(words, bytes) {
            return Err(UnmapRefusal::NotAllocated);
        }
        if !self.plain && self.links.is_linked(slot) {
            self.unmap_list(entries, mem, lines, slot)?;
            return Ok(None);
        }
        Ok(self.withhold(mem, lines, slot, words))
    }

    /// Clears the entries of the list that begins at `head`.
    #[inline(never)]
    fn unmap_list<M: PhysMemory + ?Sized>(
        &mut self,
        entries: impl Entries,
        mem: &M,
        lines: &mut Lines,
        head: u32,
    ) -> Result<(), UnmapRefusal> {
        if self.links.is_inner(head) {
            return Err(UnmapRefusal::NotAllocated);
        }
        let mut next = Some(head);
        while let Some(slot) = next {
            if let Some(words) = entries.entry(u64::from(slot)) {
                self.withhold(mem, lines, slot, words);
            }
            next = self.links.next(slot);
        }
        Ok(())
    }

    /// Takes back the slots of what was unmapped at each slot from `first` to `last`, after an invalidation of the ring.
    pub(crate) fn release(&mut self, first: RingSlot, last: RingSlot) {
        let (first, last) = (first.get(), last.get());
        if self.links.is_empty() {
            self.release_run(first, last.wrapping_sub(first).wrapping_add(1));
            return;
        }
        for head in first..=last {
            let mut next = Some(head);
            while let Some(slot) = next {
                next = self.links.unlink(slot);
                self.release_run(slot, 1);
            }
        }
    }

    /// Takes `count` slots from `first` on back, which are in no lists.
    #[inline]
    pub(super) fn release_run(&mut self, first: u32, count: u32) {
        let given = self.free.give_run(first, count);
        self.withheld = self.withheld.wrapping_sub(given);
    }

    /// Ends the run that unmaps are at, and returns it.
    pub(super) fn end_run(&mut self) -> Run {
        let ended = core::mem::replace(&mut self.gone, Run::EMPTY);
        self.withheld = self.withheld.wrapping_add(ended.slots());
        ended
    }

    /// Ends the run that unmaps are at, and begins another at `slot`.
    #[cold]
    #[inline(never)]
    fn next_run(&mut self, slot: u32) -> Option<Run> {
        let ended = self.end_run();
        self.gone.first = slot;
        (ended.slots() > 0).then_some(ended)
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
        if self.ready.start < self.slots() {
            self.ready.start
        } else {
            0
        }
    }

    /// Sets the next slots aside, of which there are none.
    #[inline(never)]
    fn refill(&mut self, entries: impl Entries) -> Result<(), MapReason> {
        let tail = self.tail();
        let first = match self.choice {
            SlotChoice::Tail => tail,
            SlotChoice::NextFree => self.free.next(tail).unwrap_or(tail),
        };
        let run = self.free.take_run(first);
        if run == 0 {
            return Err(self.full(entries, tail));
        }
        self.ready = first..first + run;
        Ok(())
    }

    /// Whether `pieces` slots can be taken one after the other.
    fn room_for(&mut self, entries: impl Entries, pieces: usize) -> Result<(), MapReason> {
        let slots = self.slots();
        let pieces = u32::try_from(pieces)
            .ok()
            .filter(|pieces| *pieces <= slots)
            .ok_or(MapReason::Ring(RingRefusal::ListTooLong { slots }))?;
        let tail = self.tail();
        let in_the_way = match self.choice {
            SlotChoice::NextFree => (self.free() < pieces).then_some(tail),
            SlotChoice::Tail => (tail..slots)
                .chain(0..tail)
                .take(pieces as usize)
                .skip(self.ready.len())
                .find(|slot| !self.free.contains(*slot)),
        };
        match in_the_way {
            Some(slot) => Err(self.full(entries, slot)),
            None => Ok(()),
        }
    }

    /// The refusal of a map because `slot` is not free.
    #[cold]
    fn full(&mut self, entries: impl Entries, slot: u32) -> MapReason {
        let ends_with_burst = match self.choice {
            SlotChoice::Tail => !entries.entry(u64::from(slot)).is_some_and(RingPte::is_set),
            // Any slot will do.
            SlotChoice::NextFree => self.withheld() > 0,
        };
        let (wait, count) = if ends_with_burst {
            (Wait::BurstEnd, &mut self.stalls.burst_end)
        } else {
            (Wait::Unmap, &mut self.stalls.unmap)
        };
        *count = count.saturating_add(1);
        MapReason::RingFull(RingFull {
            ring: self.id,
            slot: self.start(slot).slot(),
            wait,
        })
    }

    /// Where the entry of `slot`, which is in the ring, is.
    #[inline]
    fn address_of(&self, slot: u32) -> PhysAddr {
        self.table
            .base()
            .wrapping_add(u64::from(slot) * RING_ENTRY_BYTES)
    }

    /// Clears an entry and withholds its slot. Returns the run of cleared slots that ends here, if this one begins another.
    #[inline]
    fn withhold<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut Lines,
        slot: u32,
        words: &RingWords,
    ) -> Option<Run> {
        RingPte::clear(words);
        if !self.plain && self.coherency == Coherency::NonCoherent {
            lines.cleared(mem, self.address_of(slot));
        }
        let ended = if self.gone.end == slot {
            None
        } else {
            self.next_run(slot)
        };
        self.gone.end = slot.wrapping_add(1);
        ended
    }
}

/// How a ring gets at its entries; `None` for a slot that it does not have.
pub(super) trait Entries: Copy {
    /// The words of `slot`.
    fn entry(&self, slot: u64) -> Option<&RingWords>;
}

/// Through the memory port, each time anew.
struct ByPort<'m, M: ?Sized>(&'m M, RingTable);

impl<M: ?Sized> Clone for ByPort<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: ?Sized> Copy for ByPort<'_, M> {}

impl<M: PhysMemory + ?Sized> Entries for ByPort<'_, M> {
    #[inline]
    fn entry(&self, slot: u64) -> Option<&RingWords> {
        let Self(mem, table) = self;
        let slot = RingSlot::new(u32::try_from(slot).ok()?)?;
        ring_words(*mem, table.entry(slot)?).ok()
    }
}

/// In the table itself, which is as long as the ring.
impl Entries for &[RingWords] {
    #[inline]
    fn entry(&self, slot: u64) -> Option<&RingWords> {
        self.get(usize::try_from(slot).ok()?)
    }
}

/// The refusal of a buffer that an entry cannot express.
#[cold]
fn too_long(error: ringfence_pgtable::RingFormatError) -> MapReason {
    MapReason::Ring(RingRefusal::Format(error))
}
