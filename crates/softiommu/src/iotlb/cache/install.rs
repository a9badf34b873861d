//! Installation of the pages of an update, and the eviction that makes room for them.

use std::collections::{BTreeMap, BTreeSet};

use ringfence_types::{Iova, IovaRange, Permissions};

use super::super::error::IotlbError;
use super::super::resident::CachedPage;
use super::{Iotlb, PAGE, PagesToCache, read_section_open};
use crate::error::DomainMapReason;

impl<M> Iotlb<M> {
    /// Evicts the pages in `outdated`, old translations of the pages in `grants`, and, if there is
    /// no room, the oldest pages. Keeps the pages that older misses wait for. Removes from `grants`
    /// the pages without room. Waits for readers once.
    pub(super) fn evict_for_update(
        &mut self,
        pages: &PagesToCache,
        grants: &mut BTreeMap<u64, CachedPage>,
        outdated: Vec<u64>,
    ) -> Result<(), IotlbError> {
        let mut evicted = outdated;
        for page in &evicted {
            self.resident.remove(*page);
        }
        for (page, grant) in grants.iter() {
            if let Some(resident) = self.resident.get(*page)
                && resident != *grant
            {
                self.resident.remove(*page);
                evicted.push(*page);
            }
        }
        let awaited = self.satisfied(self.misses.all());
        let mut coming = 0_usize;
        let mut present = BTreeSet::new();
        for (page, is_missed) in pages.in_order() {
            if self.resident.contains(page) {
                present.insert(page);
                continue;
            }
            while self.resident.len().saturating_add(coming) >= self.limits.pages {
                let older = is_missed.then(|| self.satisfied(self.misses.before(page)));
                let Some(page) = self.take_one(grants, &awaited, older.as_ref()) else {
                    break;
                };
                evicted.push(page);
                // Its turn is over: there would be no room to map it again.
                if present.contains(&page) {
                    grants.remove(&page);
                }
            }
            if self.resident.len().saturating_add(coming) < self.limits.pages {
                coming = coming.saturating_add(1);
            } else {
                grants.remove(&page);
            }
        }
        self.unmap_pages(evicted)
    }

    /// Removes the oldest page that no pending miss waits for and no update of `grants` concerns,
    /// and returns it. If there is none and `older` is given, removes any other page outside
    /// `older`, those that no miss waits for first.
    fn take_one(
        &mut self,
        grants: &BTreeMap<u64, CachedPage>,
        awaited: &BTreeSet<u64>,
        older: Option<&BTreeSet<u64>>,
    ) -> Option<u64> {
        let resident = &mut self.resident;
        let keep = |page: u64| grants.contains_key(&page) || awaited.contains(&page);
        let taken = resident.take_oldest_except(keep);
        let (None, Some(older)) = (taken, older) else {
            return taken;
        };
        let extra = resident.take_oldest_except(|page| awaited.contains(&page));
        extra.or_else(|| resident.take_oldest_except(|page| older.contains(&page)))
    }

    /// Returns the pages of those of `misses` whose translation is cached.
    fn satisfied(&self, misses: impl Iterator<Item = (u64, Permissions)>) -> BTreeSet<u64> {
        let satisfied = misses.filter(|(page, required)| self.allows(*page, *required));
        satisfied.map(|(page, _)| page).collect()
    }

    /// Installs the missed pages, then extra pages while there are tables. Distant pages need
    /// further tables: to make room, evicts all pages except those of older misses. A missed page
    /// without room is not cached, so its miss is sent again.
    pub(super) fn install(
        &mut self,
        pages: &PagesToCache,
        grants: &BTreeMap<u64, CachedPage>,
    ) -> Result<(), IotlbError> {
        for page in &pages.missed {
            let Some(grant) = self.not_yet_cached(*page, grants) else {
                continue;
            };
            match self.map_page(*page, grant) {
                Err(error) if is_out_of_tables(&error) => {
                    self.evict_for(*page)?;
                    match self.map_page(*page, grant) {
                        Err(error) if is_out_of_tables(&error) && !self.resident.is_empty() => {}
                        mapped => mapped?,
                    }
                }
                mapped => mapped?,
            }
        }
        for page in &pages.extra {
            let Some(grant) = self.not_yet_cached(*page, grants) else {
                continue;
            };
            match self.map_page(*page, grant) {
                Err(error) if is_out_of_tables(&error) => break,
                mapped => mapped?,
            }
        }
        Ok(())
    }

    fn not_yet_cached(&self, page: u64, grants: &BTreeMap<u64, CachedPage>) -> Option<CachedPage> {
        let grant = grants.get(&page).copied()?;
        (!self.resident.contains(page)).then_some(grant)
    }

    /// Evicts all pages that no miss before the oldest one of `page` waits for.
    fn evict_for(&mut self, page: u64) -> Result<(), IotlbError> {
        let older = self.satisfied(self.misses.before(page));
        let evicted = self.resident.take_all_except(|page| older.contains(&page));
        self.unmap_pages(evicted)
    }

    /// Evicts pages from the bookkeeping and from the table.
    pub(super) fn evict(&mut self, pages: Vec<u64>) -> Result<(), IotlbError> {
        for page in &pages {
            self.resident.remove(*page);
        }
        self.unmap_pages(pages)
    }

    fn unmap_pages(&mut self, pages: Vec<u64>) -> Result<(), IotlbError> {
        let ranges: Vec<IovaRange> = pages.into_iter().filter_map(range_of).collect();
        if !ranges.is_empty() {
            self.domain()?
                .unmap_all(ranges)
                .map_err(|_| read_section_open())?;
        }
        Ok(())
    }

    /// Maps a page that is not cached. The caller has checked that it is within the width and that
    /// no read section is open.
    fn map_page(&mut self, page: u64, grant: CachedPage) -> Result<(), IotlbError> {
        if let Some(range) = range_of(page) {
            self.domain()?
                .map(range, grant.memory, grant.permissions)
                .map_err(IotlbError::Map)?;
            self.resident.insert(page, grant);
        }
        Ok(())
    }
}

fn is_out_of_tables(error: &IotlbError) -> bool {
    matches!(error, IotlbError::Map(error) if error.reason == DomainMapReason::OutOfTables)
}

fn range_of(page: u64) -> Option<IovaRange> {
    IovaRange::new(Iova::new(page << PAGE.shift()), PAGE.bytes())
}
