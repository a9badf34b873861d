//! Translation of one page: the IOTLB and, on a miss, the page walk.

use ringfence_pgtable::{Cursor, Format, walk};
use ringfence_types::{Access, FaultReason, Iova, PhysMemory};

use crate::iotlb::{Iotlb, Page, part_of};
use crate::walk_cache::WalkCaches;
use crate::{AdjacentPrefetch, IommuStats, TableRoot, UnitConfig};

/// The translation caches of a unit and its counters.
#[derive(Debug, Clone)]
pub(crate) struct Walker {
    pub(crate) iotlb: Iotlb,
    pub(crate) walk_caches: WalkCaches,
    pub(crate) stats: IommuStats,
    last_fault: (Iova, FaultReason),
    /// Prefetch at each miss.
    pub(crate) adjacent: Option<AdjacentPrefetch>,
}

/// The unit blocked an access; [`Walker::last_fault`] returns the address and the reason. This type
/// is zero-sized so that results of successful accesses stay in registers. With the address and the
/// reason in it, a miss took 1.6 times as long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Faulted;

impl Walker {
    pub(crate) fn new(config: &UnitConfig) -> Self {
        Self {
            iotlb: Iotlb::new(config.iotlb, config.replacement),
            walk_caches: WalkCaches::new(config.walk_caches, config.replacement),
            stats: IommuStats::default(),
            last_fault: (Iova::ZERO, FaultReason::NotPresent),
            adjacent: None,
        }
    }

    /// Returns the address and the reason of the last fault.
    pub(crate) const fn last_fault(&self) -> (Iova, FaultReason) {
        self.last_fault
    }

    /// Records a fault at `iova` in `last_fault`.
    #[cold]
    #[inline(never)]
    pub(crate) fn fault_at(&mut self, iova: Iova, reason: FaultReason) -> Faulted {
        self.last_fault = (iova, reason);
        Faulted
    }

    /// Returns the page that contains `iova` if `access` is allowed. An IOTLB hit alone decides,
    /// including its permissions.
    #[inline(never)]
    pub(crate) fn page<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        source: &TableRoot<F>,
        iova: Iova,
        access: Access,
    ) -> Result<Page, Faulted> {
        match self.iotlb.lookup(source.domain, iova) {
            Some(page) if page.allows(access) => {
                self.stats.iotlb_hits = self.stats.iotlb_hits.wrapping_add(1);
                Ok(page)
            }
            Some(_) => {
                self.stats.iotlb_hits = self.stats.iotlb_hits.wrapping_add(1);
                Err(self.fault_at(iova, denied(access)))
            }
            None => self.fetch(mem, source, iova, access),
        }
    }

    /// Walks the table for a page that missed in the IOTLB. Caches the page if `access` to it is
    /// allowed.
    #[inline]
    fn fetch<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        source: &TableRoot<F>,
        iova: Iova,
        access: Access,
    ) -> Result<Page, Faulted> {
        let TableRoot {
            domain,
            format,
            root,
            ..
        } = source;
        let domain = *domain;
        let Self {
            iotlb,
            walk_caches,
            stats,
            ..
        } = self;
        stats.iotlb_misses = stats.iotlb_misses.wrapping_add(1);
        let root = Cursor::root(format, *root);
        let start = walk_caches.lookup(format, root, domain, iova, |level, hit| {
            let counts = if hit {
                &mut stats.walk_cache_hits
            } else {
                &mut stats.walk_cache_misses
            };
            if let Some(count) = counts.get_mut(level) {
                *count = count.wrapping_add(1);
            }
        });
        // One word for the table at which the walk starts, and one for each table below.
        let mut references = 1_u64;
        let found = walk(format, mem, start, iova, |table| {
            references = references.wrapping_add(1);
            walk_caches.fill(format, domain, iova, table);
        });
        stats.walk_references = stats.walk_references.wrapping_add(references);
        match found {
            Ok(leaf) if leaf.permissions.allows(access) => {
                let leaf = part_of(leaf, iova);
                let page = Page::new(&leaf);
                let evicted = iotlb.fill(domain, iova, leaf.page, page);
                stats.iotlb_evictions = stats.iotlb_evictions.wrapping_add(u64::from(evicted));
                if let Some(prefetch) = self.adjacent {
                    self.prefetch_adjacent(mem, source, iova, leaf.page, prefetch);
                }
                Ok(page)
            }
            Ok(_) => Err(self.fault_at(iova, denied(access))),
            Err(error) => Err(self.fault_at(iova, error.kind.fault_reason(access))),
        }
    }
}

const fn denied(access: Access) -> FaultReason {
    match access {
        Access::Read => FaultReason::ReadDenied,
        Access::Write => FaultReason::WriteDenied,
    }
}
