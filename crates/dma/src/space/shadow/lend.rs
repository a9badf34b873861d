//! Slots that a driver uses as buffers: the device and the driver share the memory, and no byte is
//! copied (Markuze et al., "DAMN", ASPLOS 2018).

use ringfence_iova::IovaAllocator;
use ringfence_types::{Access, IovaRange, Lock, Permissions, PhysRange};

use super::page::Extent;
use super::{ShadowCpu, ShadowDepot, ShadowSpace};
use crate::error::UnmapRefusal;
use crate::space::{AddressLimits, GRANULE, IoPageTable, LendingSpace, LentSlot};
use crate::{MapReason, Platform};

/// All bytes of a page.
const WHOLE_PAGE: Extent = Extent {
    lo: 0,
    hi: GRANULE.bytes() as u32,
};

impl<A, T, L> LendingSpace for ShadowSpace<A, T, L>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
{
    /// Lends a slot of the pool. The policy for exhaustion does not apply: a lent slot cannot be
    /// replaced by a mapping.
    #[inline]
    fn lend<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        bytes: u64,
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<LentSlot, MapReason> {
        if bytes == 0 {
            return Err(MapReason::Empty);
        }
        let pages = bytes.div_ceil(GRANULE.bytes());
        let found = self.take_for(cpu, platform, pages, permissions, limits)?;
        let (slot, kind) = found.map_err(MapReason::Shadow)?;
        let range = self.pool.base().and_then(|base| {
            IovaRange::new(base.wrapping_add(u64::from(slot) << GRANULE.shift()), bytes)
        });
        let memory = PhysRange::new(self.pool.address(slot), bytes);
        let Some((range, memory)) = range.zip(memory) else {
            self.put_back(cpu, slot, kind);
            return Err(MapReason::TooLarge);
        };
        if permissions.allows(Access::Read) {
            // A later copy in the slot must not leave the driver's bytes beside it.
            for number in 0..kind.pages() {
                if let Some(page) = self.pool.page(slot.saturating_add(number)) {
                    page.replace_residue(WHOLE_PAGE);
                }
            }
        }
        if let Some(page) = self.pool.page(slot) {
            page.lend();
        }
        Ok(LentSlot { range, memory })
    }

    #[inline]
    fn take_back(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        range: IovaRange,
    ) -> Result<(), UnmapRefusal> {
        let slot = self.pool.slot_at(range.start());
        let lent = slot.filter(|slot| slot.page.is_lent());
        let found = lent.and_then(|slot| Some((slot, slot.page.kind()?)));
        let (slot, kind) = found.ok_or(UnmapRefusal::NotAllocated)?;
        slot.page.clear();
        self.put_back(cpu, slot.index, kind);
        Ok(())
    }
}
