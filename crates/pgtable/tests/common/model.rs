//! Brute-force model: a map from the first page of each leaf to its contents. A [`Shape`] gives the
//! geometry of a format in numbers of its specification, not by the code under test.

use std::collections::{BTreeMap, BTreeSet};

use ringfence_pgtable::{MapError, MapRequest, UnmapError};
use ringfence_types::{Iova, PageSize, Permissions, PfnRange};

use super::page;

/// One level of a table.
#[derive(Debug, Clone)]
pub(crate) struct LevelShape {
    /// Binary logarithm of the bytes that an entry covers.
    pub(crate) shift: u32,
    /// Binary logarithms of the sizes of leaves.
    pub(crate) leaves: Vec<u32>,
}

/// Geometry of a format.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) width: u32,
    /// Bits above the width repeat the highest bit of the width.
    pub(crate) sign_extended: bool,
    pub(crate) physical_bits: u32,
    /// From the leaves to the root.
    pub(crate) levels: Vec<LevelShape>,
    /// A writable page is also readable.
    pub(crate) write_reads: bool,
    /// A leaf that grants no access to the device view: the memory before the first write-back.
    pub(crate) rubbish: u64,
}

impl Shape {
    /// Levels of 9 bits over 4 KiB pages, with the leaves of each level, from level 1 up.
    pub(crate) fn of(levels: usize, leaves: &[&[u32]]) -> Self {
        let level = |index: usize| LevelShape {
            shift: 12 + 9 * index as u32,
            leaves: leaves.get(index).map_or(vec![], |sizes| sizes.to_vec()),
        };
        Self {
            width: 12 + 9 * levels as u32,
            sign_extended: false,
            physical_bits: 52,
            levels: (0..levels).map(level).collect(),
            write_reads: false,
            rubbish: crate::common::RUBBISH,
        }
    }

    /// Pages in a granule.
    pub(crate) fn unit(&self) -> u64 {
        1 << (self.levels[0].shift - 12)
    }

    pub(crate) fn largest(&self) -> u32 {
        let sizes = self.levels.iter().flat_map(|level| &level.leaves);
        *sizes.max().expect("leaves")
    }

    /// Returns true if an address on page `pfn` is translated.
    pub(crate) fn translates(&self, pfn: u64) -> bool {
        let half = 1_u64 << (self.width - 13);
        match self.sign_extended {
            true => pfn < half || ((1 << 52) - half..1 << 52).contains(&pfn),
            false => pfn >> (self.width - 12) == 0,
        }
    }

    /// Pages where the translated part of the address space begins and ends.
    pub(crate) fn ends(&self) -> Vec<u64> {
        match self.sign_extended {
            true => vec![1 << (self.width - 13), (1 << 52) - (1 << (self.width - 13))],
            false => vec![1 << (self.width - 12)],
        }
    }

    fn contains(&self, first: u64, pages: u64) -> bool {
        let Some(last) = first.checked_add(pages - 1) else {
            return false;
        };
        let half = |pfn: u64| self.sign_extended && pfn >> 51 != 0;
        self.translates(first) && self.translates(last) && half(first) == half(last)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ModelLeaf {
    pub(crate) size: PageSize,
    level: usize,
    pub(crate) pa: u64,
    pub(crate) permissions: Permissions,
}

#[derive(Debug)]
pub(crate) struct Model {
    shape: Shape,
    pub(crate) leaves: BTreeMap<u64, ModelLeaf>,
    /// Entries of each level that point to a table, by the number of the region they cover.
    linked: Vec<BTreeSet<u64>>,
    reclaims: bool,
}

impl Model {
    pub(crate) fn new(shape: &Shape, reclaims: bool) -> Self {
        Self {
            shape: shape.clone(),
            leaves: BTreeMap::new(),
            linked: vec![BTreeSet::new(); shape.levels.len()],
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
        let granule = self.shape.unit() << 12;
        if pages == 0 {
            return Err(MapError::Empty);
        }
        if !request.iova.is_aligned(granule)
            || !request.pa.is_aligned(granule)
            || !pages.is_multiple_of(granule >> 12)
        {
            return Err(MapError::Misaligned);
        }
        let physical = 1_u128 << (self.shape.physical_bits - 12);
        if u128::from(request.pa.get() >> 12) + u128::from(pages) > physical {
            return Err(MapError::PhysicalBeyondWidth { at: request.pa });
        }
        if !self.shape.contains(first, pages) {
            return Err(MapError::BeyondWidth { iova: request.iova });
        }
        if let Some(iova) = self.first_taken(first, pages) {
            return Err(MapError::AlreadyMapped { iova });
        }
        let permissions = match self.shape.write_reads && request.permissions == Permissions::WRITE
        {
            true => Permissions::READ_WRITE,
            false => request.permissions,
        };
        let mut done = 0;
        while done < pages {
            let at = first + done;
            let pa = request.pa.get() + (done << 12);
            let (level, size) = self.best(at, pa, pages - done);
            let leaf = ModelLeaf {
                size,
                level,
                pa,
                permissions,
            };
            self.leaves.insert(at, leaf);
            for above in level + 1..self.shape.levels.len() {
                let region = self.region(above, at);
                self.linked[above].insert(region);
            }
            done += size.granules();
        }
        Ok(())
    }

    fn region(&self, level: usize, pfn: u64) -> u64 {
        pfn >> (self.shape.levels[level].shift - 12)
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

    /// The largest leaf for the page `at`: aligned, not longer than the rest, and not where a
    /// table is linked.
    fn best(&self, at: u64, pa: u64, left: u64) -> (usize, PageSize) {
        for (level, of_level) in self.shape.levels.iter().enumerate().rev() {
            for shift in of_level.leaves.iter().rev() {
                let size = PageSize::from_shift(*shift).expect("a size");
                let pages = size.granules();
                let regions = self.region(level, at)..=self.region(level, at + pages - 1);
                if at.is_multiple_of(pages)
                    && pa.is_multiple_of(size.bytes())
                    && left >= pages
                    && self.linked[level].range(regions).next().is_none()
                {
                    return (level, size);
                }
            }
        }
        unreachable!("a granule always fits")
    }

    pub(crate) fn unmap(&mut self, range: &PfnRange) -> Result<(), UnmapError> {
        let (first, last) = (range.lo().get(), range.hi().get());
        if !self.shape.contains(first, last - first + 1) {
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
            for level in 1..self.shape.levels.len() {
                let leaves = self.leaves.iter().filter(|(_, leaf)| leaf.level < level);
                self.linked[level] = leaves.map(|(at, _)| self.region(level, *at)).collect();
            }
        }
        Ok(())
    }
}
