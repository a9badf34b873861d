//! The driver of Fig. 11 as printed, defects included (errata 7 and 8). It exists to measure the
//! cost of the defects; never use it for real devices.
//!
//! - `map` trusts the count of mappings and the tail: after an out-of-order unmap it overwrites a
//!   live entry.
//! - `unmap` decrements the count even if the entry was not valid.
//! - Entries change field by field, without ordering.
//! - A slot can be reused, and its buffer is returned, before the burst's invalidation.
//!
//! It departs from the figure only where the figure would corrupt this program's own memory: it
//! rejects an address that selects no slot.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::sync::atomic::{Ordering, fence};

use ringfence_dma::MapReason;
use ringfence_dma::ring::{DirtyRingLines, FullReason, Ring, RingFull, RingRefusal};
use ringfence_dma::space::{RingDriver, UnmapRefusal};
use ringfence_pgtable::{Coherency, RING_ENTRY_BYTES, RingPte, RingTable, ring_words};
use ringfence_types::{Permissions, PhysMemory, PhysRange, RingId, RingIova, RingSlot, Unmapped};

use crate::ring_entry::{clear_as_published, store_as_published};

/// `nmapped` has 18 bits (Fig. 9b) and wraps.
const NMAPPED: u32 = (1 << 18) - 1;

/// rRING with its software fields (Fig. 9b), driven as in Fig. 11.
#[derive(Debug)]
pub struct RingAsPublished {
    id: RingId,
    table: RingTable,
    coherency: Coherency,
    tail: RingSlot,
    nmapped: u32,
    /// The driver's record of its lists: the slots after the first one, indexed by the first one.
    /// Two lists can share a first slot only after an entry was overwritten; the older one then
    /// comes first.
    lists: BTreeMap<RingSlot, Vec<Vec<RingSlot>>>,
}

impl From<Ring> for RingAsPublished {
    /// Converts an empty ring to this driver.
    fn from(ring: Ring) -> Self {
        Self {
            id: ring.id(),
            table: ring.table(),
            coherency: ring.coherency(),
            tail: RingSlot::FIRST,
            nmapped: 0,
            lists: BTreeMap::new(),
        }
    }
}

impl RingAsPublished {
    /// Returns the ring's index, the rid.
    #[inline]
    pub fn id(&self) -> RingId {
        self.id
    }

    /// Returns the number of slots.
    #[inline]
    pub fn slots(&self) -> u32 {
        self.table.slots()
    }

    /// Returns the coherency of the page-table walkers.
    #[inline]
    pub fn coherency(&self) -> Coherency {
        self.coherency
    }

    /// Returns `nmapped`, the figure's count of mappings, which can be wrong.
    #[inline]
    pub fn nmapped(&self) -> u32 {
        self.nmapped
    }

