//! One ring: the driver's half of an rRING (rIOMMU Fig. 9b, Fig. 11), repaired.
//!
//! A slot goes round: *free*, *live* from map to unmap, *withheld* from unmap to the end of its burst, free. Fig. 11 knows two of the
//! three: it counts mappings and trusts the tail. What is repaired here (errata 7 to 9):
//! - a slot that is not free is never taken, however many mappings there are;
//! - only a live mapping is unmapped, by its own range;
//! - an entry becomes valid with its second word, stored last, and is cleared there first;
//! - an unmapped slot is not free before an invalidation of the ring: a cached copy would lead to the buffer that was there.

use ringfence_pgtable::{
    Coherency, Dirty, RING_ENTRY_BYTES, RingPte, RingTable, RingWords, ring_words,
};
use ringfence_types::{Permissions, PhysMemory, PhysRange, RingId, RingIova, RingSlot};

use super::error::{RingFull, RingRefusal, Wait};
use super::free::FreeSlots;
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
    table: RingTable,
    choice: SlotChoice,
    coherency: Coherency,
    /// The slot to try next; below the ring's size.
    tail: RingSlot,
    free: FreeSlots,
    /// Slots that are neither free nor live.
    withheld: u32,
    links: Links,
    /// Lines with entries that a walker that does not snoop may not see yet.
    dirty: Dirty,
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
            table,
            choice,
            coherency,
            tail: RingSlot::FIRST,
            free: FreeSlots::all(table.slots()),
            withheld: 0,
            links: Links::default(),
            dirty: Dirty::new(),
            stalls: Stalls::default(),
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

    /// How many slots are mapped.
    #[inline]
    pub fn live(&self) -> u32 {
        self.slots()
            .saturating_sub(self.free.count())
            .saturating_sub(self.withheld)
    }

    /// How many slots are unmapped and wait for the end of their burst.
    #[inline]
    pub fn withheld(&self) -> u32 {
        self.withheld
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
    /// [`sync`](Self::sync).
    ///
    /// # Errors
    /// [`MapReason::RingFull`] or [`MapReason::Ring`]; nothing has changed but a counter.
    #[inline]
    pub fn map<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        buffer: &PhysRange,
        permissions: Permissions,
    ) -> Result<RingIova, MapReason> {
        let entry = RingPte::new(buffer, permissions).map_err(too_long)?;
        let slot = self.free_slot(mem)?;
        let words = self
            .words(mem, slot)
            .ok_or(MapReason::Ring(RingRefusal::Memory))?;
        self.free.take(slot.get());
        self.tail = slot.next(self.slots());
        entry.store(words);
        self.touched(mem, slot);
        Ok(RingIova::start(self.id, slot))
    }

    /// Maps each piece at a slot of its own. What comes back is the first piece's address and stands for the list.
    ///
    /// # Errors
    /// As for [`map`](Self::map); all pieces are mapped or none.
    pub fn map_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
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
            self.room_for(mem, pieces.len())?;
            mem.words(self.table.base(), self.slots() as usize * 2)
                .map_err(|_| MapReason::Ring(RingRefusal::Memory))?;
            self.links.reserve(self.slots());
        }
        let head = self.map(mem, head, permissions)?;
        let mut last = head;
        for piece in rest {
            // Cannot fail after the checks above.
            let next = self.map(mem, piece, permissions)?;
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
        iova: RingIova,
        bytes: u64,
    ) -> Result<(), UnmapRefusal> {
        let slot = iova.slot();
        let words = self
            .words(mem, slot)
            .filter(|_| iova == RingIova::start(self.id, slot) && !self.links.is_inner(slot.get()))
            .ok_or(UnmapRefusal::NotAllocated)?;
        let entry = RingPte::load(words);
        if !entry.is_valid() || entry.bytes() != bytes {
            return Err(UnmapRefusal::NotAllocated);
        }
        self.withhold(mem, slot, words);
        let mut next = self.links.next(slot.get());
        while let Some(slot) = next.and_then(RingSlot::new) {
            if let Some(words) = self.words(mem, slot) {
                self.withhold(mem, slot, words);
            }
            next = self.links.next(slot.get());
        }
        Ok(())
    }

    /// Takes back the slots of what was unmapped at `slot`, after an invalidation of the ring.
    pub(crate) fn release(&mut self, slot: RingSlot) {
        let mut next = Some(slot.get());
        while let Some(slot) = next {
            next = self.links.unlink(slot);
            self.release_run(slot, 1);
        }
    }

    /// Takes `count` slots from `first` on back, which are in no lists.
    #[inline]
    pub(super) fn release_run(&mut self, first: u32, count: u32) {
        let given = self.free.give_run(first, count);
        self.withheld = self.withheld.saturating_sub(given);
    }

    /// Makes every change so far visible to a walker that does not snoop: each line once, and one wait (Fig. 11 `sync_mem`, once a burst
    /// instead of once an entry). Before the device is told of new addresses, and before an invalidation.
    #[inline]
    pub fn sync<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        self.dirty.sync(mem);
    }

    /// The addresses of the slots of the list that begins at `iova`.
    pub(crate) fn list(&self, iova: RingIova) -> impl Iterator<Item = RingIova> + '_ {
        let slots = core::iter::successors(Some(iova.slot().get()), |slot| self.links.next(*slot));
        slots
            .filter_map(RingSlot::new)
            .map(|slot| RingIova::start(self.id, slot))
    }

    /// The slot that the next map takes.
    #[inline]
    fn free_slot<M: PhysMemory + ?Sized>(&mut self, mem: &M) -> Result<RingSlot, MapReason> {
        if self.free.contains(self.tail.get()) {
            return Ok(self.tail);
        }
        let other = match self.choice {
            SlotChoice::Tail => None,
            SlotChoice::NextFree => self.free.next(self.tail.get()).and_then(RingSlot::new),
        };
        other.ok_or_else(|| self.full(mem, self.tail))
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
        let in_the_way = match self.choice {
            SlotChoice::NextFree => (self.free.count() < pieces).then_some(self.tail),
            SlotChoice::Tail => {
                core::iter::successors(Some(self.tail), |slot| Some(slot.next(slots)))
                    .take(pieces as usize)
                    .find(|slot| !self.free.contains(slot.get()))
            }
        };
        match in_the_way {
            Some(slot) => Err(self.full(mem, slot)),
            None => Ok(()),
        }
    }

    /// The refusal of a map because `slot` is not free.
    #[cold]
    fn full<M: PhysMemory + ?Sized>(&mut self, mem: &M, slot: RingSlot) -> MapReason {
        let ends_with_burst = match self.choice {
            SlotChoice::Tail => !self.words(mem, slot).is_some_and(RingPte::is_set),
            // Any slot will do.
            SlotChoice::NextFree => self.withheld > 0,
        };
        let (wait, count) = if ends_with_burst {
            (Wait::BurstEnd, &mut self.stalls.burst_end)
        } else {
            (Wait::Unmap, &mut self.stalls.unmap)
        };
        *count = count.saturating_add(1);
        MapReason::RingFull(RingFull {
            ring: self.id,
            slot,
            wait,
        })
    }

    /// The two words of `slot`; `None` if there is no such slot.
    #[inline]
    fn words<'m, M: PhysMemory + ?Sized>(
        &self,
        mem: &'m M,
        slot: RingSlot,
    ) -> Option<&'m RingWords> {
        ring_words(mem, self.table.entry(slot)?).ok()
    }

    #[inline]
    fn withhold<M: PhysMemory + ?Sized>(&mut self, mem: &M, slot: RingSlot, words: &RingWords) {
        RingPte::clear(words);
        self.withheld += 1;
        self.touched(mem, slot);
    }

    /// The entry of `slot` has changed.
    #[inline]
    fn touched<M: PhysMemory + ?Sized>(&mut self, mem: &M, slot: RingSlot) {
        if self.coherency == Coherency::NonCoherent
            && let Some(at) = self.table.entry(slot)
        {
            self.dirty.touch(mem, at, RING_ENTRY_BYTES);
        }
    }
}

/// The refusal of a buffer that an entry cannot express.
#[cold]
fn too_long(error: ringfence_pgtable::RingFormatError) -> MapReason {
    MapReason::Ring(RingRefusal::Format(error))
}
