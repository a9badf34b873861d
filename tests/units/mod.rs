//! Tables and invalidations in the tests of several drivers of units.

use ringfence_pgtable::{Format, MapRequest, Table};
use ringfence_types::{
    CachedLevels, DomainId, FrameSource, Invalidation, Invalidator, Iova, Permissions, Pfn,
    PfnRange, PhysAddr, PhysMemory,
};

/// Maps `pages` pages for all accesses.
pub(crate) fn map<F: Format>(
    table: &Table<F>,
    memory: &impl PhysMemory,
    frames: &impl FrameSource,
    [iova, pa, pages]: [u64; 3],
) {
    let request = MapRequest {
        iova: Iova::new(iova),
        pa: PhysAddr::new(pa),
        pages,
        permissions: Permissions::READ_WRITE,
    };
    table.map(memory, frames, request).unwrap();
}

pub(crate) fn range(iova: u64, pages: u64) -> PfnRange {
    PfnRange::new(Pfn::containing(Iova::new(iova)), pages).unwrap()
}

/// The invalidation of the leaves of a range.
pub(crate) fn pages(domain: DomainId, iova: u64, pages: u64) -> Invalidation {
    Invalidation::Pages {
        domain,
        range: range(iova, pages),
        levels: CachedLevels::Leaves,
    }
}

/// Submits a request and waits for it.
pub(crate) fn invalidate(unit: &mut impl Invalidator, request: Invalidation) {
    let ticket = unit.submit(request).unwrap();
    unit.wait(ticket).unwrap();
}
