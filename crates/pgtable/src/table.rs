//! A table: its root, what is known of it, and how to find the place of an entry.

use alloc::sync::Arc;
use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{
    DomainId, Flushed, FrameSource, Iova, PageSize, PhysAddr, PhysMemory, WholeDomain,
};

use crate::frame_reserve::fresh_frame;
use crate::{Coherency, Cursor, Entry, Format, Leaf, Level, TableError, WalkError, walk};

/// The translation table of one domain. Table pages, once linked, stay until the table is destroyed
/// (as in Linux); a table that gives them back earlier is
/// [`ReclaimingTable`](crate::ReclaimingTable).
///
/// # Several processors
/// All methods take `&self`: processors map and unmap at the same time without a lock, provided
/// that no two work on the same range at the same time. That is the IOVA allocator's promise; if it
/// is broken, one of two maps is lost, and memory stays safe. New lower tables are linked by
/// compare-and-exchange on the entry above; the loser's frame goes back.
///
/// # Memory and frames
/// Every call is given the same memory and the same frame source.
#[derive(Debug)]
pub struct Table<F> {
    pub(crate) format: F,
    pub(crate) root: PhysAddr,
    pub(crate) coherency: Coherency,
    domain: DomainId,
    /// Tells this table from every other, for as long as a leaf cache of it lives.
    pub(crate) identity: Arc<()>,
    /// Whether the root is a frame of the frame source.
    owns_root: bool,
    /// Frames linked below the root.
    pub(crate) frames: AtomicU64,
}

/// The lowest table on the path to an address.
pub(crate) struct WalkResult<'m> {
    pub(crate) level: Level,
    pub(crate) table: PhysAddr,
    /// The entry that leads to it; none for the root.
    pub(crate) parent: Option<&'m AtomicU64>,
}

/// Entries of a leaf table.
pub(crate) struct LeafEntry<'m> {
    /// Address of the first.
    pub(crate) at: PhysAddr,
    /// The entry that leads to their table; none for the root.
    pub(crate) parent: Option<&'m AtomicU64>,
}

/// The path leads out of memory, or through an entry that no code here writes.
pub(crate) struct Corrupt;

