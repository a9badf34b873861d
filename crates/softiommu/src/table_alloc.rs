//! Table allocation, writer side: allocated tables, their fill counts, and reclaim of empty ones.
//!
//! There is one writer at a time, enforced by `&mut`. An empty table stays linked, because the next
//! mapping is likely to need it. Only when tables run out does the writer unlink the empty ones. It
//! reuses them after a wait for readers that may still walk them.

use crate::sync::{INDEX_BITS, Ordering};
use crate::table::{ENTRIES, GRANULE_SHIFT, Leaf, Table, index};
use crate::walk_cache::WalkCache;

/// The writer's state of a table.
#[derive(Debug, Clone, Copy)]
struct TableInfo {
    /// Number of present entries.
    live: u32,
    /// Index of the word that links this table. 0 while unlinked; word 0 belongs to the root and
    /// does not link such a table.
    link: usize,
    /// True if the table is in the list of tables that were seen empty.
    listed: bool,
}

/// The writer's view of the tables of a domain, by number. Table 0 is the root.
pub(crate) struct TableAlloc {
    info: Vec<TableInfo>,
    /// Empty, unlinked tables that no reader can reach.
    free: Vec<usize>,
    /// Tables that have been empty at some time since they were last taken off this list.
    emptied: Vec<usize>,
    walk_cache: WalkCache,
}

impl TableAlloc {
    pub(crate) fn new() -> Self {
        Self {
            info: vec![TableInfo {
                live: 0,
                link: 0,
                listed: true,
            }],
            free: Vec::new(),
            emptied: Vec::new(),
            walk_cache: WalkCache::new(),
        }
    }

    /// Returns the number of tables in use, including the root.
    pub(crate) fn in_use(&self) -> usize {
        self.info.len().saturating_sub(self.free.len())
    }

    /// Returns the index of the first word of the leaf table for `iova`, if cached.
    #[inline]
    pub(crate) fn cached_table(&self, iova: u64) -> Option<usize> {
        self.walk_cache.find(iova)
    }

    /// Returns the number of tables that can be linked without a wait for readers.
    pub(crate) fn available(&self, table: &Table) -> usize {
        table.capacity().saturating_sub(self.in_use())
    }

    /// Returns the index of the first word of the leaf table for `iova`, and links missing tables.
    /// `None` if tables run out, which the caller must have ruled out.
    #[inline]
    pub(crate) fn find_or_link(&mut self, table: &Table, iova: u64) -> Option<usize> {
        let mut at = 0;
        let mut shift = table.top();
        while shift > GRANULE_SHIFT {
            let link = at | index(iova, shift);
            let word = table.word(link)?;
            at = match word.load(Ordering::Relaxed) {
                Leaf::ABSENT => {
                    let number = self.alloc(table, link)?;
                    let next = number.checked_mul(ENTRIES)?;
                    // Relaxed: the table was never used, or the writer waited for readers after it
                    // became empty (see `walk`).
                    word.store(next as u64, Ordering::Relaxed);
                    self.filled(at, 1);
                    next
                }
                next => next as usize,
            };
            shift -= INDEX_BITS;
        }
        self.walk_cache.keep(iova, at);
        Some(at)
    }

    #[cold]
    fn alloc(&mut self, table: &Table, link: usize) -> Option<usize> {
        let entry = TableInfo {
            live: 0,
            link,
            listed: false,
        };
        if let Some(number) = self.free.pop() {
            *self.info.get_mut(number)? = entry;
            return Some(number);
        }
        let number = self.info.len();
        if number >= table.capacity() {
            return None;
        }
        self.info.push(entry);
        Some(number)
    }

    /// Records that `entries` entries of the table at `at` became present.
    #[inline]
    pub(crate) fn filled(&mut self, at: usize, entries: u32) {
        if let Some(entry) = self.info.get_mut(at / ENTRIES) {
            entry.live = entry.live.saturating_add(entries);
        }
    }

    /// Records that `entries` entries of the table at `at` became absent.
    #[inline]
    pub(crate) fn cleared(&mut self, at: usize, entries: u32) {
        let number = at / ENTRIES;
        if let Some(entry) = self.info.get_mut(number) {
            entry.live = entry.live.saturating_sub(entries);
            if entry.live == 0 && !entry.listed {
                entry.listed = true;
                self.emptied.push(number);
            }
        }
    }

    /// Unlinks every empty table, and every table that becomes empty by that. After a wait for
    /// readers, the caller frees them with [`recycle`](Self::recycle).
    pub(crate) fn unlink_empty(&mut self, table: &Table) -> Unlinked {
        self.walk_cache.clear();
        let mut unlinked = Vec::new();
        while let Some(number) = self.emptied.pop() {
            let Some(entry) = self.info.get_mut(number) else {
                continue;
            };
            entry.listed = false;
            if entry.live != 0 {
                continue;
            }
            let link = entry.link;
            if let Some(word) = table.word(link) {
                // Relaxed: the wait for readers orders it.
                word.store(Leaf::ABSENT, Ordering::Relaxed);
            }
            unlinked.push(number);
            // The table that held the link may now be empty; `cleared` then lists it.
            self.cleared(link - link % ENTRIES, 1);
        }
        Unlinked(unlinked)
    }

    /// Frees tables that no reader can reach any more.
    pub(crate) fn recycle(&mut self, unlinked: Unlinked) {
        self.free.extend(unlinked.0);
    }
}

/// Unlinked tables that readers may still walk.
#[must_use = "tables that are not recycled are lost"]
pub(crate) struct Unlinked(Vec<usize>);

impl Unlinked {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
