//! The allocators of the modes, with static types.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_iova::{
    Bitmap, BitmapState, CachedTree, Capacity, Contiguous, Depot, Eiovar, FreeBlocks, FreeBsdTree,
    LinuxMaple, LinuxRcache, Locked, MagazineLimits, Magazines, RcacheShared, TableBitmap,
    TableCursor,
};
use ringfence_memory::Arena;
use ringfence_papers::{BitmapAsPublished, PublishedBitmapState};
use ringfence_pgtable::TableError;
use ringfence_types::{Pfn, PfnRange};

use super::tables::flat_root;
use super::{AllocEnv, LAST_PAGE_32_BIT, ThreadCell};
use crate::error::LabError;
use crate::modes::Alloc;
use crate::stubs::StaticStubs;

pub(crate) type RbTreeAlloc = Locked<CachedTree, ThreadCell<CachedTree>>;
pub(crate) type EiovarAlloc = Locked<Eiovar<CachedTree>, ThreadCell<Eiovar<CachedTree>>>;
pub(crate) type BitmapAlloc = Bitmap<ThreadCell<BitmapState>>;
pub(crate) type BitmapAsPublishedAlloc = BitmapAsPublished<ThreadCell<PublishedBitmapState>>;
pub(crate) type FreeBsdAlloc = Locked<FreeBsdTree, ThreadCell<FreeBsdTree>>;
pub(crate) type RcacheAlloc = LinuxRcache<CachedTree, ThreadCell<RcacheShared<CachedTree>>>;
pub(crate) type MapleAlloc = LinuxRcache<LinuxMaple, ThreadCell<RcacheShared<LinuxMaple>>>;
pub(crate) type MagazineAlloc = Magazines<ThreadCell<Depot>>;
pub(crate) type ContiguousAlloc = Contiguous<MagazineAlloc, ThreadCell<FreeBlocks>>;
pub(crate) type TableBitmapAlloc = TableBitmap<Rc<Arena>, ThreadCell<TableCursor>>;

impl StaticStubs for RbTreeAlloc {}
impl StaticStubs for EiovarAlloc {}
impl StaticStubs for BitmapAlloc {}
impl StaticStubs for BitmapAsPublishedAlloc {}
impl StaticStubs for FreeBsdAlloc {}
impl StaticStubs for RcacheAlloc {}
impl StaticStubs for MapleAlloc {}
impl StaticStubs for MagazineAlloc {}
impl StaticStubs for ContiguousAlloc {}

impl AllocEnv<'_> {
    /// Returns all pages that the table translates except page 0, which is never handed out.
    fn full_range(&self) -> Result<PfnRange, LabError> {
        self.range_up_to(u64::MAX)
    }

    /// Returns the pages of [`full_range`](Self::full_range) up to `last`.
    fn range_up_to(&self, last: u64) -> Result<PfnRange, LabError> {
        PfnRange::inclusive(Pfn::new(1), Pfn::new(last.min(self.last_page)))
            .ok_or(LabError::Internal("space"))
    }
}

pub(crate) fn rb_tree(site: &AllocEnv<'_>) -> Result<RbTreeAlloc, LabError> {
    Ok(Locked::new(
        CachedTree::new(site.full_range()?),
        RefCell::new,
    ))
}

pub(crate) fn eiovar(site: &AllocEnv<'_>) -> Result<EiovarAlloc, LabError> {
    let capacity = match site.kind {
        Alloc::Eiovar(Some(k)) => Capacity::AtMost(k),
        _ => Capacity::Unbounded,
    };
    let tree = CachedTree::new(site.full_range()?);
    Ok(Locked::new(Eiovar::new(tree, capacity), RefCell::new))
}

pub(crate) fn bitmap(site: &AllocEnv<'_>) -> Result<BitmapAlloc, LabError> {
    Ok(Bitmap::new(
        site.range_up_to(LAST_PAGE_32_BIT)?,
        RefCell::new,
    )?)
}

pub(crate) fn bitmap_as_published(site: &AllocEnv<'_>) -> Result<BitmapAsPublishedAlloc, LabError> {
    Ok(BitmapAsPublished::new(
        site.range_up_to(LAST_PAGE_32_BIT)?,
        RefCell::new,
    )?)
}

/// Creates the allocator whose bitmap is the table that the hardware reads. Without a table, it
/// allocates entries that no hardware reads.
pub(crate) fn table_bitmap(site: &AllocEnv<'_>) -> Result<TableBitmapAlloc, LabError> {
    let table = site.table.or_else(|| flat_root(site.frames));
    let table = table.ok_or(TableError::OutOfFrames)?;
    let made = TableBitmap::new(
        Rc::clone(site.memory),
        table,
        site.range_up_to(LAST_PAGE_32_BIT)?,
        RefCell::new,
    );
    made.map_err(|_| LabError::Table(TableError::Memory))
}

pub(crate) fn freebsd(site: &AllocEnv<'_>) -> Result<FreeBsdAlloc, LabError> {
    Ok(Locked::new(
        FreeBsdTree::new(site.full_range()?),
        RefCell::new,
    ))
}

pub(crate) fn freebsd_14(site: &AllocEnv<'_>) -> Result<FreeBsdAlloc, LabError> {
    Ok(Locked::new(
        FreeBsdTree::freebsd_14(site.full_range()?),
        RefCell::new,
    ))
}

pub(crate) fn maple(site: &AllocEnv<'_>) -> Result<MapleAlloc, LabError> {
    Ok(LinuxRcache::new(
        LinuxMaple::new(site.full_range()?),
        RefCell::new,
    ))
}

pub(crate) fn rcache(site: &AllocEnv<'_>) -> Result<RcacheAlloc, LabError> {
    Ok(LinuxRcache::new(
        CachedTree::new(site.full_range()?),
        RefCell::new,
    ))
}

pub(crate) fn magazine(site: &AllocEnv<'_>) -> Result<MagazineAlloc, LabError> {
    Ok(Magazines::new(
        site.full_range()?,
        MagazineLimits::DEFAULT,
        RefCell::new,
    )?)
}

pub(crate) fn contiguous(site: &AllocEnv<'_>) -> Result<ContiguousAlloc, LabError> {
    let below = magazine(site)?;
    let most = FreeBlocks::HALF_OF_32_BITS;
    Ok(Contiguous::new(below, most, RefCell::new)?)
}
