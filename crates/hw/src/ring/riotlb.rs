//! The rIOTLB: at most one entry per ring (rIOMMU Fig. 9e).

use ringfence_pgtable::{RingPte, RingTable};
use ringfence_types::{DomainId, RequesterId, RingId, RingSlot};

use crate::cache::SetAssociative;
use crate::{Geometry, Replacement};

/// The cached state of one ring: the slot used last with a copy of its rPTE, and possibly a copy of
/// the next rPTE.
///
/// In the figure, the hardware reads the rDEVICE and the rRING again whenever the slot changes.
/// Here the entry also caches the rRING. An operating system that resizes or moves a ring must
/// therefore invalidate the ring, as it must do anyway.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) table: RingTable,
    pte: RingPte,
    next: RingPte,
    slot: RingSlot,
    /// Successor of `slot`: (e.rentry + 1) % r.size.
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

    /// Creates an entry whose next slot has not been read.
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

    /// Returns the slot used last.
    #[inline]
    pub(super) const fn slot(&self) -> RingSlot {
        self.slot
    }

    /// Returns the slot after it, modulo the ring size.
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

    /// Returns `rpte`, the entry of the current slot.
    #[inline]
    pub(super) const fn pte(&self) -> RingPte {
        self.pte
    }

    /// Returns `next`. It is meaningful only if valid.
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

/// Identifies a ring of the machine: requester ID and ring in one word, never zero.
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

    /// Returns the set selector. Neighbouring rings of a device map to neighbouring sets; the same
    /// ring of different devices maps to different sets. Most devices are function 0 of a bus of
    /// their own, so the selector includes the bus.
    #[inline]
    const fn selector(self) -> u64 {
        self.0 ^ (self.0 >> 16) ^ (self.0 >> 20)
    }
}

/// rIOTLB entries by ring.
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

    /// `riotlb_find` (Fig. 10). Returns `None` if the ring has no entry.
    #[inline]
    pub(super) fn find(&mut self, key: RingKey) -> Option<&mut Entry> {
        self.entries.lookup(key.selector(), key.0)
    }

    /// `riotlb_find` for the ring used last in its set. Costs one comparison.
    #[inline]
    pub(super) fn newest(&mut self, key: RingKey) -> Option<&mut Entry> {
        self.entries.newest_mut(key.selector(), key.0)
    }

    /// Returns the entry of `key` without counting as a use.
    pub(super) fn peek(&mut self, key: RingKey) -> Option<&mut Entry> {
        self.entries.peek(key.selector(), key.0)
    }

    /// `riotlb_insert` of a ring without an entry. Returns true if it evicted the entry of another
    /// ring.
    #[inline]
    pub(super) fn insert(&mut self, key: RingKey, entry: Entry) -> bool {
        self.entries.insert(key.selector(), key.0, entry).is_some()
    }

    /// `riotlb_invalidate` (Fig. 11). Returns true if the ring had an entry.
    #[inline]
    pub(super) fn remove(&mut self, key: RingKey) -> bool {
        self.entries.remove(key.selector(), key.0)
    }

    /// Removes the entries for which `matches` returns true, given device, ring and domain.
    pub(super) fn remove_if(
        &mut self,
        mut matches: impl FnMut(RequesterId, RingId, DomainId) -> bool,
    ) {
        self.entries.remove_if(|raw, entry| {
            matches(RingKey::device(raw), RingKey::ring(raw), entry.domain)
        });
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    /// Every bit of bus, function and ring is part of the key, and the key gives them back.
    #[test]
    fn keys_of_all_devices_and_rings_differ() {
        let devices = [
            0x0000, 0x0001, 0x0100, 0x0108, 0x0200, 0x0208, 0x8000, 0xff00, 0xffff,
        ];
        let rings = [0, 1, 0x80, 0x100, 0x101, 0x8000, 0xff01, 0xffff];
        let mut seen = Vec::new();
        for device in devices.map(RequesterId::new) {
            for ring in rings.map(RingId::new) {
                let key = RingKey::new(device, ring);
                assert!(!seen.contains(&key), "{device} ring {ring:?}");
                assert_eq!(
                    (RingKey::device(key.0), RingKey::ring(key.0)),
                    (device, ring)
                );
                seen.push(key);
            }
        }
    }
}
