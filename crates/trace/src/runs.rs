//! Sets of pages, stored as runs of adjacent pages.

use std::collections::BTreeMap;

/// A set of page numbers; adjacent pages form one run.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    /// First page of each run, mapped to the page after its last.
    runs: BTreeMap<u64, u64>,
}

impl Runs {
    /// Adds the pages `first..end` and merges them with adjacent or overlapping runs.
    pub(crate) fn add(&mut self, mut first: u64, mut end: u64) {
        if let Some((&before, &reach)) = self.runs.range(..=first).next_back() {
            if reach >= end {
                return;
            }
            if reach >= first {
                first = before;
            }
        }
        while let Some((&run, &reach)) = self.runs.range(first..=end).next() {
            end = end.max(reach);
            self.runs.remove(&run);
        }
        self.runs.insert(first, end);
    }

    /// Returns the runs in ascending order: the first page and the page after the last.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.runs.iter().map(|(&first, &end)| (first, end))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    pub(crate) fn contains(&self, page: u64) -> bool {
        let run = self.runs.range(..=page).next_back();
        run.is_some_and(|(_, &end)| page < end)
    }

    /// Returns the number of pages.
    pub(crate) fn pages(&self) -> u64 {
        let lengths = self.iter().map(|(first, end)| end - first);
        lengths.fold(0, u64::saturating_add)
    }
}
