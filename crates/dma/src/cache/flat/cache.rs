//! The cache on top of the flat table.

use ringfence_types::Iova;

use super::slot::CacheEntry;
use super::table::Table;
use crate::cache::reuse::ReuseGaps;
use crate::cache::reverse_cache::EvictionBudget;
use crate::cache::{
    CacheStats, Cycles, MappingKey, NotCached, NotInUse, ResidencyPolicy, Retained, Retention,
    ReverseCache,
};

/// Age of the oldest mappings of a cache without a residency, in cycles.
const OLD: u8 = 128;

/// The flat reverse translation cache, with the PVIOMMU paper's residency or an adaptive one.
///
/// It holds mappings of at most `limit` pages, in use or released. It has at most `limit` entries,
/// including ghosts (keys of mappings that left), and drops ghosts first. A mapping has at most
/// 1023 users; a further buffer of the same key is not served.
#[derive(Debug)]
pub struct FlatCache {
    table: Table,
    gaps: ReuseGaps,
    cycles: Cycles,
    retention: Retention,
    limit: usize,
    /// The current cycle, modulo 256 as in the entries.
    now: u8,
    /// True if nothing was released or remembered at the last end of a cycle, and the table needed
    /// no shrinking. Until the next release, further ends of cycles change nothing.
    idle: bool,
    /// Number of unused mappings, by the cycle of their release, and of all.
    released_in: [u32; 256],
    released: usize,
    /// Number of ghosts.
    ghosts: usize,
    /// Pages of all mappings.
    pages: u64,
    counts: CacheStats,
}

impl FlatCache {
    /// Creates an empty cache of at most `limit` pages, in use or released. Its memory grows and
    /// shrinks with its contents: 16 bytes per entry, at most five eighths of the entries occupied.
    pub fn new(cycles: Cycles, limit: usize, retention: impl Into<Retention>) -> Self {
        let retention = retention.into();
        Self {
            table: Table::new(limit),
            gaps: ReuseGaps::new(retention.residency, cycles),
            cycles,
            retention,
            limit,
            now: 0,
            idle: false,
            released_in: [0; 256],
            released: 0,
            ghosts: 0,
            pages: 0,
            counts: CacheStats::default(),
        }
    }

    fn drop_ghosts(&mut self) {
        if self.ghosts > 0 {
            self.table.retain(|slot| !slot.is_ghost());
            self.ghosts = 0;
        }
    }

    /// Returns the number of released mappings of this age.
    fn of_age(&self, age: u8) -> u32 {
        let cycle = self.now.wrapping_sub(age);
        let released = self.released_in.get(usize::from(cycle));
        released.copied().unwrap_or(0)
    }

    #[inline]
    fn count_released(&mut self, cycle: u8, more: i32) {
        if let Some(count) = self.released_in.get_mut(usize::from(cycle)) {
            *count = count.wrapping_add_signed(more);
        }
        self.released = self.released.wrapping_add_signed(more as isize);
    }

    /// Gives all released mappings above the age [`OLD`] this age, because ages end at 255. At most
    /// one cycle in 255 - `OLD` walks the table for this.
    #[cold]
    fn merge_old(&mut self) {
        let (now, mut merged) = (self.now, 0_u32);
        self.table.retain(|slot| {
            if slot.users() == 0 && slot.age(now) > OLD {
                slot.set_age(now, OLD);
                merged = merged.saturating_add(1);
            }
            true
        });
        for age in OLD.saturating_add(1)..=u8::MAX {
            let cycle = now.wrapping_sub(age);
            if let Some(count) = self.released_in.get_mut(usize::from(cycle)) {
                *count = 0;
            }
        }
        let cycle = now.wrapping_sub(OLD);
        if let Some(count) = self.released_in.get_mut(usize::from(cycle)) {
            *count = count.saturating_add(merged);
        }
    }

    /// Walks the table and removes released mappings and ghosts for which `leaves` returns true.
    /// `leaves` takes the key's word, the age, and true for a ghost. If gaps are counted, a mapping
    /// that leaves before C cycles are over becomes a ghost. Returns the number of mappings
    /// removed.
    fn evict_matching(
        &mut self,
        mut leaves: impl FnMut(u64, u8, bool) -> bool,
        mut expired: impl FnMut(MappingKey, Iova),
    ) -> u64 {
        let (now, remembered) = (
            self.now,
            self.gaps.is_adaptive().then_some(self.cycles.get()),
        );
        let (mut evicted, mut ghosts_added, mut ghosts_removed) = (0_usize, 0_usize, 0_usize);
        let (released_in, pages) = (&mut self.released_in, &mut self.pages);
        self.table.retain(|slot| {
            let age = slot.age(now);
            if slot.users() > 0 || !leaves(slot.key(), age, slot.is_ghost()) {
                return true;
            }
            if slot.is_ghost() {
                ghosts_removed += 1;
                return false;
            }
            evicted += 1;
            if let Some(count) = released_in.get_mut(usize::from(now.wrapping_sub(age))) {
                *count = count.wrapping_sub(1);
            }
            let key = MappingKey::from_word(slot.key());
            *pages = pages.saturating_sub(key.pages());
            expired(key, slot.iova());
            let stays = remembered.is_some_and(|cycles| age <= cycles);
            if stays {
                slot.make_ghost();
                ghosts_added += 1;
            }
            stays
        });
        self.released = self.released.saturating_sub(evicted);
        self.ghosts = self
            .ghosts
            .wrapping_add(ghosts_added)
            .wrapping_sub(ghosts_removed);
        self.idle = false;
        evicted as u64
    }
}

