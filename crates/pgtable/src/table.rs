//! A page table: root, format, teardown, and the descent to an entry.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{
    DomainId, Flushed, FrameSource, Iova, PhysAddr, PhysMemory, WholeDomain, is_zeroed,
};

use crate::frame_reserve::{FrameReserve, fresh_frame};
use crate::{Coherency, Cursor, Entry, Format, Leaf, Level, TableError, WalkError, walk};

/// The page table of one domain. A linked table page stays linked until the table is destroyed, as
/// in Linux. [`ReclaimingTable`](crate::ReclaimingTable) frees empty table pages earlier.
///
/// # Concurrency
/// All methods take `&self`. CPUs map and unmap concurrently without a lock, provided that no two
/// of them operate on the same range at the same time. The IOVA allocator guarantees that. If the
/// guarantee is broken, one of two maps is lost, but memory stays safe.
///
/// A CPU links a new lower-level table by compare-and-exchange on the entry above. The CPU that
/// loses the race returns its frame.
///
/// # Memory and frames
/// The caller must pass the same memory and the same frame source to every call.
#[derive(Debug)]
pub struct Table<F> {
    pub(crate) format: F,
    pub(crate) root: PhysAddr,
    pub(crate) coherency: Coherency,
    domain: DomainId,
    /// Identifies this table. A [`LeafCache`](crate::LeafCache) of it holds a clone.
    pub(crate) identity: Arc<()>,
    /// True if the root frame came from the frame source.
    owns_root: bool,
    /// Frames linked below the root.
    pub(crate) frames: AtomicU64,
}

/// The lowest linked table on the path to an address.
pub(crate) struct WalkResult<'m> {
    pub(crate) level: Level,
    pub(crate) table: PhysAddr,
    /// The entry that points to the table; `None` for the root.
    pub(crate) parent: Option<&'m AtomicU64>,
}

/// The entries of a run of pages in one leaf table.
pub(crate) struct LeafEntry<'m> {
    /// Address of the first entry.
    pub(crate) at: PhysAddr,
    /// The entry that points to the leaf table; `None` for the root.
    pub(crate) parent: Option<&'m AtomicU64>,
}

/// The path leaves memory, or an entry on it has a value that this format never writes.
pub(crate) struct Corrupt;

