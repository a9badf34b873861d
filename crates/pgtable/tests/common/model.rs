//! Brute-force model: a map from the first page of each leaf to its contents.

use std::collections::{BTreeMap, BTreeSet};

use ringfence_pgtable::{MapError, MapRequest, UnmapError};
use ringfence_types::{Iova, PageSize, Permissions, PfnRange};

use super::page;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ModelLeaf {
    pub(crate) size: PageSize,
    pub(crate) pa: u64,
    pub(crate) permissions: Permissions,
}

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) leaves: BTreeMap<u64, ModelLeaf>,
    /// 2 MiB and 1 GiB regions with a table of smaller entries, by region number.
    linked: [BTreeSet<u64>; 2],
    pub(crate) width: u32,
    pub(crate) physical_bits: u32,
    pub(crate) largest: PageSize,
    pub(crate) reclaims: bool,
}

impl Model {
    pub(crate) fn new(width: u32, physical_bits: u32, largest: PageSize, reclaims: bool) -> Self {
        Self {
            leaves: BTreeMap::new(),
            linked: Default::default(),
            width,
            physical_bits,
            largest,
            reclaims,
        }
    }

    pub(crate) fn leaf_of(&self, pfn: u64) -> Option<(u64, ModelLeaf)> {
        let (first, leaf) = self.leaves.range(..=pfn).next_back()?;
        (pfn - first < leaf.size.granules()).then_some((*first, *leaf))
    }

    /// Returns the expected translation of the first byte of page `pfn`.
    pub(crate) fn lookup(&self, pfn: u64) -> Option<(u64, Permissions, PageSize)> {
        let (first, leaf) = self.leaf_of(pfn)?;
        Some((leaf.pa + ((pfn - first) << 12), leaf.permissions, leaf.size))
    }

    pub(crate) fn map(&mut self, request: &MapRequest) -> Result<(), MapError> {
        let (first, pages) = (request.iova.get() >> 12, request.pages);
        if pages == 0 {
            return Err(MapError::Empty);
        }
        if !request.iova.is_aligned(4096) || !request.pa.is_aligned(4096) {
            return Err(MapError::Misaligned);
        }
        if u128::from(request.pa.get() >> 12) + u128::from(pages) > 1 << (self.physical_bits - 12) {
            return Err(MapError::PhysicalBeyondWidth { at: request.pa });
        }
        if u128::from(first) + u128::from(pages) > 1 << (self.width - 12) {
            return Err(MapError::BeyondWidth { iova: request.iova });
        }
        if let Some(iova) = self.first_taken(first, pages) {
            return Err(MapError::AlreadyMapped { iova });
        }
        let mut done = 0;
        while done < pages {
            let at = first + done;
            let pa = request.pa.get() + (done << 12);
            let size = self.best(at, pa, pages - done);
            let leaf = ModelLeaf {
                size,
                pa,
                permissions: request.permissions,
            };
            self.leaves.insert(at, leaf);
            if size == PageSize::Size4K {
                self.linked[0].insert(at >> 9);
            }
            if size != PageSize::Size1G {
                self.linked[1].insert(at >> 18);
            }
            done += size.granules();
        }
        Ok(())
    }

    fn first_taken(&self, first: u64, pages: u64) -> Option<Iova> {
        if self.leaf_of(first).is_some() {
            return Some(page(first));
        }
        self.leaves
            .range(first..first + pages)
            .next()
            .map(|(at, _)| page(*at))
    }

    fn best(&self, at: u64, pa: u64, left: u64) -> PageSize {
        let fits = |size: PageSize| {
            let region = at >> (size.shift() - 12);
            let linked = match size {
                PageSize::Size4K => false,
                PageSize::Size2M => self.linked[0].contains(&region),
                PageSize::Size1G => self.linked[1].contains(&region),
            };
            size <= self.largest
                && !linked
                && at.is_multiple_of(size.granules())
                && pa.is_multiple_of(size.bytes())
                && left >= size.granules()
        };
        PageSize::ALL
            .into_iter()
            .rev()
            .find(|size| fits(*size))
            .unwrap_or(PageSize::Size4K)
    }

    pub(crate) fn unmap(&mut self, range: &PfnRange) -> Result<(), UnmapError> {
        let (first, last) = (range.lo().get(), range.hi().get());
        if last >> (self.width - 12) != 0 {
            return Err(UnmapError::BeyondWidth { iova: page(first) });
        }
        let mut at = first;
        while at <= last {
            let Some((start, leaf)) = self.leaf_of(at) else {
                return Err(UnmapError::NotMapped { iova: page(at) });
            };
            if start != at || at + leaf.size.granules() - 1 > last {
                return Err(UnmapError::WouldSplit { iova: page(start) });
            }
            at += leaf.size.granules();
        }
        self.leaves.retain(|at, _| *at < first || *at > last);
        if self.reclaims {
            let of = |shift: u32, largest: PageSize| {
                self.leaves
                    .iter()
                    .filter(|(_, leaf)| leaf.size <= largest)
                    .map(|(at, _)| at >> shift)
                    .collect()
            };
            self.linked = [of(9, PageSize::Size4K), of(18, PageSize::Size2M)];
        }
        Ok(())
    }
}