    /// `map` of Fig. 11.
    ///
    /// # Errors
    /// [`MapReason::RingFull`] for the figure's OVERFLOW.
    #[inline]
    pub fn map<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        buffer: &PhysRange,
        permissions: Permissions,
    ) -> Result<RingIova, MapReason> {
        let entry = RingPte::new(buffer, permissions)
            .map_err(|error| MapReason::Ring(RingRefusal::Format(error)))?;
        // "if( r.nmapped == r.size ) return OVERFLOW;"
        if self.nmapped == self.table.slots() {
            return Err(MapReason::RingFull(RingFull {
                ring: self.id,
                slot: self.tail,
                reason: FullReason::Unmap,
            }));
        }
        // "u18 t = r.tail; r.tail = (r.tail + 1) % r.size; r.nmapped++;"
        let slot = self.tail;
        self.tail = slot.next(self.table.slots());
        self.nmapped = self.nmapped.wrapping_add(1) & NMAPPED;
        // "r.ring[t].phys_addr = pa;" and so on to "valid = 1", whatever the entry holds.
        let words = self
            .table
            .entry(slot)
            .and_then(|at| ring_words(mem, at).ok())
            .ok_or(MapReason::Ring(RingRefusal::Memory))?;
        store_as_published(entry, words);
        self.sync_mem(mem, slot);
        Ok(RingIova::start(self.id, slot))
    }

    /// Calls `map` for each piece until one overflows.
    ///
    /// # Errors
    /// As for [`map`](Self::map). The pieces that were mapped are unmapped again.
    pub fn map_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        pieces: &[PhysRange],
        permissions: Permissions,
    ) -> Result<RingIova, MapReason> {
        let mut made = Vec::with_capacity(pieces.len());
        for piece in pieces {
            match self.map(mem, piece, permissions) {
                Ok(iova) => made.push(iova),
                Err(reason) => {
                    for iova in made {
                        let _ = self.unmap(mem, iova);
                    }
                    return Err(reason);
                }
            }
        }
        let head = *made.first().ok_or(MapReason::Empty)?;
        if made.len() > 1 {
            let rest = made.iter().skip(1).map(|iova| iova.slot()).collect();
            self.lists.entry(head.slot()).or_default().push(rest);
        }
        Ok(head)
    }

    /// `unmap` of Fig. 11 without its last two lines, the invalidation.
    ///
    /// # Errors
    /// The address selects no slot of this ring.
    #[inline]
    pub fn unmap<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        iova: RingIova,
    ) -> Result<(), UnmapRefusal> {
        let slot = iova.slot();
        let words = self
            .table
            .entry(slot)
            .filter(|_| iova.ring() == self.id)
            .and_then(|at| ring_words(mem, at).ok())
            .ok_or(UnmapRefusal::NotAllocated)?;
        // "r.ring[iova.rentry].valid = 0; locked { r.nmapped--; }"
        clear_as_published(words);
        self.nmapped = self.nmapped.wrapping_sub(1) & NMAPPED;
        self.sync_mem(mem, slot);
        Ok(())
    }

    /// Calls `unmap` for each slot of the list, or for the buffer, that begins at `iova`.
    ///
    /// # Errors
    /// As for [`unmap`](Self::unmap).
    pub fn unmap_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        iova: RingIova,
    ) -> Result<(), UnmapRefusal> {
        self.unmap(mem, iova)?;
        let rest = match self.lists.get_mut(&iova.slot()) {
            Some(lists) if lists.len() > 1 => lists.remove(0),
            Some(_) => self
                .lists
                .remove(&iova.slot())
                .into_iter()
                .flatten()
                .next()
                .unwrap_or_default(),
            None => return Ok(()),
        };
        for slot in rest {
            self.unmap(mem, RingIova::start(self.id, slot))?;
        }
        Ok(())
    }

    /// Returns the slots of the newest list that begins at `iova`.
    fn list_slots(&self, iova: RingIova) -> impl Iterator<Item = RingIova> + '_ {
        let rest = self.lists.get(&iova.slot()).and_then(|lists| lists.last());
        core::iter::once(iova.slot())
            .chain(rest.into_iter().flatten().copied())
            .map(|slot| RingIova::start(self.id, slot))
    }

    /// `sync_mem` of Fig. 11, called for each entry.
    #[inline]
    fn sync_mem<M: PhysMemory + ?Sized>(&self, mem: &M, slot: RingSlot) {
        if self.coherency == Coherency::NonCoherent
            && let Some(at) = self.table.entry(slot)
        {
            fence(Ordering::SeqCst);
            mem.write_back(at, RING_ENTRY_BYTES);
            mem.drain();
        }
        fence(Ordering::SeqCst);
    }
}

impl RingDriver for RingAsPublished {
    /// "locked { r.nmapped--; }": the slot is free at once.
    type FreeProof = Unmapped;

    #[inline]
    fn coherency(&self) -> Coherency {
        self.coherency()
    }

    /// Makes each entry visible separately.
    #[inline]
    fn map_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        _lines: &mut DirtyRingLines,
        pieces: &[PhysRange],
        permissions: Permissions,
    ) -> Result<RingIova, MapReason> {
        self.map_list(mem, pieces, permissions)
    }

    #[inline]
    fn unmap_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        _lines: &mut DirtyRingLines,
        iova: RingIova,
        _bytes: u64,
    ) -> Result<(), UnmapRefusal> {
        self.unmap_list(mem, iova)
    }

    /// Returns the figure's counter `nmapped`, which can be wrong.
    #[inline]
    fn live(&self) -> u32 {
        self.nmapped()
    }

    #[inline]
    fn release(&mut self, _first: RingSlot, _last: RingSlot) {}

    fn list(&self, iova: RingIova) -> impl Iterator<Item = RingIova> + '_ {
        self.list_slots(iova)
    }
}
