//! The rIOTLB: at most one entry for a ring (rIOMMU Fig. 9e; RI05).

use ringfence_pgtable::{RingPte, RingTable};
use ringfence_types::{DomainId, RequesterId, RingId, RingSlot};

use crate::cache::SetAssociative;
use crate::{Geometry, Replacement};

/// What is cached of one ring: the slot used last with a copy of its entry, and perhaps one of the
/// next slot's.
///
/// The figure reads the rDEVICE and the rRING again whenever the slot changes. Here the rRING is
/// kept with the entry and goes with it, so an operating system that resizes or moves a ring
/// invalidates the ring, as it has to anyway.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) table: RingTable,
    pte: RingPte,
    next: RingPte,
    slot: RingSlot,
    /// The slot after it: (e.rentry + 1) % r.size.
    successor: RingSlot,
    pub(super) domain: DomainId,
}

impl Entry {
    const NONE: Self = Self::new(
        DomainId::new(0),
        RingTable::EMPTY,
        RingSlot::FIRST,
        RingPte::ABSENT,
    );

    /// An entry whose next slot has not been read.
    #[inline]
    pub(super) const fn new(
        domain: DomainId,
        table: RingTable,
        slot: RingSlot,
        pte: RingPte,
    ) -> Self {
        Self {
            table,
            pte,
            next: RingPte::ABSENT,
            slot,
            successor: slot.next(table.slots()),
            domain,
        }
    }

    /// The slot used last.
    #[inline]
    pub(super) const fn slot(&self) -> RingSlot {
        self.slot
    }

    /// The slot after it, round the ring.
    #[inline]
    pub(super) const fn successor(&self) -> RingSlot {
        self.successor
    }

    /// `e.rentry = slot;`
    #[inline]
    pub(super) const fn set_slot(&mut self, slot: RingSlot) {
        self.slot = slot;
        self.successor = slot.next(self.table.slots());
    }

    /// `rpte`: the entry of the current slot.
    #[inline]
    pub(super) const fn pte(&self) -> RingPte {
        self.pte
    }

    /// `next`, which is valid or has no meaning.
    #[inline]
    pub(super) const fn next(&self) -> RingPte {
        self.next
    }

    #[inline]
    pub(super) const fn set_pte(&mut self, pte: RingPte) {
        self.pte = pte;
    }

    #[inline]
    pub(super) const fn set_next(&mut self, next: RingPte) {
        self.next = next;
    }
}

/// Which ring of the machine: requester and ring in one word, never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RingKey(u64);

const VALID: u64 = 1 << 32;

impl RingKey {
    #[inline]
    pub(super) const fn new(device: RequesterId, ring: RingId) -> Self {
        Self(VALID | (device.get() as u64) << 16 | ring.get() as u64)
    }

    #[inline]
    const fn device(raw: u64) -> RequesterId {
        RequesterId::new((raw >> 16) as u16)
    }

    #[inline]
    const fn ring(raw: u64) -> RingId {
        RingId::new(raw as u16)
    }

    /// Neighbouring rings of a device go to neighbouring sets, and the same ring of different
    /// devices to different ones. Most devices are function 0 of a bus of their own, so the bus
    /// takes part.
    #[inline]
    const fn selector(self) -> u64 {
        self.0 ^ (self.0 >> 16) ^ (self.0 >> 20)
    }
}

/// Entries by ring.
#[derive(Debug, Clone)]
pub(super) struct Riotlb {
    entries: SetAssociative<Entry>,
}

impl Riotlb {
    pub(super) fn new(geometry: Geometry, replacement: Replacement) -> Self {
        Self {
            entries: SetAssociative::new(geometry, replacement, Entry::NONE),
        }
    }

    pub(super) const fn live(&self) -> u32 {
        self.entries.live()
    }

    /// `riotlb_find`.
    #[inline]
    pub(super) fn find(&mut self, key: RingKey) -> Option<&mut Entry> {
        self.entries.lookup(key.selector(), key.0)
    }

    /// `riotlb_find` for the ring of its set that was used last, which costs one comparison.
    #[inline]
    pub(super) fn newest(&mut self, key: RingKey) -> Option<&mut Entry> {
        self.entries.newest_mut(key.selector(), key.0)
    }

    /// The entry of `key`, which does not count as a use.
    pub(super) fn peek(&mut self, key: RingKey) -> Option<&mut Entry> {
        self.entries.peek(key.selector(), key.0)
    }

    /// `riotlb_insert`, of a ring that has no entry. Whether another ring's had to go.
    #[inline]
    pub(super) fn insert(&mut self, key: RingKey, entry: Entry) -> bool {
        self.entries.insert(key.selector(), key.0, entry).is_some()
    }

    /// `riotlb_invalidate`.
    #[inline]
    pub(super) fn remove(&mut self, key: RingKey) -> bool {
        self.entries.remove(key.selector(), key.0)
    }

    /// Drops the entries that `doomed` says, by device, ring and domain.
    pub(super) fn remove_if(
        &mut self,
        mut doomed: impl FnMut(RequesterId, RingId, DomainId) -> bool,
    ) {
        self.entries
            .remove_if(|raw, entry| doomed(RingKey::device(raw), RingKey::ring(raw), entry.domain));
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}
