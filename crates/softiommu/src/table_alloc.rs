//! The writer's side of a radix table: which tables exist, how full they are, which can be had
//! back.
//!
//! One writer at a time, by `&mut`. A table that has become empty stays where it is, because the
//! next mapping is likely to need it again. Only when tables run out are the empty ones unlinked,
//! and used again after a wait for the readers that may stand in them.

use crate::sync::{INDEX_BITS, Ordering};
use crate::table::{ENTRIES, GRANULE_SHIFT, Leaf, Table, index};
use crate::walk_cache::WalkCache;

/// What the writer knows of a table.
#[derive(Debug, Clone, Copy)]
struct TableInfo {
    /// Entries that are present.
    live: u32,
    /// The word that links this table; 0, a word of the root that links no such table, while it is
    /// not linked.
    link: usize,
    /// Whether it stands in the list of tables that were seen empty.
    listed: bool,
}

/// The tables of a domain as its writer sees them, by number. Table 0 is the root.
pub(crate) struct TableAlloc {
    info: Vec<TableInfo>,
    /// Empty, unlinked, out of reach of every reader.
    free: Vec<usize>,
    /// Tables that were empty at some time since they left this list.
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

    /// Tables in use, the root included.
    pub(crate) fn in_use(&self) -> usize {
        self.info.len().saturating_sub(self.free.len())
    }

    /// The table of the last level for `iova` if it is at hand: index of its first word.
    #[inline]
    pub(crate) fn cached_table(&self, iova: u64) -> Option<usize> {
        self.walk_cache.find(iova)
    }

    /// Tables that can be linked without a wait.
    pub(crate) fn available(&self, table: &Table) -> usize {
        table.capacity().saturating_sub(self.in_use())
    }

    /// The table of the last level for `iova`: index of its first word. Links what is missing.
    /// `None` if tables run out, which the caller has ruled out.
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
                    // Relaxed: the table was never used, or readers were waited for after it was
                    // emptied (see `walk`).
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
        let known = TableInfo {
            live: 0,
            link,
            listed: false,
        };
        if let Some(number) = self.free.pop() {
            *self.info.get_mut(number)? = known;
            return Some(number);
        }
        let number = self.info.len();
        if number >= table.capacity() {
            return None;
        }
        self.info.push(known);
        Some(number)
    }

    /// `entries` entries of the table at `at` have become present.
    #[inline]
    pub(crate) fn filled(&mut self, at: usize, entries: u32) {
        if let Some(known) = self.info.get_mut(at / ENTRIES) {
            known.live = known.live.saturating_add(entries);
        }
    }

    /// `entries` entries of the table at `at` have become absent.
    #[inline]
    pub(crate) fn cleared(&mut self, at: usize, entries: u32) {
        let number = at / ENTRIES;
        if let Some(known) = self.info.get_mut(number) {
            known.live = known.live.saturating_sub(entries);
            if known.live == 0 && !known.listed {
                known.listed = true;
                self.emptied.push(number);
            }
        }
    }

    /// Unlinks every empty table, and those that this empties in turn. They are free once readers
    /// have been waited for: [`recycle`](Self::recycle).
    pub(crate) fn unlink_empty(&mut self, table: &Table) -> Unlinked {
        self.walk_cache.clear();
        let mut unlinked = Vec::new();
        while let Some(number) = self.emptied.pop() {
            let Some(known) = self.info.get_mut(number) else {
                continue;
            };
            known.listed = false;
            if known.live != 0 {
                continue;
            }
            let link = known.link;
            if let Some(word) = table.word(link) {
                // Relaxed: the wait for readers orders it.
                word.store(Leaf::ABSENT, Ordering::Relaxed);
            }
            unlinked.push(number);
            // The table that held the link may be empty now, and then it is listed.
            self.cleared(link - link % ENTRIES, 1);
        }
        Unlinked(unlinked)
    }

    /// No reader stands in these tables any more.
    pub(crate) fn recycle(&mut self, unlinked: Unlinked) {
        self.free.extend(unlinked.0);
    }
}

/// Tables that no entry leads to, and readers may stand in.
#[must_use = "tables that are not recycled are lost"]
pub(crate) struct Unlinked(Vec<usize>);

impl Unlinked {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
