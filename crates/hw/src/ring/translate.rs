//! Translation by rings (rIOMMU Fig. 10; RI06 to RI08). The comments quote the figure where its steps are taken.

use ringfence_pgtable::{RingPte, RingTable};
use ringfence_types::{
    Access, DeviceId, Fault, FaultReason, Iova, PhysAddr, PhysMemory, PhysRange, RingIova,
};

use super::logic::{NoSuccessor, Passing, RingLogic, target};
use super::prefetch::prefetch;
use super::riotlb::{Entry, Key};
use super::stats::count;
use super::unit::RingUnit;
use crate::unit::Power;
use crate::{MAX_TRANSLATED_BYTES, Translate, Translation};

/// Where and why an access is stopped.
type Stop = (RingIova, FaultReason);

impl<L: RingLogic> Translate for RingUnit<L> {
    /// `rtranslate`. An access lies in one buffer: its length counts against the buffer's, not against the slot's 2^30 addresses.
    #[inline]
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: DeviceId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        let at = RingIova::from(iova);
        // The access that most devices make: to the slot used last, or the bytes behind them.
        if self.power == Power::On
            && let Some(entry) = self.riotlb.newest(Key::new(device, at.ring()))
            && entry.slot == at.slot()
            && let Some(range) = permitted::<L>(entry.pte, at, bytes, access)
        {
            count(&mut self.stats.hits);
            return Ok(Translation::one(range));
        }
        self.translate_any(mem, device, at, bytes, access)
    }
}

/// Where the access leads if `pte` permits it. A buffer that ends past 2^64 - 1 has no such place.
#[inline]
fn permitted<L: RingLogic>(
    pte: RingPte,
    at: RingIova,
    bytes: u64,
    access: Access,
) -> Option<PhysRange> {
    let offset = u64::from(at.offset());
    if !pte.allows(access) || !L::is_inside(offset, bytes, pte.bytes()) {
        return None;
    }
    target(pte, offset, bytes)
}

/// The same with the reason if not.
#[inline]
fn check<L: RingLogic>(
    pte: RingPte,
    at: RingIova,
    bytes: u64,
    access: Access,
) -> Result<PhysRange, Stop> {
    permitted::<L>(pte, at, bytes, access).ok_or_else(|| refusal::<L>(pte, at, bytes, access))
}

/// Why `pte` does not permit the access, and from which of its bytes on.
#[cold]
fn refusal<L: RingLogic>(pte: RingPte, at: RingIova, bytes: u64, access: Access) -> Stop {
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

impl<L: RingLogic> RingUnit<L> {
    #[inline(never)]
    fn translate_any<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: DeviceId,
        at: RingIova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        match self.try_translate(mem, device, at, bytes, access) {
            Ok(range) => Ok(Translation::one(range)),
            Err((at, reason)) => Err(self.io_page_fault(device, at.iova(), access, reason)),
        }
    }

    #[inline]
    fn try_translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: DeviceId,
        at: RingIova,
        bytes: u64,
        access: Access,
    ) -> Result<PhysRange, Stop> {
        if self.power == Power::Off {
            let range = PhysRange::new(PhysAddr::new(at.iova().get()), bytes);
            count(&mut self.stats.passed_through);
            return range.ok_or((at, FaultReason::BadLength));
        }
        // No bus carries a request without a byte, or one longer than the walking unit takes.
        if bytes == 0 || bytes > MAX_TRANSLATED_BYTES {
            return Err((at, FaultReason::BadLength));
        }
        // rIOTLB_entry e = riotlb_find( bus_dev_func, iova.rid );
        let key = Key::new(device, at.ring());
        let Some(entry) = self.riotlb.find(key) else {
            return self.miss(mem, device, at, bytes, access);
        };
        if entry.slot == at.slot() {
            count(&mut self.stats.hits);
            return check::<L>(entry.pte, at, bytes, access);
        }
        // if( e.rentry != iova.rentry ) riotlb_entry_sync( bus_dev_func, iova, e );
        let mut copy;
        let synced = match L::PASSING {
            Passing::Reference => &mut *entry,
            Passing::Value => {
                copy = *entry;
                &mut copy
            }
        };
        // u18 next = (e.rentry + 1) % d.rings[e.rid].size;
        let next = synced.slot.next(synced.table.slots());
        if synced.next.is_valid() && at.slot() == next {
            // e.rpte = e.next; e.rentry = next; e.next.valid = 0;
            synced.pte = synced.next;
            synced.slot = next;
            synced.next = RingPte::ABSENT;
            count(&mut self.stats.prefetch_hits);
        } else {
            // e = rtable_walk( bus_dev_func, iova );
            synced.pte = find_valid(mem, &synced.table, at)?;
            synced.slot = at.slot();
            if L::NO_SUCCESSOR == NoSuccessor::Clears {
                synced.next = RingPte::ABSENT;
            }
            count(&mut self.stats.slot_walks);
        }
        // rprefetch( d, e ); the figure has another one in rtable_walk, which would read the same.
        prefetch::<L, M>(
            mem,
            self.when,
            &mut self.waiting,
            &mut self.stats,
            key,
            synced,
        );
        check::<L>(entry.pte, at, bytes, access)
    }

    /// A ring without an entry: `rtable_walk` from the device on, and `riotlb_insert`. The entry stays if the access is then denied.
    #[inline]
    fn miss<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: DeviceId,
        at: RingIova,
        bytes: u64,
        access: Access,
    ) -> Result<PhysRange, Stop> {
        count(&mut self.stats.misses);
        // rDEVICE d = get_domain( bus_dev_func );
        let context = self.context(mem, device).map_err(|reason| (at, reason))?;
        // if( iova.rid >= d.size || iova.rentry >= d.rings[iova.rid].size ||
        let table = RingTable::read(mem, &context.rings, at.ring())
            .map_err(|error| (at, error.fault_reason()))?;
        //     ! d.rings[iova.rid].ring[iova.rentry].valid ) io_page_fault();
        let mut entry = Entry {
            domain: context.domain,
            slot: at.slot(),
            pte: find_valid(mem, &table, at)?,
            next: RingPte::ABSENT,
            table,
        };
        let pte = entry.pte;
        let key = Key::new(device, at.ring());
        if L::PASSING == Passing::Reference {
            prefetch::<L, M>(
                mem,
                self.when,
                &mut self.waiting,
                &mut self.stats,
                key,
                &mut entry,
            );
        }
        // riotlb_insert( e );
        if self.riotlb.insert(key, entry) {
            count(&mut self.stats.evictions);
        }
        check::<L>(pte, at, bytes, access)
    }

    /// Counts and records the fault.
    #[cold]
    #[inline(never)]
    fn io_page_fault(
        &mut self,
        device: DeviceId,
        iova: Iova,
        access: Access,
        reason: FaultReason,
    ) -> Fault {
        let fault = Fault {
            device,
            iova,
            access,
            reason,
        };
        count(&mut self.stats.faults);
        self.faults.record(&fault);
        fault
    }
}

/// The valid entry of the address's slot in `table`.
#[inline]
fn find_valid<M: PhysMemory + ?Sized>(
    mem: &M,
    table: &RingTable,
    at: RingIova,
) -> Result<RingPte, Stop> {
    match RingPte::read(mem, table, at.slot()) {
        Ok(pte) if pte.is_valid() => Ok(pte),
        Ok(_) => Err((at, FaultReason::NotPresent)),
        Err(error) => Err((at, error.fault_reason())),
    }
}
