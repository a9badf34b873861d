//! From an address of a domain to its page: the IOTLB, and the walk behind it.

use ringfence_pgtable::{Cursor, Format, Leaf, walk};
use ringfence_types::{Access, DomainId, FaultReason, Iova, PhysAddr, PhysMemory};

use crate::{Iotlb, Stats, UnitConfig, WalkCaches};

/// The table of one domain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a, F> {
    pub(crate) domain: DomainId,
    pub(crate) format: &'a F,
    pub(crate) root: PhysAddr,
}

/// The caches of translations, with the counters that tell how they did.
#[derive(Debug, Clone)]
pub(crate) struct Walker {
    pub(crate) iotlb: Iotlb,
    pub(crate) walk_caches: WalkCaches,
    pub(crate) stats: Stats,
}

impl Walker {
    pub(crate) fn new(config: &UnitConfig) -> Self {
        Self {
            iotlb: Iotlb::new(config.iotlb, config.replacement),
            walk_caches: WalkCaches::new(config.walk_caches, config.replacement),
            stats: Stats::default(),
        }
    }

    /// The page that `iova` lies on, if `access` to it is allowed. An entry in the IOTLB decides alone, its permissions included.
    #[inline]
    pub(crate) fn page<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        source: Source<'_, F>,
        iova: Iova,
        access: Access,
    ) -> Result<Leaf, FaultReason> {
        match self.iotlb.lookup(source.domain, iova) {
            Some(leaf) => {
                self.stats.iotlb_hits = self.stats.iotlb_hits.wrapping_add(1);
                permitted(leaf, access)
            }
            None => self.fetch(mem, source, iova, access),
        }
    }

    /// Walks the table for a page that the IOTLB does not have, and keeps what is found and allowed.
    #[inline(never)]
    fn fetch<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        source: Source<'_, F>,
        iova: Iova,
        access: Access,
    ) -> Result<Leaf, FaultReason> {
        let Source {
            domain,
            format,
            root,
        } = source;
        let Self {
            iotlb,
            walk_caches,
            stats,
        } = self;
        stats.iotlb_misses = stats.iotlb_misses.wrapping_add(1);
        let root = Cursor::root(format, root);
        let cached = walk_caches.lookup(format, root.level(), domain, iova, |level, hit| {
            let counts = if hit {
                &mut stats.walk_cache_hits
            } else {
                &mut stats.walk_cache_misses
            };
            if let Some(count) = counts.get_mut(level) {
                *count = count.wrapping_add(1);
            }
        });
        // One word for the table the walk begins at, and one for each that it is led to.
        let mut references = 1_u64;
        let found = walk(format, mem, cached.unwrap_or(root), iova, |table| {
            references = references.wrapping_add(1);
            walk_caches.fill(format, domain, iova, table);
        });
        stats.walk_references = stats.walk_references.wrapping_add(references);
        let leaf = found.map_err(|error| error.kind.fault_reason(access))?;
        let leaf = permitted(leaf, access)?;
        let evicted = iotlb.fill(domain, iova, &leaf);
        stats.iotlb_evictions = stats.iotlb_evictions.wrapping_add(u64::from(evicted));
        Ok(leaf)
    }
}

#[inline]
const fn permitted(leaf: Leaf, access: Access) -> Result<Leaf, FaultReason> {
    if leaf.permissions.allows(access) {
        return Ok(leaf);
    }
    Err(match access {
        Access::Read => FaultReason::ReadDenied,
        Access::Write => FaultReason::WriteDenied,
    })
}
