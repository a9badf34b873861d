//! Translation by rings (rIOMMU Fig. 10). Comments quote the corresponding lines of
//! the figure.

use ringfence_pgtable::{RingPte, RingTable};
use ringfence_types::{
    Access, Fault, FaultReason, Iova, PhysAddr, PhysMemory, PhysRange, RequesterId, RingIova,
};

use super::logic::{RingLogic, target};
use super::riotlb::{Entry, RingKey};
use super::stats::count;
use super::unit::{RingUnit, RingUnitState};
use crate::unit::TranslationState;
use crate::{MAX_TRANSLATED_BYTES, Translate, Translation};

impl<L: RingLogic> Translate for RingUnit<L> {
    /// `rtranslate`. An access must lie in one buffer: its length is checked against the buffer,
    /// not against the slot's 2^30 addresses.
    #[inline(always)]
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        let at = RingIova::from(iova);
        let key = RingKey::new(device, at.ring());
        let translated = self.translation_state == TranslationState::Enabled && is_carried(bytes);
        if translated && let Some(entry) = self.riotlb.newest(key) {
            // Fast path for most accesses: the slot used last, or its successor, of the ring used
            // last in its set.
            if let Some(pte) = self.state.sync::<L, M>(mem, key, at, entry) {
                if let Some(range) = permitted::<L>(&pte, at, bytes, access) {
                    return Ok(Translation::one(range));
                }
                self.state.last_fault = refusal::<L>(pte, at, bytes, access);
            }
        } else if translated && let Some(pte) = self.current(mem, key, device, at) {
            if let Some(range) = permitted::<L>(&pte, at, bytes, access) {
                return Ok(Translation::one(range));
            }
            self.state.last_fault = refusal::<L>(pte, at, bytes, access);
        }
        self.translate_none(device, at, bytes, access)
    }
}

/// Returns true if the length is valid. No bus carries an empty request, or one longer than the
/// walking unit accepts.
#[inline]
const fn is_carried(bytes: u64) -> bool {
    bytes.wrapping_sub(1) < MAX_TRANSLATED_BYTES
}

/// Returns the physical range of the access if `pte` permits it; `None` also if the range exceeds
/// 2^64 - 1.
#[inline]
fn permitted<L: RingLogic>(
    pte: &RingPte,
    at: RingIova,
    bytes: u64,
    access: Access,
) -> Option<PhysRange> {
    let offset = u64::from(at.offset());
    if !pte.allows(access) || !L::is_inside(offset, bytes, pte.bytes()) {
        return None;
    }
    target(*pte, offset, bytes)
}

/// Returns the first byte of the access that `pte` does not permit, and the reason.
#[cold]
#[inline(never)]
fn refusal<L: RingLogic>(
    pte: RingPte,
    at: RingIova,
    bytes: u64,
    access: Access,
) -> (RingIova, FaultReason) {
    // if( iova.offset >= e.rpte.size || ! (e.rpte.dir & dir) ) io_page_fault();
    let offset = u64::from(at.offset());
    if !L::is_inside(offset, bytes, pte.bytes()) {
        let first = pte.bytes().max(offset);
        // The size and the offset have 30 bits each.
        let first = u32::try_from(first)
            .ok()
            .and_then(|first| RingIova::new(at.ring(), at.slot(), first));
        return (first.unwrap_or(at), FaultReason::BeyondBuffer);
    }
    let reason = match access {
        _ if pte.allows(access) => FaultReason::TableAccess,
        Access::Read => FaultReason::ReadDenied,
        Access::Write => FaultReason::WriteDenied,
    };
    (at, reason)
}

