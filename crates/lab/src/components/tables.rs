//! The I/O page tables of the modes.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::space::{LeafCachedTable, PlainTable, Reclaiming};
use ringfence_memory::{Arena, Frames};
use ringfence_papers::whole_table_pages;
use ringfence_pgtable::{
    CalgaryTce, Coherency, Levels, ReclaimingTable, SecondStage, Table, TableError,
};
use ringfence_types::{DomainId, PageSize, PhysAddr};

use super::{LAST_PAGE_32_BIT, MakeTable, ReplayTable, ThreadCell};
use crate::error::LabError;
use crate::hardware::{Calgary, Vtd};

pub(crate) type PlainRadix = PlainTable<SecondStage>;
pub(crate) type LeafCachedRadix = LeafCachedTable<SecondStage>;
pub(crate) type FlatTable = PlainTable<CalgaryTce>;
/// A table that frees empty table pages (FreeBSD).
pub(crate) type ReclaimingRadix = Reclaiming<SecondStage, ThreadCell<ReclaimingTable<SecondStage>>>;

/// Returns the format of the radix tables of a replay: four levels, like the papers' machine.
fn format(largest: PageSize) -> SecondStage {
    let four = SecondStage::new(Levels::Four);
    match largest {
        PageSize::Size4K => four,
        PageSize::Size64K => four.with_contiguous_hint(),
        larger => four.with_contiguous_hint().with_pages_up_to(larger),
    }
}

impl ReplayTable for PlainRadix {
    type Hardware = Vtd;

    fn with_page_size(make: MakeTable<Self>, size: PageSize) -> MakeTable<Self> {
        match size {
            PageSize::Size4K => make,
            PageSize::Size64K => |domain, coherency, memory, frames, _| {
                radix(PageSize::Size64K, domain, coherency, memory, frames).map(PlainTable)
            },
            _ => |domain, coherency, memory, frames, _| {
                radix(PageSize::Size2M, domain, coherency, memory, frames).map(PlainTable)
            },
        }
    }

    fn root(&self) -> PhysAddr {
        self.0.root()
    }

    fn coherency(&self) -> Option<Coherency> {
        Some(self.0.coherency())
    }
}

impl ReplayTable for LeafCachedRadix {
    type Hardware = Vtd;

    fn with_page_size(make: MakeTable<Self>, size: PageSize) -> MakeTable<Self> {
        match size {
            PageSize::Size4K => make,
            PageSize::Size64K => |domain, coherency, memory, frames, _| {
                radix(PageSize::Size64K, domain, coherency, memory, frames).map(LeafCachedTable)
            },
            _ => |domain, coherency, memory, frames, _| {
                radix(PageSize::Size2M, domain, coherency, memory, frames).map(LeafCachedTable)
            },
        }
    }

    fn root(&self) -> PhysAddr {
        self.0.root()
    }

    fn coherency(&self) -> Option<Coherency> {
        Some(self.0.coherency())
    }
}

impl ReplayTable for FlatTable {
    type Hardware = Calgary;
    const LAST_PAGE: u64 = LAST_PAGE_32_BIT;

    fn root(&self) -> PhysAddr {
        self.0.root()
    }

    fn coherency(&self) -> Option<Coherency> {
        Some(self.0.coherency())
    }
}

impl ReplayTable for ReclaimingRadix {
    type Hardware = Vtd;

    fn root(&self) -> PhysAddr {
        Reclaiming::root(self)
    }
}

/// Creates a radix table that never frees table pages, with leaves of up to `largest`.
fn radix(
    largest: PageSize,
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
) -> Result<Table<SecondStage>, LabError> {
    let format = format(largest);
    Ok(Table::new(format, domain, coherency, memory, frames)?)
}

/// Creates a radix table without a leaf cache.
///
/// # Errors
/// Memory is short.
pub(crate) fn plain_radix(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<PlainRadix, LabError> {
    radix(PageSize::Size4K, domain, coherency, memory, frames).map(PlainTable)
}

pub(crate) fn leaf_cached_radix(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<LeafCachedRadix, LabError> {
    radix(PageSize::Size4K, domain, coherency, memory, frames).map(LeafCachedTable)
}

pub(crate) fn flat_table(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<FlatTable, LabError> {
    let root = flat_root(frames).ok_or(TableError::OutOfFrames)?;
    let table = Table::at(CalgaryTce::FULL, domain, coherency, memory, root)?;
    Ok(PlainTable(table))
}

/// Creates a table that writes back the whole table page at every unmap, as published.
pub(crate) fn reclaiming_radix_full_page(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<ReclaimingRadix, LabError> {
    let format = format(PageSize::Size4K);
    let table = ReclaimingTable::new(format, domain, coherency, memory, frames)?;
    Ok(Reclaiming::new(
        table.with_write_back(whole_table_pages),
        RefCell::new,
    ))
}

/// Creates a table that writes back only the touched lines: the fixed form.
pub(crate) fn reclaiming_radix(
    domain: DomainId,
    coherency: Coherency,
    memory: &Arena,
    frames: &Frames<Rc<Arena>>,
    _: Option<&()>,
) -> Result<ReclaimingRadix, LabError> {
    let format = format(PageSize::Size4K);
    let table = ReclaimingTable::new(format, domain, coherency, memory, frames)?;
    Ok(Reclaiming::new(table, RefCell::new))
}

/// Allocates the single level of a flat table.
pub(super) fn flat_root(frames: &Frames<Rc<Arena>>) -> Option<PhysAddr> {
    let bytes = Table::root_bytes_of(&CalgaryTce::FULL);
    let count = bytes.div_ceil(PageSize::Size4K.bytes());
    frames.alloc_contiguous(count).ok()
}
