//! Page-walk caches: pointers to tables below the root (VT-d specification, section 6.2.5
//! "Paging-structure caches").
//!
//! F&S (SOSP'24) numbers them from the root of a four-level table: L1 caches pointers to level 3
//! tables, L2 to level 2, L3 to level 1. A walk that hits in L3 needs one memory reference. This
//! file numbers them by the level of the table that an entry points to.

use ringfence_pgtable::{CalgaryTce, Cursor, Format, Level};
use ringfence_types::{DomainId, Iova, PfnRange, PhysAddr};

use crate::cache::SetAssociative;
use crate::tag;
use crate::{Geometry, Replacement};

/// Number of walk caches: for tables of level 1, 2 and 3.
pub const WALK_CACHES: usize = 3;

/// Tag kind. All entries of one cache cover blocks of the same size, so one kind suffices.
const KIND: u64 = 0;

/// The walk cache of one level.
#[derive(Debug, Clone)]
struct LevelCache {
    tables: SetAssociative<Cursor>,
    /// Number of address bits below the tags. A unit uses tables of one format, so each level has a
    /// single shift. Set by the first fill.
    shift: u32,
}

/// Caches of tables of levels 1 to 3, tagged with the domain.
#[derive(Debug, Clone)]
pub(crate) struct WalkCaches {
    /// Indexed by level - 1.
    caches: [LevelCache; WALK_CACHES],
}

/// Returns the binary logarithm of the bytes that one table of `level` covers.
#[inline]
fn covered_bits<F: Format>(format: &F, level: Level) -> u32 {
    format
        .shift(level)
        .wrapping_add(format.entries(level).trailing_zeros())
}

impl WalkCaches {
    /// Creates empty caches. `geometries[0]` is for pointers to level 1 tables.
    pub(crate) fn new(geometries: [Geometry; WALK_CACHES], replacement: Replacement) -> Self {
        let empty = Cursor::root(&CalgaryTce::FULL, PhysAddr::ZERO);
        Self {
            caches: geometries.map(|geometry| LevelCache {
                tables: SetAssociative::new(geometry, replacement, empty),
                shift: 63,
            }),
        }
    }

    /// Returns the number of entries in use, indexed by level - 1.
    pub(crate) fn live(&self) -> [u32; WALK_CACHES] {
        self.caches.each_ref().map(|cache| cache.tables.live())
    }

    /// Returns the deepest cached table on the path to `iova`, or `root`. Calls `probed` for each
    /// level looked up, with the index into [`WALK_CACHES`] arrays and true on a hit.
    #[inline]
    pub(crate) fn lookup<F: Format>(
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
            let prefix = iova.get().wrapping_shr(covered_bits(format, level));
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

    /// Caches `cursor`, a table on the path to `iova` that [`lookup`](Self::lookup) did not find.
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
            cache.shift = covered_bits(format, cursor.level());
            let prefix = iova.get().wrapping_shr(cache.shift);
            cache.tables.insert(
                tag::selector(domain, prefix),
                tag::key(domain, KIND, prefix),
                cursor,
            );
        }
    }

    /// Drops the cached tables of `domain`, at all levels, that cover any page of `range`. Visits
    /// each entry at most once.
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

    /// Drops all entries of `domain`.
    pub(crate) fn invalidate_domain(&mut self, domain: DomainId) {
        for cache in &mut self.caches {
            cache.tables.remove_if(|key, _| tag::is_of(key, domain));
        }
    }

    /// Drops all entries.
    pub(crate) fn invalidate_all(&mut self) {
        for cache in &mut self.caches {
            cache.tables.clear();
        }
    }
}