impl RingUnitState {
    /// Moves `entry` to the slot of `at` and returns its `rpte`. `None` on a fault, with the reason
    /// in `self.last_fault`.
    #[inline(always)]
    fn sync<L: RingLogic, M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        key: RingKey,
        at: RingIova,
        entry: &mut Entry,
    ) -> Option<RingPte> {
        if entry.slot() == at.slot() {
            count(&mut self.stats.hits);
            return Some(entry.pte());
        }
        // if( e.rentry != iova.rentry ) riotlb_entry_sync( bus_dev_func, iova, e );
        if L::UPDATES_ENTRY {
            return self.entry_sync::<L, M>(mem, key, at, entry);
        }
        let mut copy = *entry;
        self.entry_sync::<L, M>(mem, key, at, &mut copy)?;
        Some(entry.pte())
    }

    /// `riotlb_entry_sync`. Returns the new `rpte`, so that the caller need not reload it.
    #[inline(always)]
    fn entry_sync<L: RingLogic, M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        key: RingKey,
        at: RingIova,
        entry: &mut Entry,
    ) -> Option<RingPte> {
        let next = entry.next();
        // if( e.next.valid && (iova.rentry==next) ) {
        let pte = if at.slot() == entry.successor() && next.is_valid() {
            // e.rpte = e.next; e.rentry = next; e.next.valid = 0;
            entry.set_pte(next);
            if !L::CLEARS_NEXT {
                entry.set_next(RingPte::ABSENT);
            }
            count(&mut self.stats.prefetch_hits);
            next
        } else {
            // e = rtable_walk( bus_dev_func, iova );
            match RingPte::find(mem, &entry.table, at.slot()) {
                Ok(pte) => {
                    entry.set_pte(pte);
                    count(&mut self.stats.slot_walks);
                    pte
                }
                Err(error) => {
                    self.last_fault = (at, error.fault_reason());
                    return None;
                }
            }
        };
        entry.set_slot(at.slot());
        // rprefetch( d, e ); the figure calls it in rtable_walk as well, which would read the same
        // slot.
        self.prefetch::<L, M>(mem, key, entry);
        Some(pte)
    }
}

impl<L: RingLogic> RingUnit<L> {
    /// Handles an access without a permitting entry. Either translation is disabled, or the length
    /// is invalid, or `self.state.last_fault` holds the reason.
    #[cold]
    #[inline(never)]
    fn translate_none(
        &mut self,
        device: RequesterId,
        at: RingIova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        if self.translation_state == TranslationState::Disabled
            && let Some(range) = PhysRange::new(PhysAddr::new(at.iova().get()), bytes)
        {
            count(&mut self.state.stats.passed_through);
            return Ok(Translation::one(range));
        }
        let (at, reason) =
            if self.translation_state == TranslationState::Enabled && is_carried(bytes) {
                self.state.last_fault
            } else {
                (at, FaultReason::BadLength)
            };
        let fault = Fault {
            device,
            iova: at.iova(),
            access,
            reason,
        };
        count(&mut self.state.stats.faults);
        self.faults.record(&fault);
        Err(fault)
    }

    /// Returns `e.rpte` for a ring that is not the newest of its set or has no entry. `None` on a
    /// fault, with the reason in `self.state.last_fault`.
    #[inline(never)]
    fn current<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        key: RingKey,
        device: RequesterId,
        at: RingIova,
    ) -> Option<RingPte> {
        // rIOTLB_entry e = riotlb_find( bus_dev_func, iova.rid );
        if let Some(entry) = self.riotlb.find(key) {
            return self.state.sync::<L, M>(mem, key, at, entry);
        }
        // A ring without an entry. The new entry stays even if the access is then denied.
        count(&mut self.state.stats.misses);
        let mut entry = match self.table_walk(mem, device, at) {
            Ok(entry) => entry,
            Err(reason) => {
                self.state.last_fault = (at, reason);
                return None;
            }
        };
        if L::UPDATES_ENTRY {
            self.state.prefetch::<L, M>(mem, key, &mut entry);
        }
        // riotlb_insert( e );
        if self.riotlb.insert(key, entry) {
            count(&mut self.state.stats.evictions);
        }
        Some(entry.pte())
    }

    /// `rtable_walk` without its prefetch.
    #[inline]
    fn table_walk<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        at: RingIova,
    ) -> Result<Entry, FaultReason> {
        // rDEVICE d = get_domain( bus_dev_func );
        let context = self.context(mem, device)?;
        // if( iova.rid >= d.size || iova.rentry >= d.rings[iova.rid].size ||
        let table = RingTable::read(mem, &context.rings, at.ring())
            .map_err(|error| error.fault_reason())?;
        //     ! d.rings[iova.rid].ring[iova.rentry].valid ) io_page_fault();
        let pte = RingPte::find(mem, &table, at.slot()).map_err(|error| error.fault_reason())?;
        Ok(Entry::new(context.domain, table, at.slot(), pte))
    }
}
