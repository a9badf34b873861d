//! Cached pages, in the order of their insertion.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

use ringfence_types::{Permissions, PhysAddr};

/// Translation of a cached page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CachedPage {
    pub(super) memory: PhysAddr,
    pub(super) permissions: Permissions,
}

/// Cached pages by page number.
#[derive(Debug)]
pub(super) struct ResidentPages {
    /// Pages with the number of their insertion.
    pages: BTreeMap<u64, (CachedPage, u64)>,
    /// Pages, oldest first, with the number of their insertion. A page that
    /// [`take_oldest_except`](Self::take_oldest_except) keeps moves to the back. Removed or
    /// replaced pages stay in the list under their old number.
    arrivals: VecDeque<(u64, u64)>,
    number: u64,
    /// Maximum length of `arrivals`.
    max_arrivals: usize,
}

impl ResidentPages {
    /// Creates an empty set whose insertion list is limited to twice `pages` entries. The caller
    /// bounds the number of pages.
    pub(super) fn new(pages: usize) -> Self {
        Self {
            pages: BTreeMap::new(),
            arrivals: VecDeque::new(),
            number: 0,
            max_arrivals: pages.saturating_mul(2),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.pages.len()
    }

    pub(super) fn get(&self, page: u64) -> Option<CachedPage> {
        self.pages.get(&page).map(|(cached, _)| *cached)
    }

    pub(super) fn contains(&self, page: u64) -> bool {
        self.pages.contains_key(&page)
    }

    /// Returns the cached pages in `range`, in order.
    pub(super) fn range(
        &self,
        range: RangeInclusive<u64>,
    ) -> impl Iterator<Item = (u64, CachedPage)> {
        self.pages
            .range(range)
            .map(|(page, (cached, _))| (*page, *cached))
    }

    /// Inserts or replaces a page. It becomes the newest.
    pub(super) fn insert(&mut self, page: u64, cached: CachedPage) {
        self.number = self.number.wrapping_add(1);
        self.pages.insert(page, (cached, self.number));
        self.arrivals.push_back((page, self.number));
        if self.arrivals.len() > self.max_arrivals {
            let pages = &self.pages;
            self.arrivals
                .retain(|(page, number)| is_current(pages, *page, *number));
        }
    }

    pub(super) fn remove(&mut self, page: u64) {
        self.pages.remove(&page);
    }

    pub(super) fn remove_range(&mut self, range: RangeInclusive<u64>) {
        while let Some((&page, _)) = self.pages.range(range.clone()).next() {
            self.pages.remove(&page);
        }
    }

    /// Returns true if no page is cached.
    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Removes and returns all pages for which `keep` returns false.
    pub(super) fn take_all_except(&mut self, keep: impl Fn(u64) -> bool) -> Vec<u64> {
        let taken: Vec<u64> = self
            .pages
            .keys()
            .copied()
            .filter(|page| !keep(*page))
            .collect();
        for page in &taken {
            self.pages.remove(page);
        }
        taken
    }

    /// Removes all pages.
    pub(super) fn clear(&mut self) {
        self.arrivals.clear();
        self.pages.clear();
    }

    /// Removes and returns the oldest page for which `keep` returns false.
    pub(super) fn take_oldest_except(&mut self, keep: impl Fn(u64) -> bool) -> Option<u64> {
        for _ in 0..self.arrivals.len() {
            let (page, number) = self.arrivals.pop_front()?;
            if !is_current(&self.pages, page, number) {
                continue;
            }
            if !keep(page) {
                self.pages.remove(&page);
                return Some(page);
            }
            self.arrivals.push_back((page, number));
        }
        None
    }
}

/// Returns true if `page` is cached since insertion `number`.
fn is_current(pages: &BTreeMap<u64, (CachedPage, u64)>, page: u64, number: u64) -> bool {
    pages
        .get(&page)
        .is_some_and(|(_, current)| *current == number)
}
