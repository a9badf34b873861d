//! Per-CPU cache of leaf table addresses.

use alloc::sync::Arc;

use ringfence_types::{CachedLevels, FrameSource, Iova, PfnRange, PhysAddr, PhysMemory, Unmapped};

use crate::entry_count::NoCount;
use crate::table::Corrupt;
use crate::write_back::{DeferredWriteBack, ImmediateWriteBack, WriteBackPolicy};
use crate::{DirtyLines, Format, Level, MapError, MapRequest, Table, UnmapError};

/// Number of slots, a power of two. With 16 slots the cache was slower than the plain walk as soon
/// as 48 tables were in use.
const SLOTS: usize = 64;

#[derive(Debug, Clone, Copy)]
struct Slot {
    /// 1 + the address bits above a leaf table; 0 if empty.
    tag: u64,
    table: PhysAddr,
}

/// Caches the addresses of the leaf tables of one [`Table`], so that a map into a cached leaf table
/// is a single store. Use one per CPU.
///
/// The cache is sound because a linked table page stays linked until the table is destroyed, and
/// [`Table::destroy`] fails while a cache exists. [`ReclaimingTable`](crate::ReclaimingTable)
/// offers no cache for this reason. With a table other than its own, every lookup misses and the
/// operation walks the table.
#[derive(Debug)]
pub struct LeafCache {
    of: Arc<()>,
    slots: [Slot; SLOTS],
}

impl<F: Format> Table<F> {
    /// Creates a cache for one CPU.
    pub fn leaf_cache(&self) -> LeafCache {
        LeafCache {
            of: Arc::clone(&self.identity),
            slots: [Slot {
                tag: 0,
                table: PhysAddr::ZERO,
            }; SLOTS],
        }
    }
}

impl LeafCache {
    /// Maps as [`Table::map`] does.
    #[inline]
    pub fn map<F: Format, M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        frames: &S,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.map_with(
            table,
            mem,
            frames,
            request,
            ImmediateWriteBack(table.coherency),
        )
    }

    /// Maps as [`Table::map_nosync`] does.
    #[inline]
    pub fn map_nosync<F: Format, M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        frames: &S,
        request: MapRequest,
        dirty: &mut DirtyLines,
    ) -> Result<(), MapError> {
        self.map_with(
            table,
            mem,
            frames,
            request,
            DeferredWriteBack(table.coherency, dirty),
        )
    }

    /// Unmaps as [`Table::unmap`] does.
    #[inline]
    pub fn unmap<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        self.unmap_with(table, mem, range, ImmediateWriteBack(table.coherency))
    }

    /// Unmaps as [`Table::unmap_nosync`] does.
    #[inline]
    pub fn unmap_nosync<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        range: PfnRange,
        dirty: &mut DirtyLines,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        self.unmap_with(table, mem, range, DeferredWriteBack(table.coherency, dirty))
    }

    #[inline(always)]
    fn map_with<F: Format, M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        frames: &S,
        request: MapRequest,
        mut write_back: impl WriteBackPolicy,
    ) -> Result<(), MapError> {
        // No width check needed: the whole run lies in a linked table.
        if table.check_granules(&request).is_ok()
            && let Some(at) = self.entry(table, request.iova, request.pages)
        {
            table.store_leaf_entries(mem, at, &request, &mut write_back)?;
            write_back.finish(mem);
            return Ok(());
        }
        // Pass a copy, so that `request` itself stays in registers.
        self.map_missed(table, mem, frames, MapRequest { ..request }, write_back)
    }

    #[cold]
    #[inline(never)]
    fn map_missed<F: Format, M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        frames: &S,
        request: MapRequest,
        write_back: impl WriteBackPolicy,
    ) -> Result<(), MapError> {
        table.map_with(mem, frames, request, write_back, NoCount)?;
        self.learn(table, mem, request.iova);
        Ok(())
    }

    #[inline(always)]
    fn unmap_with<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        range: PfnRange,
        mut write_back: impl WriteBackPolicy,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        if let Some(at) = self.entry(table, range.lo().iova(), range.pages()) {
            table.clear_leaf_entries(mem, at, &range, &mut write_back)?;
            write_back.finish(mem);
            return Ok((
                Unmapped::attest_cleared(table.domain(), range),
                CachedLevels::Leaves,
            ));
        }
        self.unmap_missed(table, mem, range, write_back)
    }

    #[cold]
    #[inline(never)]
    fn unmap_missed<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        range: PfnRange,
        write_back: impl WriteBackPolicy,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        let done = table.unmap_with(mem, range, write_back, NoCount)?;
        self.learn(table, mem, range.lo().iova());
        Ok(done)
    }

    /// Returns the address of the entry for `iova`; `None` unless its leaf table is cached and
    /// holds the entries of all `pages` pages.
    #[inline(always)]
    fn entry<F: Format>(&self, table: &Table<F>, iova: Iova, pages: u64) -> Option<PhysAddr> {
        let format = table.format();
        let index = format.index(Level::LEAF, iova);
        let slot = self.slots.get(Self::slot_of(format, iova))?;
        let room = table.pages_to_end(iova);
        let known = slot.tag == Self::tag_of(format, iova)
            && pages <= room
            && Arc::ptr_eq(&self.of, &table.identity);
        known.then(|| slot.table.wrapping_add((index as u64).wrapping_mul(8)))
    }

    fn learn<F: Format, M: PhysMemory + ?Sized>(&mut self, table: &Table<F>, mem: &M, iova: Iova) {
        let format = table.format();
        let own = Arc::ptr_eq(&self.of, &table.identity);
        // This second descent also makes sure that the path has reached memory before this CPU
        // relies on it.
        let lowest = table.walk_linked(mem, iova).map_err(|Corrupt| ());
        if let Ok(lowest) = lowest
            && own
            && lowest.level == Level::LEAF
            && let Some(slot) = self.slots.get_mut(Self::slot_of(format, iova))
        {
            *slot = Slot {
                tag: Self::tag_of(format, iova),
                table: lowest.table,
            };
        }
    }

    /// Returns the address bits that select a leaf table.
    #[inline]
    fn above_leaf<F: Format>(format: &F, iova: Iova) -> u64 {
        let bits = format.entries(Level::LEAF).trailing_zeros();
        iova.get()
            .wrapping_shr(format.shift(Level::LEAF).wrapping_add(bits))
    }

    #[inline]
    fn tag_of<F: Format>(format: &F, iova: Iova) -> u64 {
        Self::above_leaf(format, iova).wrapping_add(1)
    }

    #[inline]
    fn slot_of<F: Format>(format: &F, iova: Iova) -> usize {
        Self::above_leaf(format, iova) as usize & (SLOTS - 1)
    }
}