impl<F: Format> Table<F> {
    /// Creates an empty table.
    ///
    /// # Errors
    /// [`TableError::RootTooLarge`] for a flat format, whose root needs contiguous frames: use
    /// [`at`](Self::at). [`TableError::OutOfFrames`] or [`TableError::Memory`] if the frame source
    /// has no usable frame.
    pub fn new<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        format: F,
        domain: DomainId,
        coherency: Coherency,
        mem: &M,
        frames: &S,
    ) -> Result<Self, TableError> {
        if F::ENTRY_BYTES != 8 {
            return Err(TableError::NarrowEntries);
        }
        if Self::root_bytes_of(&format) > F::GRANULE.bytes() {
            return Err(TableError::RootTooLarge);
        }
        let root = fresh_frame(F::GRANULE, coherency, mem, frames)?;
        coherency.drain(mem);
        Ok(Self::with_root(format, domain, coherency, root, true))
    }

    /// Creates an empty table whose root lies at `root`. The caller provides
    /// [`root_bytes_of`](Self::root_bytes_of) zeroed bytes, aligned to
    /// [`Format::root_alignment`], and takes them back after [`destroy`](Self::destroy).
    ///
    /// # Errors
    /// [`TableError::Memory`] if the root is misaligned or outside memory,
    /// [`TableError::RootNotEmpty`] if it is not all zero.
    pub fn at<M: PhysMemory + ?Sized>(
        format: F,
        domain: DomainId,
        coherency: Coherency,
        mem: &M,
        root: PhysAddr,
    ) -> Result<Self, TableError> {
        if F::ENTRY_BYTES != 8 {
            return Err(TableError::NarrowEntries);
        }
        let entries = format.entries(format.root_level());
        if !root.is_aligned(format.root_alignment()) {
            return Err(TableError::Memory);
        }
        let words = mem.words(root, entries).map_err(|_| TableError::Memory)?;
        if !is_zeroed(words) {
            return Err(TableError::RootNotEmpty);
        }
        coherency.write_back(mem, root, Self::root_bytes_of(&format));
        coherency.drain(mem);
        Ok(Self::with_root(format, domain, coherency, root, false))
    }

    fn with_root(
        format: F,
        domain: DomainId,
        coherency: Coherency,
        root: PhysAddr,
        owns_root: bool,
    ) -> Self {
        Self {
            format,
            root,
            coherency,
            domain,
            identity: Arc::new(()),
            owns_root,
            frames: AtomicU64::new(0),
        }
    }

    /// Returns the size of the root of `format` in bytes.
    #[inline]
    pub fn root_bytes_of(format: &F) -> u64 {
        (format.entries(format.root_level()) as u64).saturating_mul(8)
    }

    /// Returns the physical address of the root.
    #[inline]
    pub const fn root(&self) -> PhysAddr {
        self.root
    }

    /// Returns the format.
    #[inline]
    pub const fn format(&self) -> &F {
        &self.format
    }

    /// Returns the domain-id that tags the translations of this table.
    #[inline]
    pub const fn domain(&self) -> DomainId {
        self.domain
    }

    /// Returns whether the IOMMU's table walk snoops CPU caches.
    #[inline]
    pub const fn coherency(&self) -> Coherency {
        self.coherency
    }

    /// Returns the size of all table pages in bytes, including the root.
    #[inline]
    pub fn table_bytes(&self) -> u64 {
        self.frames
            .load(Ordering::Relaxed)
            .saturating_mul(F::GRANULE.bytes())
            .saturating_add(Self::root_bytes_of(&self.format))
    }

    /// Walks the table for `iova` in software, as the hardware does.
    #[inline]
    pub fn walk<M: PhysMemory + ?Sized>(&self, mem: &M, iova: Iova) -> Result<Leaf, WalkError> {
        walk(
            &self.format,
            mem,
            Cursor::root(&self.format, self.root),
            iova,
            |_| {},
        )
    }

    /// Returns the leaf that translates `iova`; `None` if the walk fails.
    #[inline]
    pub fn lookup<M: PhysMemory + ?Sized>(&self, mem: &M, iova: Iova) -> Option<Leaf> {
        self.walk(mem, iova).ok()
    }

    /// Returns true if the table holds no leaf. Reads the whole table. A table page outside memory
    /// counts as empty, because it translates nothing.
    pub fn is_empty<M: PhysMemory + ?Sized>(&self, mem: &M) -> bool {
        self.is_empty_below(mem, self.format.root_level(), self.root)
    }

    /// Recursion depth is bounded by the level.
    fn is_empty_below<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        level: Level,
        table: PhysAddr,
    ) -> bool {
        let Ok(words) = mem.words(table, self.format.entries(level)) else {
            return true;
        };
        words.iter().all(
            |word| match self.format.decode(level, word.load(Ordering::Acquire)) {
                Entry::Leaf { .. } => false,
                Entry::Table { at, next, .. } => self.is_empty_below(mem, next, at),
                Entry::Absent | Entry::Reserved => true,
            },
        )
    }

    /// Frees all table pages. Frees the root only if it came from the frame source.
    ///
    /// The caller must first detach every device. `proof` must come from a flush of the domain
    /// submitted after that.
    ///
    /// # Errors
    /// Returns the table unchanged if `proof` belongs to another domain, or if a
    /// [`LeafCache`](crate::LeafCache) of the table still exists.
    pub fn destroy<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        self,
        mem: &M,
        frames: &S,
        proof: &Flushed<WholeDomain>,
    ) -> Result<(), Self> {
        if proof.whole_domain() != self.domain || Arc::strong_count(&self.identity) > 1 {
            return Err(self);
        }
        let mut unlinked = FrameReserve::new(F::GRANULE, mem, frames);
        self.unlink_below(mem, &mut unlinked, self.format.root_level(), self.root);
        if self.owns_root && !unlinked.holds(self.root) {
            unlinked.put(self.root);
        }
        Ok(())
    }

    /// Unlinks all tables below `table` into `unlinked`, whose drop frees them. A hostile hand may
    /// have linked a table twice, in a cycle or to the root: each table is freed once, and a root
    /// of the caller is not.
    ///
    /// Recursion depth is bounded by the level. A corrupt entry leaks the tables below it.
    fn unlink_below<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &self,
        mem: &M,
        unlinked: &mut FrameReserve<'_, M, S>,
        level: Level,
        table: PhysAddr,
    ) {
        if level == Level::LEAF {
            return;
        }
        let Ok(words) = mem.words(table, self.format.entries(level)) else {
            return;
        };
        for word in words {
            if let Entry::Table { at, next, .. } =
                self.format.decode(level, word.load(Ordering::Acquire))
            {
                // Unlink first: the recursion then does not follow this entry again through a
                // cycle.
                word.store(0, Ordering::Release);
                if at == self.root || unlinked.holds(at) {
                    continue;
                }
                self.unlink_below(mem, unlinked, next, at);
                // A cycle below may have unlinked the table since.
                if !unlinked.holds(at) {
                    unlinked.put(at);
                }
            }
        }
    }

    /// Fast path: finds the entries of `pages` pages from `iova` on. The caller need not check the
    /// width.
    ///
    /// Succeeds only for a table of three to six levels, if the whole path is linked and all
    /// entries lie in one leaf table. On a non-coherent platform, the path must also be written
    /// back.
    ///
    /// On `None` the caller falls back to [`walk_linked`](Self::walk_linked), which reports the
    /// reason.
    #[inline(always)]
    pub(crate) fn leaf_entry<'m, M: PhysMemory + ?Sized>(
        &self,
        mem: &'m M,
        iova: Iova,
        pages: u64,
    ) -> Option<LeafEntry<'m>> {
        // A copy of the descent for each depth, with constant depth, width and shifts.
        match self.format.root_level() {
            Level::THREE => self.leaf_entry_below(Level::THREE, mem, iova, pages),
            Level::FOUR => self.leaf_entry_below(Level::FOUR, mem, iova, pages),
            Level::FIVE => self.leaf_entry_below(Level::FIVE, mem, iova, pages),
            Level::MAX => self.leaf_entry_below(Level::MAX, mem, iova, pages),
            _ => None,
        }
    }

    /// [`leaf_entry`](Self::leaf_entry) of a table with its root at `level`.
    #[inline(always)]
    fn leaf_entry_below<'m, M: PhysMemory + ?Sized>(
        &self,
        mut level: Level,
        mem: &'m M,
        iova: Iova,
        pages: u64,
    ) -> Option<LeafEntry<'m>> {
        let format = self.format;
        if !format.translates(iova) {
            return None;
        }
        let mut at = self.entry_address(level, self.root, iova);
        let mut parent = None;
        let mut written_back = u64::MAX;
        while let Some(below) = level.below() {
            let word = mem.word(at).ok()?;
            let raw = word.load(Ordering::Acquire);
            let table = format.descend(level, raw)?;
            written_back &= raw;
            parent = Some(word);
            level = below;
            at = table.wrapping_add(self.index_below_root(level, iova).wrapping_mul(8));
        }
        let index = self.index_below_root(Level::LEAF, iova);
        let room = Self::leaf_pages(Self::TABLE_ENTRIES.wrapping_sub(index));
        let in_memory = self.coherency == Coherency::Coherent
            || written_back & F::WRITTEN_BACK == F::WRITTEN_BACK;
        (pages <= room && in_memory).then_some(LeafEntry { at, parent })
    }

    /// Number of entries of every table below the root.
    const TABLE_ENTRIES: u64 = F::GRANULE.bytes() / 8;

    /// Returns the index of the entry for `iova` in a table of `level`, which is not the root.
    #[inline(always)]
    fn index_below_root(&self, level: Level, iova: Iova) -> u64 {
        let shift = self.format.shift(level);
        iova.get().wrapping_shr(shift) & (Self::TABLE_ENTRIES - 1)
    }

    /// Descends towards `iova` through all linked tables. Makes sure that the path is in memory.
    pub(crate) fn walk_linked<'m, M: PhysMemory + ?Sized>(
        &self,
        mem: &'m M,
        iova: Iova,
    ) -> Result<WalkResult<'m>, Corrupt> {
        let format = self.format;
        let mut lowest = WalkResult {
            level: format.root_level(),
            table: self.root,
            parent: None,
        };
        let mut written_back = F::WRITTEN_BACK;
        while let Some(below) = lowest.level.below() {
            let word = mem
                .word(self.entry_address(lowest.level, lowest.table, iova))
                .map_err(|_| Corrupt)?;
            let raw = word.load(Ordering::Acquire);
            let Some(table) = format.descend(lowest.level, raw) else {
                break;
            };
            written_back &= raw;
            lowest = WalkResult {
                level: below,
                table,
                parent: Some(word),
            };
        }
        if self.coherency == Coherency::NonCoherent && written_back != F::WRITTEN_BACK {
            self.publish_path(mem, iova);
        }
        Ok(lowest)
    }

    /// Writes back every table entry on the path to `iova` that is not yet in memory.
    ///
    /// The CPU that linked an entry may not have written it back yet. Without this, the driver
    /// could give a device an IOVA whose path is still in another CPU's cache.
    #[cold]
    #[inline(never)]
    fn publish_path<M: PhysMemory + ?Sized>(&self, mem: &M, iova: Iova) {
        let mut level = self.format.root_level();
        let mut table = self.root;
        while let Some(below) = level.below() {
            let at = self.entry_address(level, table, iova);
            let Ok(word) = mem.word(at) else { return };
            let raw = word.load(Ordering::Acquire);
            let Some(next) = self.format.descend(level, raw) else {
                return;
            };
            if raw & F::WRITTEN_BACK == 0 {
                self.publish(mem, word, at);
            }
            (level, table) = (below, next);
        }
    }

    /// Writes a table entry back, waits, and sets [`Format::WRITTEN_BACK`] in it.
    #[cold]
    pub(crate) fn publish<M: PhysMemory + ?Sized>(&self, mem: &M, entry: &AtomicU64, at: PhysAddr) {
        self.coherency.write_back(mem, at, 8);
        self.coherency.drain(mem);
        entry.fetch_or(F::WRITTEN_BACK, Ordering::Release);
    }

    /// Returns the address of the entry for `iova` in the table of `level` at `table`.
    #[inline(always)]
    pub(crate) fn entry_address(&self, level: Level, table: PhysAddr, iova: Iova) -> PhysAddr {
        let index = self.format.index(level, iova) as u64;
        table.wrapping_add(index.wrapping_mul(8))
    }
}
