//! Flat tables of a DART or a GART, whose 32-bit entries share words in pairs.
//!
//! A store changes one half of a word by compare-and-swap, so CPUs that change neighbouring entries
//! never overwrite each other's.

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_types::{
    CachedLevels, DomainId, Iova, PageSize, Permissions, Pfn, PfnRange, PhysAddr, PhysMemory,
    Unmapped,
};

use crate::fmt::{Dart, Gart};
use crate::{
    Coherency, Format, HalfWord, Leaf, Level, MapError, MapRequest, TableError, UnmapError,
};
use crate::{Cursor, WalkError, walk};

/// The content of entries that map nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmptyEntry {
    /// An invalid entry: the unit reports an access as an error.
    Invalid,
    /// A valid entry for this page, as in Linux (`dart_emptyval`, `gart_unmapped_entry`). A stray
    /// DMA of any device reaches the spare page, and the unit does not report it.
    Spare(PhysAddr),
}

/// The flat table of a DART.
pub type DartTable = HalfWordTable<Dart>;

/// The flat table of a GART's aperture. Its addresses begin at the base of the aperture.
pub type GartTable = HalfWordTable<Gart>;

/// A flat table of 32-bit entries.
#[derive(Debug)]
pub struct HalfWordTable<F> {
    format: F,
    root: PhysAddr,
    domain: DomainId,
    coherency: Coherency,
    empty: u32,
}

/// Returns the address of the word that holds an entry, and the shift of the entry in it.
fn half(root: PhysAddr, page: u64) -> (PhysAddr, u32) {
    let word = root.wrapping_add(page / 2 * 8);
    (word, (page % 2) as u32 * 32)
}

/// Returns the valid entry for the page at `base`.
fn entry_of<F: HalfWord>(base: PhysAddr) -> u32 {
    F::encode(base, Permissions::READ_WRITE) as u32
}

impl<F: HalfWord> HalfWordTable<F> {
    /// Creates an empty table at `root`. The caller provides [`bytes`](Self::bytes) bytes, 4 KiB
    /// aligned; the table overwrites them.
    ///
    /// # Errors
    /// The memory is misaligned or absent.
    pub fn at<M: PhysMemory + ?Sized>(
        format: F,
        domain: DomainId,
        coherency: Coherency,
        empty: EmptyEntry,
        mem: &M,
        root: PhysAddr,
    ) -> Result<Self, TableError> {
        if !root.is_aligned(PageSize::Size4K.bytes()) {
            return Err(TableError::Memory);
        }
        let empty = match empty {
            EmptyEntry::Invalid => 0,
            EmptyEntry::Spare(page) if page.get() >> F::PHYSICAL_BITS == 0 => entry_of::<F>(page),
            EmptyEntry::Spare(_) => return Err(TableError::Memory),
        };
        let count = format.entries(Level::LEAF) / 2;
        let words = mem.words(root, count).map_err(|_| TableError::Memory)?;
        let both = u64::from(empty) << 32 | u64::from(empty);
        for word in words {
            word.store(both, Ordering::Relaxed);
        }
        let table = Self {
            format,
            root,
            domain,
            coherency,
            empty,
        };
        coherency.write_back(mem, root, Self::bytes(format));
        coherency.drain(mem);
        Ok(table)
    }

    /// Returns the size of a table in bytes.
    pub fn bytes(format: F) -> u64 {
        format.entries(Level::LEAF) as u64 * F::BYTES
    }

    /// Returns the physical address of the table.
    pub const fn root(&self) -> PhysAddr {
        self.root
    }

    /// Returns the format.
    pub const fn format(&self) -> F {
        self.format
    }

    /// Returns the domain.
    pub const fn domain(&self) -> DomainId {
        self.domain
    }

    /// Translates an address as the hardware does, without caches.
    ///
    /// # Errors
    /// The entry is not valid.
    pub fn walk<M: PhysMemory + ?Sized>(&self, mem: &M, iova: Iova) -> Result<Leaf, WalkError> {
        walk(
            &self.format,
            mem,
            Cursor::root(&self.format, self.root),
            iova,
            |_| {},
        )
    }

