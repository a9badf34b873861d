//! The free slots of a [`ShadowSpace`]: those of a CPU, those of the pool, and new ones.

use alloc::vec::Vec;

use ringfence_iova::IovaAllocator;
use ringfence_pgtable::MapRequest;
use ringfence_types::{Lock, Permissions};

use super::page::{ORDERS, SlotKind};
use super::pool::{ShadowDepot, batch, kept_at_most};
use super::{ShadowCpu, ShadowSpace};
use crate::error::ShadowError;
use crate::space::{AddressLimits, GRANULE, IoPageTable};
use crate::{MapReason, Platform};

impl<A, T, L> ShadowSpace<A, T, L>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
{
    /// Takes a slot of at least `pages` pages. The inner error is the reason why there is none.
    ///
    /// # Errors
    /// The allocator or the table refused the new slots.
    #[inline]
    pub(super) fn take_for<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        pages: u64,
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<Result<(u32, SlotKind), ShadowError>, MapReason> {
        let wanted = SlotKind::for_pages(pages, permissions);
        let slot = match wanted {
            Some(kind) if self.reaches_pool(limits) => self.take(cpu, platform, kind, limits)?,
            _ => None,
        };
        // Another CPU may have placed the pool since.
        let slot = match slot {
            Some((slot, kind)) if !self.reaches_pool(limits) => {
                self.put_back(cpu, slot, kind);
                None
            }
            found => found,
        };
        Ok(slot.ok_or_else(|| match wanted {
            None => ShadowError::TooLong {
                pages,
                slot: 1 << (ORDERS - 1),
            },
            Some(_) if !self.reaches_pool(limits) => ShadowError::BeyondMask,
            Some(_) => ShadowError::Exhausted {
                pages,
                pool: u64::from(self.pool.total()),
            },
        }))
    }

    /// Takes a slot, and maps new ones if necessary. Returns it with its kind. `None` if the pool
    /// has none.
    ///
    /// # Errors
    /// The allocator or the table refused the new slots.
    #[inline]
    pub(super) fn take<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        kind: SlotKind,
        limits: AddressLimits,
    ) -> Result<Option<(u32, SlotKind)>, MapReason> {
        // A refill adds to the free lists, so that only one statement takes a slot.
        let mut kind = kind;
        if cpu.free.of(kind).is_none_or(|own| own.is_empty()) {
            match self.refill(cpu, platform, kind, limits)? {
                Some(found) => kind = found,
                None => return Ok(None),
            }
        }
        let slot = cpu.free.of(kind).and_then(Vec::pop);
        Ok(slot.map(|slot| (slot, kind)))
    }

    /// Adds slots to this CPU's free lists. Returns their kind, which may be larger; `None` if the
    /// pool has none.
    #[cold]
    #[inline(never)]
    fn refill<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        kind: SlotKind,
        limits: AddressLimits,
    ) -> Result<Option<SlotKind>, MapReason> {
        if self.take_shared(cpu, kind) || self.map_run(cpu, platform, kind, limits)? {
            return Ok(Some(kind));
        }
        // A larger slot serves a smaller buffer.
        let larger = (kind.order..ORDERS as u8).skip(1);
        let mut kinds = larger.map(|order| SlotKind { order, ..kind });
        Ok(kinds.find(|kind| {
            let own = cpu.free.of(*kind);
            own.is_some_and(|own| !own.is_empty()) || self.take_shared(cpu, *kind)
        }))
    }

    /// Takes slots that other CPUs returned. Returns false if there are none.
    fn take_shared(&self, cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>, kind: SlotKind) -> bool {
        let Some(own) = cpu.free.of(kind) else {
            return false;
        };
        self.pool.depot.with(|depot| {
            if let Some(shared) = depot.free.of(kind) {
                let kept = shared.len().saturating_sub(batch(kind));
                own.extend(shared.drain(kept..));
            }
        });
        !own.is_empty()
    }

    /// Maps pages of the pool that no slot has used, and divides them into slots. Returns false if
    /// there are none.
    fn map_run<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        kind: SlotKind,
        limits: AddressLimits,
    ) -> Result<bool, MapReason> {
        let (pool, total) = (&self.pool, self.pool.total());
        // The lock makes sure that the pool takes its addresses once.
        let run = pool.depot.with(|depot| {
            if pool.base().is_none() {
                let reserved = self
                    .paged
                    .reserve(&mut cpu.paged, u64::from(total), limits)?;
                pool.set_base(reserved.lo().iova());
            }
            Ok(depot.take_run(kind, total))
        })?;
        let Some((first, slots)) = run else {
            return Ok(false);
        };
        let pages = slots.saturating_mul(kind.pages());
        let mapped = self.install(cpu, platform, kind, first, slots);
        if let Err(reason) = mapped {
            // After a failed invalidation the entries exist, and the device may use them: these
            // pages serve no buffer any more.
            if !matches!(reason, MapReason::Flush(_)) {
                pool.depot.with(|depot| depot.undo_run(first, pages));
            }
            return Err(reason);
        }
        pool.count_run(pages);
        if let Some(own) = cpu.free.of(kind) {
            let all = (0..slots).rev();
            own.extend(all.map(|slot| first.saturating_add(slot.saturating_mul(kind.pages()))));
        }
        Ok(true)
    }

    /// Maps a run of slots for the life of the space.
    fn install<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        kind: SlotKind,
        first: u32,
        slots: u32,
    ) -> Result<(), MapReason> {
        let outside = |error| MapReason::Shadow(ShadowError::Memory(error));
        self.pool
            .prepare_run(platform.memory(), kind, first, slots)
            .map_err(outside)?;
        let base = self.pool.base().ok_or(MapReason::TooLarge)?;
        let request = MapRequest {
            iova: base.wrapping_add(u64::from(first) << GRANULE.shift()),
            pa: self.pool.address(first),
            pages: u64::from(slots.saturating_mul(kind.pages())),
            permissions: kind.permissions,
        };
        self.paged.install(&mut cpu.paged, platform, request)
    }

    /// Returns a slot to this CPU's free list, and half of a full list to the pool.
    #[inline]
    pub(super) fn put_back(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        slot: u32,
        kind: SlotKind,
    ) {
        if let Some(own) = cpu.free.of(kind) {
            own.push(slot);
            if own.len() > kept_at_most(kind) {
                self.spill(own, kind, batch(kind));
            }
        }
    }

    /// Returns all slots of a free list but `kept` to the pool.
    #[cold]
    pub(super) fn spill(&self, own: &mut Vec<u32>, kind: SlotKind, kept: usize) {
        self.pool.depot.with(|depot| {
            if let Some(shared) = depot.free.of(kind) {
                // The slots that were used last stay: their lines are in this CPU's caches.
                let oldest = own.len().saturating_sub(kept);
                shared.extend(own.drain(..oldest));
            }
        });
    }
}
