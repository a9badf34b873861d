//! The page-walk caches: where the tables below the root are (VT-d specification, section 6.2.5
//! "Paging-structure caches").
//!
//! F&S (SOSP'24) numbers them from the root of a four-level table: its L1 holds pointers to tables
//! of level 3, L2 of level 2, and L3 of level 1, so that a hit in L3 leaves one memory reference to
//! the walk. Here they go by the level of the table they lead to.

use ringfence_pgtable::{CalgaryTce, Cursor, Format, Level};
use ringfence_types::{DomainId, Iova, PfnRange, PhysAddr};

use crate::cache::SetAssociative;
use crate::tag;
use crate::{Geometry, Replacement};

/// Number of walk caches: for tables of level 1, 2 and 3.
pub const WALK_CACHES: usize = 3;

/// All entries of one cache are of one size, so there is nothing to tell apart.
const KIND: u64 = 0;

/// The cache of one level. It remembers which address bits its entries were filled under: one unit
/// has tables of one format, so there is only one such shift per level.
#[derive(Debug, Clone)]
struct Cache {
    tables: SetAssociative<Cursor>,
    shift: u32,
}

/// Caches of the tables of levels 1 to 3, tagged with their domain.
#[derive(Debug, Clone)]
pub(crate) struct WalkCaches {
    /// By level less one.
    caches: [Cache; WALK_CACHES],
}

/// How many address bits lie below the region that one table of `level` covers.
#[inline]
fn covered<F: Format>(format: &F, level: Level) -> u32 {
    format
        .shift(level)
        .wrapping_add(format.entries(level).trailing_zeros())
}

impl WalkCaches {
    /// Empty caches; `geometries[0]` is that of the pointers to level 1 tables.
    pub(crate) fn new(geometries: [Geometry; WALK_CACHES], replacement: Replacement) -> Self {
        let filler = Cursor::root(&CalgaryTce::FULL, PhysAddr::ZERO);
        Self {
            caches: geometries.map(|geometry| Cache {
                tables: SetAssociative::new(geometry, replacement, filler),
                shift: 63,
            }),
        }
    }

    /// Entries in use, by level less one.
    pub(crate) fn live(&self) -> [u32; WALK_CACHES] {
        self.caches.each_ref().map(|cache| cache.tables.live())
    }

    /// The deepest table known on the path to `iova`, or `root`. `probed` is told each level looked
    /// at, as its index into [`WALK_CACHES`] arrays, and whether it hit.
    #[inline]
    pub(crate) fn start<F: Format>(
        &mut self,
        format: &F,
        root: Cursor,
        domain: DomainId,
        iova: Iova,
        mut probed: impl FnMut(usize, bool),
    ) -> Cursor {
        let mut level = Level::LEAF;
        for (index, cache) in self.caches.iter_mut().enumerate() {
            if level >= root.level() {
                break;
            }
            let prefix = iova.get().wrapping_shr(covered(format, level));
            let selector = tag::selector(domain, prefix);
            let found = cache
                .tables
                .lookup(selector, tag::key(domain, KIND, prefix));
            probed(index, found.is_some());
            if let Some(cursor) = found {
                return *cursor;
            }
            match level.above() {
                Some(above) => level = above,
                None => break,
            }
        }
        root
    }

    /// Keeps `cursor`, a table on the path to `iova` that [`start`](Self::start) did not find.
    #[inline]
    pub(crate) fn fill<F: Format>(
        &mut self,
        format: &F,
        domain: DomainId,
        iova: Iova,
        cursor: Cursor,
    ) {
        let index = usize::from(cursor.level().get()).wrapping_sub(1);
        if let Some(cache) = self.caches.get_mut(index) {
            cache.shift = covered(format, cursor.level());
            let prefix = iova.get().wrapping_shr(cache.shift);
            cache.tables.insert(
                tag::selector(domain, prefix),
                tag::key(domain, KIND, prefix),
                cursor,
            );
        }
    }

    /// Drops the tables of `domain` that cover any page of `range`, at every level. At most one
    /// visit to every entry.
    pub(crate) fn invalidate_pages(&mut self, domain: DomainId, range: &PfnRange) {
        for cache in &mut self.caches {
            if cache.tables.live() == 0 {
                continue;
            }
            tag::remove_range(
                &mut cache.tables,
                domain,
                KIND,
                cache.shift,
                range.lo(),
                range.hi(),
            );
        }
    }

    /// Drops everything of `domain`.
    pub(crate) fn invalidate_domain(&mut self, domain: DomainId) {
        for cache in &mut self.caches {
            cache.tables.remove_if(|key, _| tag::is_of(key, domain));
        }
    }

    /// Drops everything.
    pub(crate) fn invalidate_all(&mut self) {
        for cache in &mut self.caches {
            cache.tables.clear();
        }
    }
}