impl ReverseCache for FlatCache {
    #[inline]
    fn acquire(&mut self, key: MappingKey) -> Option<Iova> {
        if let Some(slot) = self.table.find(key.word())
            && !slot.is_ghost()
        {
            let (first, cycle, iova) = (slot.users() == 0, slot.cycle(), slot.iova());
            if slot.add_user() {
                if first {
                    self.count_released(cycle, -1);
                    if self.gaps.is_adaptive() {
                        self.gaps.count(key.word(), self.now.wrapping_sub(cycle));
                    }
                }
                self.counts.hits = self.counts.hits.wrapping_add(1);
                return Some(iova);
            }
        }
        self.counts.misses = self.counts.misses.wrapping_add(1);
        None
    }

    fn insert(&mut self, key: MappingKey, iova: Iova) -> Result<(), NotCached> {
        let fresh = CacheEntry::in_use(key.word(), iova).ok_or(NotCached::Address(iova))?;
        let pages = self.pages.saturating_add(key.pages());
        let mut entry = self.table.entry(key.word());
        let ghost = self.table.get(entry).copied();
        match ghost {
            Some(slot) if !slot.is_ghost() => return Err(NotCached::Present),
            _ if pages > self.limit as u64 => return Err(NotCached::Full),
            // The cache evicted this mapping too early.
            Some(slot) => self.gaps.count(key.word(), slot.age(self.now)),
            None if self.table.occupied() >= self.limit => {
                if self.ghosts > 0 {
                    self.drop_ghosts();
                    entry = self.table.entry(key.word());
                }
                if self.table.occupied() >= self.limit {
                    return Err(NotCached::Full);
                }
            }
            None => {}
        }
        if !self.table.put(entry, fresh) {
            return Err(NotCached::OutOfMemory);
        }
        self.pages = pages;
        self.ghosts = self.ghosts.saturating_sub(usize::from(ghost.is_some()));
        self.counts.inserted = self.counts.inserted.wrapping_add(1);
        Ok(())
    }

    #[inline]
    fn release(&mut self, key: MappingKey) -> Result<Retained, NotInUse> {
        let now = self.now;
        match self
            .table
            .find(key.word())
            .and_then(|slot| slot.drop_user(now))
        {
            Some(0) if self.released >= self.retention.released_max => {
                self.table.remove(key.word());
                self.pages = self.pages.saturating_sub(key.pages());
                self.counts.forced = self.counts.forced.wrapping_add(1);
                Ok(Retained::Removed)
            }
            Some(0) => {
                self.count_released(now, 1);
                Ok(Retained::Cached)
            }
            Some(_) => Ok(Retained::Cached),
            None => Err(NotInUse(key)),
        }
    }

    fn tick(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        // Since the last end of a cycle, all releases belong to the current cycle.
        let idle = self.idle && self.of_age(0) == 0;
        if self.retention.residency == ResidencyPolicy::UntilFull {
            if self.of_age(u8::MAX) > 0 {
                self.merge_old();
            }
            self.now = self.now.wrapping_add(1);
            self.table.shrink();
            return;
        }
        self.now = self.now.wrapping_add(1);
        if idle {
            return;
        }
        self.gaps.end_cycle();
        let (cycles, gaps) = (self.cycles.get(), self.gaps.clone());
        let due = |age| self.of_age(age) > 0;
        // At the end of most cycles nothing is due, so skip the walk.
        if self.ghosts > 0 || (gaps.min_keep_cycles()..=cycles).any(|age| due(age + 1)) {
            let evicted = self.evict_matching(
                |key, age, ghost| age > if ghost { cycles } else { gaps.keep_cycles(key) },
                expired,
            );
            self.counts.expired = self.counts.expired.wrapping_add(evicted);
        }
        let has_its_size = self.table.shrink();
        self.idle = has_its_size && self.ghosts == 0 && self.released_in == [0; 256];
    }

    fn evict(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        self.drop_ghosts();
        // Count the unused pages by age. Then set the budget of each age: the oldest ages leave
        // completely, the last one in part.
        let (now, mut released) = (self.now, [0_u64; 256]);
        self.table.retain(|slot| {
            if slot.users() == 0
                && let Some(pages) = released.get_mut(usize::from(slot.age(now)))
            {
                *pages = pages.saturating_add(MappingKey::from_word(slot.key()).pages());
            }
            true
        });
        let mut wanted = self.limit.div_ceil(16) as u64;
        let mut leave = released.map(|_| None);
        for (leave, pages) in leave.iter_mut().zip(released).rev() {
            if pages > 0 && wanted > 0 {
                *leave = Some(EvictionBudget::new(
                    pages.min(wanted),
                    wanted == self.limit.div_ceil(16) as u64,
                ));
            }
            wanted = wanted.saturating_sub(pages);
        }
        let evicted = self.evict_matching(
            |word, age, _| {
                let leave = leave.get_mut(usize::from(age)).and_then(Option::as_mut);
                leave.is_some_and(|leave| leave.takes(MappingKey::from_word(word).pages()))
            },
            expired,
        );
        self.counts.forced = self.counts.forced.wrapping_add(evicted);
        // This eviction is due to the limit, so do not count it as a reuse gap.
        self.drop_ghosts();
    }

    fn drain(&mut self, expired: impl FnMut(MappingKey, Iova)) {
        let evicted = self.evict_matching(|_, _, _| true, expired);
        self.counts.forced = self.counts.forced.wrapping_add(evicted);
        self.drop_ghosts();
        self.table.shrink();
    }

    fn stats(&self) -> CacheStats {
        CacheStats {
            mappings: self.table.occupied().saturating_sub(self.ghosts),
            released: self.released,
            pages: self.pages,
            bytes: self.table.bytes(),
            ..self.counts
        }
    }
}
