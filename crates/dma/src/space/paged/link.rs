//! Requests whose addresses are reserved before their pieces are mapped.

use ringfence_iova::IovaAllocator;
use ringfence_pgtable::MapRequest;
use ringfence_types::{CachedLevels, Permissions, Pfn, PfnRange, PhysRange, Unmapped};

use super::super::{
    AddressLimits, AddressSpace, ClearedRange, GRANULE, IoPageTable, LinkSpace, UnmapRefusal,
};
use super::Paged;
use crate::{MapReason, Platform};

impl<A: IovaAllocator, T: IoPageTable> LinkSpace for Paged<A, T> {
    fn reserve_range(
        &self,
        cpu: &mut Self::PerCpu,
        pages: u64,
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<PfnRange, MapReason> {
        let found = self.alloc(&mut cpu.allocator, pages, permissions, limits)?;
        Ok(found.range)
    }

    #[inline]
    fn link<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        page: Pfn,
        piece: PhysRange,
        permissions: Permissions,
    ) -> Result<(), MapReason> {
        let request = MapRequest {
            iova: page.iova(),
            pa: piece.start().align_down(GRANULE.bytes()),
            pages: piece.pages(GRANULE),
            permissions,
        };
        self.table
            .map_nosync(&mut cpu.table, platform, request)
            .map_err(MapReason::Table)
    }

    fn sync_links<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        linked: PfnRange,
    ) -> Result<(), MapReason> {
        self.table.sync(&mut cpu.table, platform);
        self.table
            .iotlb_sync_map(platform, linked)
            .map_err(MapReason::Flush)
    }

    fn unlink<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        linked: Option<PfnRange>,
        reserved: PfnRange,
    ) -> Result<Self::UnmapResult, UnmapRefusal> {
        let (unmapped, levels, tables) = match linked {
            Some(range) => self
                .table
                .unmap(&mut cpu.table, platform, range)
                .map_err(UnmapRefusal::Table)?,
            // No piece was installed, so no entry of the range is set.
            None => (
                Unmapped::attest_cleared(self.domain(), reserved),
                CachedLevels::Leaves,
                T::Pages::default(),
            ),
        };
        let unmapped = match unmapped.widen(self.reserved(reserved)) {
            Ok(widened) => widened,
            Err(as_linked) => as_linked,
        };
        Ok(ClearedRange {
            unmapped,
            levels,
            tables,
        })
    }
}
