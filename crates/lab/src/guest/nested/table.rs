//! The first-stage table of a domain, in the guest's memory.

use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_dma::space::{IoPageTable, PlainTable};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, DirtyLines, FirstStage, MapError, MapRequest, Table, UnmapError,
};
use ringfence_types::{CachedLevels, DomainId, Permissions, Pfn, PfnRange, PhysAddr, Unmapped};

use super::NestedHost;
use crate::components::{HostOf, ReplayTable};
use crate::error::LabError;
use crate::guest::HostHardware;

/// Offset of the second guest-physical address of each byte of the guest's memory. The host's
/// second stage permits only writes there.
///
/// A first stage has no write-only pages, so a device could read each buffer that it may only
/// write. The guest maps such buffers by their second address. Linux does not do this.
pub const WRITE_ONLY_OFFSET: u64 = 1 << 46;

/// The guest's table.
#[derive(Debug)]
pub struct NestedTable(PlainTable<FirstStage>);

/// Creates the first-stage table of a domain.
///
/// # Errors
/// Memory is short.
pub(crate) fn nested_table(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&HostOf<NestedTable>>,
) -> Result<NestedTable, LabError> {
    let table = Table::new(FirstStage::FOUR_LEVELS, domain, coherency, memory, frames)?;
    Ok(NestedTable(PlainTable(table)))
}

/// Returns `request` by guest-physical addresses whose second stage has its permissions.
fn by_permissions(request: MapRequest) -> MapRequest {
    if request.permissions.contains(Permissions::READ) {
        return request;
    }
    MapRequest {
        pa: request.pa.wrapping_add(WRITE_ONLY_OFFSET),
        ..request
    }
}

impl ReplayTable for NestedTable {
    type Hardware = HostHardware<NestedHost>;

    fn root(&self) -> PhysAddr {
        self.0.0.root()
    }
}

impl IoPageTable for NestedTable {
    type PerCpu = DirtyLines;
    type Pages = ();

    fn per_cpu(&self) -> DirtyLines {
        self.0.per_cpu()
    }

    #[inline]
    fn domain(&self) -> DomainId {
        self.0.domain()
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        dirty: &mut DirtyLines,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.0.map(dirty, platform, by_permissions(request))
    }

    #[inline]
    fn map_nosync<P: Platform>(
        &self,
        dirty: &mut DirtyLines,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.0.map_nosync(dirty, platform, by_permissions(request))
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        dirty: &mut DirtyLines,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        self.0.unmap(dirty, platform, range)
    }

    fn is_mapped<P: Platform>(&self, platform: &P, page: Pfn) -> Option<bool> {
        self.0.is_mapped(platform, page)
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        self.0.is_empty(platform)
    }

    #[inline]
    fn sync<P: Platform>(&self, dirty: &mut DirtyLines, platform: &mut P) {
        self.0.sync(dirty, platform);
    }
}
