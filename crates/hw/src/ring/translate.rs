//! Translation by rings (rIOMMU Fig. 10; RI06 to RI08). The comments quote the figure where its
//! steps are taken.

use ringfence_pgtable::{RingPte, RingTable};
use ringfence_types::{
    Access, Fault, FaultReason, Iova, PhysAddr, PhysMemory, PhysRange, RequesterId, RingIova,
};

use super::logic::{NoSuccessorPolicy, ParameterPassing, RingLogic, target};
use super::riotlb::{Entry, RingKey};
use super::stats::count;
use super::unit::{RingUnit, RingUnitState};
use crate::unit::TranslationState;
use crate::{MAX_TRANSLATED_BYTES, Translate, Translation};

impl<L: RingLogic> Translate for RingUnit<L> {
    /// `rtranslate`. An access lies in one buffer: its length counts against the buffer's, not
    /// against the slot's 2^30 addresses.
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
            // The accesses that most devices make: to the slot used last, or the next one of a ring
            // used last.
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

/// No bus carries a request without a byte, or one longer than the walking unit takes.
#[inline]
const fn is_carried(bytes: u64) -> bool {
    bytes.wrapping_sub(1) < MAX_TRANSLATED_BYTES
}

/// Where the access leads if `pte` permits it. A buffer that ends past 2^64 - 1 has no such place.
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

/// Why `pte` does not permit the access, and from which of its bytes on.
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
        // A size has 30 bits, as an offset has.
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
    /// Brings `entry` to the slot of `at`: its `rpte`; `None` if it could not, and then `self.stop`
    /// says why not.
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
        match L::PASSING {
            ParameterPassing::Reference => self.entry_sync::<L, M>(mem, key, at, entry),
            ParameterPassing::Value => {
                let mut copy = *entry;
                self.entry_sync::<L, M>(mem, key, at, &mut copy)?;
                Some(entry.pte())
            }
        }
    }

    /// `riotlb_entry_sync`, and the `rpte` that it leaves: who has it need not look where it was
    /// stored just now.
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
            if L::NO_SUCCESSOR == NoSuccessorPolicy::Keeps {
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
        // rprefetch( d, e ); the figure has another one in rtable_walk, which would read the same.
        self.prefetch::<L, M>(mem, key, entry);
        Some(pte)
    }
}

impl<L: RingLogic> RingUnit<L> {
    /// An access that no entry permits: the unit is off, the length is none, or `self.work.stop`
    /// says why.
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

    /// `e.rpte` of a ring whose entry is not at hand, or of one that has none; `None` if the access
    /// is stopped, and then `self.work.stop` says why.
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
        // A ring without an entry. The entry stays if the access is then denied.
        count(&mut self.state.stats.misses);
        let mut entry = match self.table_walk(mem, device, at) {
            Ok(entry) => entry,
            Err(reason) => {
                self.state.last_fault = (at, reason);
                return None;
            }
        };
        if L::PASSING == ParameterPassing::Reference {
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
