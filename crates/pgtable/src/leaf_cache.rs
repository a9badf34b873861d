//! A processor's memory of where leaf tables are.

use alloc::sync::Arc;

use ringfence_types::{CachedLevels, FrameSource, Iova, PfnRange, PhysAddr, PhysMemory, Unmapped};

use crate::reclaim::NoCount;
use crate::table::Corrupt;
use crate::write_back::{DeferredWriteBack, ImmediateWriteBack, WriteBackPolicy};
use crate::{DirtyLines, Format, Level, MapError, MapRequest, Table, UnmapError};

/// Slots, a power of two. 16 lost to the plain walk as soon as 48 tables were in use.
const SLOTS: usize = 64;

#[derive(Debug, Clone, Copy)]
struct Slot {
    /// 1 + the address bits above a leaf table; 0 while empty.
    tag: u64,
    table: PhysAddr,
}

/// Remembers where the leaf tables of one [`Table`] are, so that mapping in a warm table is one
/// store. One per processor.
///
/// Sound because a table page, once linked, stays linked until the table is destroyed, and
/// [`Table::destroy`] refuses while a cache lives. There is none for
/// [`ReclaimingTable`](crate::ReclaimingTable). Used with another table than its own, it is of no
/// use and does no harm: it walks.
#[derive(Debug)]
pub struct LeafCache {
    of: Arc<()>,
    slots: [Slot; SLOTS],
}

impl<F: Format> Table<F> {
    /// A cache for one more processor.
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
    /// As [`Table::map`].
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

    /// As [`Table::map_nosync`].
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

    /// As [`Table::unmap`].
    #[inline]
    pub fn unmap<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        self.unmap_with(table, mem, range, ImmediateWriteBack(table.coherency))
    }

    /// As [`Table::unmap_nosync`].
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
        mut sink: impl WriteBackPolicy,
    ) -> Result<(), MapError> {
        // The width needs no check: the whole run lies in a table that is linked.
        if table.check_granules(&request).is_ok()
            && let Some(at) = self.entry(table, request.iova, request.pages)
        {
            table.fill_leaf_table(mem, at, &request, &mut sink)?;
            sink.finish(mem);
            return Ok(());
        }
        // A copy: the request itself stays in registers.
        self.map_missed(table, mem, frames, MapRequest { ..request }, sink)
    }

    #[cold]
    #[inline(never)]
    fn map_missed<F: Format, M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        frames: &S,
        request: MapRequest,
        sink: impl WriteBackPolicy,
    ) -> Result<(), MapError> {
        table.map_with(mem, frames, request, sink, NoCount)?;
        self.learn(table, mem, request.iova);
        Ok(())
    }

    #[inline(always)]
    fn unmap_with<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        range: PfnRange,
        mut sink: impl WriteBackPolicy,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        if let Some(at) = self.entry(table, range.lo().iova(), range.pages()) {
            table.clear_leaf_table(mem, at, &range, &mut sink)?;
            sink.finish(mem);
            return Ok((
                Unmapped::attest_cleared(table.domain(), range),
                CachedLevels::Leaves,
            ));
        }
        self.unmap_missed(table, mem, range, sink)
    }

    #[cold]
    #[inline(never)]
    fn unmap_missed<F: Format, M: PhysMemory + ?Sized>(
        &mut self,
        table: &Table<F>,
        mem: &M,
        range: PfnRange,
        sink: impl WriteBackPolicy,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        let done = table.unmap_with(mem, range, sink, NoCount)?;
        self.learn(table, mem, range.lo().iova());
        Ok(done)
    }

    /// Address of the entry for `iova`, if its leaf table is known and holds the entries of all
    /// `pages` pages.
    #[inline(always)]
    fn entry<F: Format>(&self, table: &Table<F>, iova: Iova, pages: u64) -> Option<PhysAddr> {
        let format = table.format();
        let index = format.index(Level::LEAF, iova);
        let slot = self.slots.get(Self::slot_of(format, iova))?;
        let room = format.entries(Level::LEAF).wrapping_sub(index) as u64;
        let known = slot.tag == Self::tag_of(format, iova)
            && pages <= room
            && Arc::ptr_eq(&self.of, &table.identity);
        known.then(|| slot.table.wrapping_add((index as u64).wrapping_mul(8)))
    }

    fn learn<F: Format, M: PhysMemory + ?Sized>(&mut self, table: &Table<F>, mem: &M, iova: Iova) {
        let format = table.format();
        let own = Arc::ptr_eq(&self.of, &table.identity);
        // Descending once more also makes sure that the path has reached memory before this
        // processor relies on it.
        let spot = table.walk_linked(mem, iova).map_err(|Corrupt| ());
        if let Ok(spot) = spot
            && own
            && spot.level == Level::LEAF
            && let Some(slot) = self.slots.get_mut(Self::slot_of(format, iova))
        {
            *slot = Slot {
                tag: Self::tag_of(format, iova),
                table: spot.table,
            };
        }
    }

    /// The address bits that select a leaf table.
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