    /// Returns the word of an entry and the position of the entry in it.
    fn entry<'m, M: PhysMemory + ?Sized>(
        &self,
        mem: &'m M,
        page: u64,
    ) -> Option<(&'m AtomicU64, PhysAddr, u32)> {
        let (at, shift) = half(self.root, page);
        Some((mem.word(at).ok()?, at, shift))
    }

    /// Replaces an entry if it is `old`, or if `old` is `None` and it maps something. Returns false
    /// otherwise.
    fn replace(&self, word: &AtomicU64, shift: u32, old: Option<u32>, new: u32) -> bool {
        let mask = 0xffff_ffff_u64 << shift;
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            let entry = (seen >> shift) as u32;
            let fits = match old {
                Some(old) => entry == old,
                None => entry != self.empty && !F::is_empty(entry.into()),
            };
            if !fits {
                return false;
            }
            let wanted = seen & !mask | u64::from(new) << shift;
            match word.compare_exchange(seen, wanted, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(other) => seen = other,
            }
        }
    }

    fn has_entries(&self, first: u64, pages: u64) -> bool {
        let entries = self.format.entries(Level::LEAF) as u64;
        first.checked_add(pages).is_some_and(|end| end <= entries)
    }

    /// Maps a run of pages. Entries have no access control, so `permissions` must allow reads and
    /// writes.
    ///
    /// # Errors
    /// The table is unchanged. [`MapError::Restricted`] for other permissions.
    pub fn map<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        request: MapRequest,
    ) -> Result<(), MapError> {
        let MapRequest {
            iova,
            pa,
            pages,
            permissions,
        } = request;
        if pages == 0 {
            return Err(MapError::Empty);
        }
        if (iova.get() | pa.get()) & (PageSize::Size4K.bytes() - 1) != 0 {
            return Err(MapError::Misaligned);
        }
        if permissions != Permissions::READ_WRITE {
            return Err(MapError::Restricted);
        }
        let first = iova.get() >> 12;
        if !self.has_entries(first, pages) {
            return Err(MapError::BeyondWidth { iova });
        }
        let last = (pa.get() >> 12).checked_add(pages - 1);
        if last.is_none_or(|last| last >> (F::PHYSICAL_BITS - 12) != 0) {
            return Err(MapError::PhysicalBeyondWidth { at: pa });
        }
        for page in 0..pages {
            let at = iova.wrapping_add(page << 12);
            let base = pa.wrapping_add(page << 12);
            let stored = self.entry(mem, first + page).map(|(word, _, shift)| {
                self.replace(word, shift, Some(self.empty), entry_of::<F>(base))
            });
            if stored != Some(true) {
                for stored in 0..page {
                    self.clear(mem, first + stored);
                }
                self.write_back(mem, first, page);
                return Err(match stored {
                    Some(_) => MapError::AlreadyMapped { iova: at },
                    None => MapError::Corrupt { iova: at },
                });
            }
        }
        self.write_back(mem, first, pages);
        Ok(())
    }

    /// Clears an entry that maps something; false if it maps nothing.
    fn clear<M: PhysMemory + ?Sized>(&self, mem: &M, page: u64) -> bool {
        let entry = self.entry(mem, page);
        entry.is_some_and(|(word, _, shift)| self.replace(word, shift, None, self.empty))
    }

    fn maps<M: PhysMemory + ?Sized>(&self, mem: &M, page: u64) -> bool {
        self.entry(mem, page).is_some_and(|(word, _, shift)| {
            let entry = (word.load(Ordering::Relaxed) >> shift) as u32;
            entry != self.empty && !F::is_empty(entry.into())
        })
    }

    fn write_back<M: PhysMemory + ?Sized>(&self, mem: &M, first: u64, pages: u64) {
        let at = self.root.wrapping_add(first * F::BYTES);
        self.coherency.write_back(mem, at, pages * F::BYTES);
        self.coherency.drain(mem);
    }

    /// Clears the entries of `range`. Cached translations stay until an invalidation.
    ///
    /// # Errors
    /// A page of the range is not mapped. The table is unchanged.
    pub fn unmap<M: PhysMemory + ?Sized>(
        &self,
        mem: &M,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels), UnmapError> {
        let (first, pages) = (range.lo().get(), range.pages());
        if !self.has_entries(first, pages) {
            let iova = range.lo().iova();
            return Err(UnmapError::BeyondWidth { iova });
        }
        let absent = (first..first + pages).find(|page| !self.maps(mem, *page));
        if let Some(page) = absent {
            let iova = Pfn::new(page).iova();
            return Err(UnmapError::NotMapped { iova });
        }
        for page in first..first + pages {
            self.clear(mem, page);
        }
        self.write_back(mem, first, pages);
        Ok((
            Unmapped::attest_cleared(self.domain, range),
            CachedLevels::Leaves,
        ))
    }
}