impl<F: Format> Table<F> {
    /// An empty table.
    ///
    /// # Errors
    /// [`TableError::RootTooLarge`] for a flat format, whose root takes contiguous frames: see
    /// [`at`](Self::at).
    pub fn new<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        format: F,
        domain: DomainId,
        coherency: Coherency,
        mem: &M,
        frames: &S,
    ) -> Result<Self, TableError> {
        if Self::root_bytes_of(&format) > PageSize::Size4K.bytes() {
            return Err(TableError::RootTooLarge);
        }
        let root = fresh_frame(coherency, mem, frames)?;
        coherency.drain(mem);
        Ok(Self::with_root(format, domain, coherency, root, true))
    }

    /// An empty table whose root lies at `root`, 4 KiB aligned, in
    /// [`root_bytes_of`](Self::root_bytes_of) bytes of zeroes that the caller provides and takes
    /// back after [`destroy`](Self::destroy).
    ///
    /// # Errors
    /// [`TableError::Memory`] if they lie outside memory, [`TableError::RootNotEmpty`] if they are
    /// not zero.
    pub fn at<M: PhysMemory + ?Sized>(
        format: F,
        domain: DomainId,
        coherency: Coherency,
        mem: &M,
        root: PhysAddr,
    ) -> Result<Self, TableError> {
        let entries = format.entries(format.root_level());
        if !root.is_aligned(PageSize::Size4K.bytes()) {
            return Err(TableError::Memory);
        }
        let words = mem.words(root, entries).map_err(|_| TableError::Memory)?;
        if words.iter().any(|word| word.load(Ordering::Relaxed) != 0) {
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

    /// Bytes that the root of `format` takes.
    #[inline]
    pub fn root_bytes_of(format: &F) -> u64 {
        (format.entries(format.root_level()) as u64).saturating_mul(8)
    }

    /// Address of the root.
    #[inline]
    pub const fn root(&self) -> PhysAddr {
        self.root
    }

    /// The format.
    #[inline]
    pub const fn format(&self) -> &F {
        &self.format
    }

    /// The domain that tags the translations.
    #[inline]
    pub const fn domain(&self) -> DomainId {
        self.domain
    }

    /// Whether walkers snoop.
    #[inline]
    pub const fn coherency(&self) -> Coherency {
        self.coherency
    }

    /// Bytes that the tables take, the root included.
    #[inline]
    pub fn table_bytes(&self) -> u64 {
        self.frames
            .load(Ordering::Relaxed)
            .saturating_mul(PageSize::Size4K.bytes())
            .saturating_add(Self::root_bytes_of(&self.format))
    }

    /// What the table says about `iova`: the hardware's walk, in software.
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

    /// The leaf that translates `iova`, if there is one.
    #[inline]
    pub fn lookup<M: PhysMemory + ?Sized>(&self, mem: &M, iova: Iova) -> Option<Leaf> {
        self.walk(mem, iova).ok()
    }

    /// Whether the table holds no leaf. Reads all of it; what cannot be read counts as empty, for
    /// it translates nothing.
    pub fn is_empty<M: PhysMemory + ?Sized>(&self, mem: &M) -> bool {
        self.is_empty_below(mem, self.format.root_level(), self.root)
    }

    /// Depth is bounded by the level.
    fn is_empty_below<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        level: Level,
        table: PhysAddr,
    ) -> bool {
        let Ok(words) = mem.words(table, self.format.entries(level)) else {
            return true;
        };
        words.iter().all(|word| {
            match (
                self.format.decode(level, word.load(Ordering::Acquire)),
                level.below(),
            ) {
                (Entry::Leaf { .. }, _) => false,
                (Entry::Table { at, .. }, Some(below)) => self.is_empty_below(mem, below, at),
                _ => true,
            }
        })
    }

    /// Gives all table pages back; the root only if it came from the frame source.
    ///
    /// The caller has detached every device, and `proof` is of a flush of the domain submitted
    /// after that.
    ///
    /// # Errors
    /// The table comes back if `proof` is of another domain, or a [`LeafCache`](crate::LeafCache)
    /// of it still lives.
    pub fn destroy<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        self,
        mem: &M,
        frames: &S,
        proof: &Flushed<WholeDomain>,
    ) -> Result<(), Self> {
        if proof.whole_domain() != self.domain || Arc::strong_count(&self.identity) > 1 {
            return Err(self);
        }
        self.free_below(mem, frames, self.format.root_level(), self.root);
        if self.owns_root {
            frames.free(self.root);
        }
        Ok(())
    }

    /// Depth is bounded by the level. Corrupt entries leak what is behind them.
    fn free_below<M: PhysMemory + ?Sized, S: FrameSource + ?Sized>(
        &self,
        mem: &M,
        frames: &S,
        level: Level,
        table: PhysAddr,
    ) {
        let Some(below) = level.below() else { return };
        let Ok(words) = mem.words(table, self.format.entries(level)) else {
            return;
        };
        for word in words {
            if let Entry::Table { at, .. } = self.format.decode(level, word.load(Ordering::Acquire))
            {
                // Unlinked first, so that a table linked twice by a hostile hand is not freed twice
                // from here.
                word.store(0, Ordering::Release);
                self.free_below(mem, frames, below, at);
                frames.free(at);
            }
        }
    }

    /// Finds the entries of `pages` pages from `iova` on, where nothing is out of the ordinary: a
    /// table of four levels, all linked and in memory, and the entries in one leaf table. What is
    /// found needs no check of its width.
    ///
    /// This is the way of nearly every call, and short because it says no more than that it ends:
    /// whoever gets `None` looks closely, with [`walk_linked`](Self::walk_linked).
    #[inline(always)]
    pub(crate) fn leaf_entry<'m, M: PhysMemory + ?Sized>(
        &self,
        mem: &'m M,
        iova: Iova,
        pages: u64,
    ) -> Option<LeafEntry<'m>> {
        let format = self.format;
        // As constants, depth, width and shifts cost nothing.
        let mut level = Level::FOUR;
        if format.root_level() != level || iova.get() >> format.width() != 0 {
            return None;
        }
        let mut table = self.root;
        let mut parent = None;
        let mut written_back = u64::MAX;
        while let Some(below) = level.below() {
            let word = mem.word(self.entry_address(level, table, iova)).ok()?;
            let raw = word.load(Ordering::Acquire);
            table = format.descend(raw)?;
            written_back &= raw;
            parent = Some(word);
            level = below;
        }
        let room = format
            .entries(level)
            .wrapping_sub(format.index(level, iova)) as u64;
        let in_memory = self.coherency == Coherency::Coherent
            || written_back & F::WRITTEN_BACK == F::WRITTEN_BACK;
        (pages <= room && in_memory).then(|| LeafEntry {
            at: self.entry_address(level, table, iova),
            parent,
        })
    }

    /// Descends towards `iova` as far as tables are linked.
    pub(crate) fn walk_linked<'m, M: PhysMemory + ?Sized>(
        &self,
        mem: &'m M,
        iova: Iova,
    ) -> Result<WalkResult<'m>, Corrupt> {
        let format = self.format;
        let mut spot = WalkResult {
            level: format.root_level(),
            table: self.root,
            parent: None,
        };
        let mut written_back = F::WRITTEN_BACK;
        while let Some(below) = spot.level.below() {
            let word = mem
                .word(self.entry_address(spot.level, spot.table, iova))
                .map_err(|_| Corrupt)?;
            let raw = word.load(Ordering::Acquire);
            let Some(table) = format.descend(raw) else {
                break;
            };
            written_back &= raw;
            spot = WalkResult {
                level: below,
                table,
                parent: Some(word),
            };
        }
        if self.coherency == Coherency::NonCoherent && written_back != F::WRITTEN_BACK {
            self.publish_path(mem, iova);
        }
        Ok(spot)
    }

    /// Makes sure that the table entries on the path to `iova` are in memory.
    ///
    /// Whoever linked one may not have come to that yet; relying on it would let this processor
    /// tell a device an address whose path is still in another processor's cache.
    #[cold]
    #[inline(never)]
    fn publish_path<M: PhysMemory + ?Sized>(&self, mem: &M, iova: Iova) {
        let mut level = self.format.root_level();
        let mut table = self.root;
        while let Some(below) = level.below() {
            let at = self.entry_address(level, table, iova);
            let Ok(word) = mem.word(at) else { return };
            let raw = word.load(Ordering::Acquire);
            let Some(next) = self.format.descend(raw) else {
                return;
            };
            if raw & F::WRITTEN_BACK == 0 {
                self.publish(mem, word, at);
            }
            (level, table) = (below, next);
        }
    }

    /// Sees to it that a table entry is in memory, and notes that in the entry.
    #[cold]
    pub(crate) fn publish<M: PhysMemory + ?Sized>(&self, mem: &M, entry: &AtomicU64, at: PhysAddr) {
        self.coherency.write_back(mem, at, 8);
        self.coherency.drain(mem);
        entry.fetch_or(F::WRITTEN_BACK, Ordering::Release);
    }

    /// Address of the entry for `iova` in the table of `level` at `table`.
    #[inline(always)]
    pub(crate) fn entry_address(&self, level: Level, table: PhysAddr, iova: Iova) -> PhysAddr {
        let index = self.format.index(level, iova) as u64;
        table.wrapping_add(index.wrapping_mul(8))
    }
}
