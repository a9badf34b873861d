//! Installation of the pages of an update, and the eviction that makes room for them.

use std::collections::BTreeMap;

use ringfence_types::{Iova, IovaRange};

use super::super::error::IotlbError;
use super::super::resident::CachedPage;
use super::{Iotlb, PAGE, PagesToCache, read_section_open};
use crate::error::DomainMapReason;

impl<M> Iotlb<M> {
    /// Evicts the pages in `outdated`, old translations of the pages in `grants`, and, if there is
    /// no room, the oldest pages. Waits for readers once.
    pub(super) fn make_room(
        &mut self,
        grants: &BTreeMap<u64, CachedPage>,
        outdated: Vec<u64>,
    ) -> Result<(), IotlbError> {
        let mut evicted = outdated;
        for page in &evicted {
            self.resident.remove(*page);
        }
        for (page, grant) in grants {
            if let Some(resident) = self.resident.get(*page)
                && resident != *grant
            {
                self.resident.remove(*page);
                evicted.push(*page);
            }
        }
        let coming = grants
            .keys()
            .filter(|page| !self.resident.contains(**page))
            .count();
        while self.resident.len().saturating_add(coming) > self.limits.pages {
            let keep = |page| grants.contains_key(&page);
            let Some(page) = self.resident.take_oldest_except(keep) else {
                break;
            };
            evicted.push(page);
        }
        self.unmap_pages(evicted)
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
        let older: Vec<u64> = self
            .misses
            .before(page)
            .filter(|(page, required)| self.allows(*page, *required))
            .map(|(page, _)| page)
            .collect();
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
