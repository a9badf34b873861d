//! The leaves of a store, in order of address and with stable numbers.

use alloc::vec::Vec;

use super::{Entry, InsertError};

/// Maximum number of mappings per leaf.
pub(super) const LEAF: usize = 32;

/// A leaf has a position in the order of addresses, which shifts when earlier leaves are added or
/// removed, and a number, which is stable.
#[derive(Debug, Default)]
pub(super) struct Leaves {
    /// The first address of each leaf, by position.
    firsts: Vec<u64>,
    /// The number of each leaf, by position.
    numbers: Vec<u32>,
    /// Mappings of each leaf, by number; empty for unused numbers. Every leaf has at least one
    /// mapping and capacity for `LEAF`.
    runs: Vec<Vec<Entry>>,
    /// Numbers that no leaf uses.
    free: Vec<u32>,
    /// An empty leaf, kept so that repeated insertion and removal of one mapping does not allocate.
    spare: Vec<Entry>,
}

impl Leaves {
    pub(super) const fn len(&self) -> usize {
        self.firsts.len()
    }

    /// Returns the first address of the leaf at `position`.
    #[inline]
    pub(super) fn first(&self, position: usize) -> Option<u64> {
        self.firsts.get(position).copied()
    }

    /// Returns the position of the leaf for a mapping that starts at `address`.
    #[inline]
    pub(super) fn position_of(&self, address: u64) -> usize {
        self.firsts
            .partition_point(|first| *first <= address)
            .saturating_sub(1)
    }

    /// Returns the number of the leaf at `position`.
    #[inline]
    pub(super) fn number(&self, position: usize) -> Option<usize> {
        self.numbers.get(position).map(|number| *number as usize)
    }

    /// Returns the mappings of the leaf at `position`.
    #[inline]
    pub(super) fn run(&self, position: usize) -> Option<&[Entry]> {
        self.numbered(self.number(position)?)
    }

    /// Returns the mappings of leaf `number`.
    #[inline]
    pub(super) fn numbered(&self, number: usize) -> Option<&[Entry]> {
        self.runs.get(number).map(Vec::as_slice)
    }

    /// Returns the mapping in slot `at` of leaf `number`. The caller must not change its start.
    #[inline]
    pub(super) fn entry_mut(&mut self, number: usize, at: usize) -> Option<&mut Entry> {
        self.runs.get_mut(number)?.get_mut(at)
    }

    /// Returns the mappings of the leaves from `position` on.
    #[inline]
    pub(super) fn runs_from(&self, position: usize) -> impl Iterator<Item = &[Entry]> {
        let numbers = self.numbers.get(position..).unwrap_or_default();
        numbers
            .iter()
            .filter_map(|number| self.numbered(*number as usize))
    }

    /// Returns every mapping's start, the number of its leaf, and its slot.
    pub(super) fn slots(&self) -> impl Iterator<Item = (u64, usize, usize)> {
        self.runs.iter().enumerate().flat_map(|(number, run)| {
            let slots = run.iter().enumerate();
            slots.map(move |(at, entry)| (entry.start, number, at))
        })
    }

    /// Inserts `entry` at slot `at` of the leaf at `position`, which must not be full.
    #[inline]
    pub(super) fn put(&mut self, position: usize, at: usize, entry: Entry) {
        let number = self.number(position);
        if let Some(run) = number.and_then(|number| self.runs.get_mut(number)) {
            run.insert(at.min(run.len()), entry);
            if at == 0
                && let Some(first) = self.firsts.get_mut(position)
            {
                *first = entry.start;
            }
        }
    }

    /// Removes up to `count` mappings from slot `at` on. The leaf must keep at least one. Returns
    /// the number removed.
    pub(super) fn drain(&mut self, position: usize, at: usize, count: usize) -> usize {
        let number = self.number(position);
        let Some(run) = number.and_then(|number| self.runs.get_mut(number)) else {
            return 0;
        };
        let count = count.min(run.len().saturating_sub(at));
        if count == 1 {
            run.remove(at);
        } else {
            run.drain(at..at + count);
        }
        if at == 0
            && let (Some(entry), Some(first)) = (run.first(), self.firsts.get_mut(position))
        {
            *first = entry.start;
        }
        count
    }

    /// Creates a leaf with only `entry` at `position`.
    #[cold]
    pub(super) fn add(&mut self, position: usize, entry: Entry) -> Result<(), InsertError> {
        let mut run = self.new_run()?;
        run.push(entry);
        self.link(position.min(self.len()), entry.start, run);
        Ok(())
    }

    /// Moves the upper half of the leaf at `position` to a new leaf after it.
    #[cold]
    pub(super) fn split(&mut self, position: usize) -> Result<(), InsertError> {
        let mut above = self.new_run()?;
        let number = self.number(position);
        if let Some(run) = number.and_then(|number| self.runs.get_mut(number)) {
            above.extend(run.drain((LEAF / 2).min(run.len())..));
        }
        if let Some(first) = above.first().map(|entry| entry.start) {
            self.link(position + 1, first, above);
        }
        Ok(())
    }

    /// Appends the mappings of the leaf after `position` to the leaf at `position`.
    pub(super) fn merge(&mut self, position: usize) {
        let numbers = (self.number(position), self.number(position + 1));
        let (Some(low), Some(high)) = numbers else {
            return;
        };
        let Some(run) = self.runs.get_mut(high) else {
            return;
        };
        let mut moved = core::mem::take(run);
        if let Some(run) = self.runs.get_mut(low) {
            run.append(&mut moved);
        }
        if let Some(run) = self.runs.get_mut(high) {
            *run = moved;
        }
        self.unlink(position + 1, 1);
    }

    /// Removes `count` leaves from `position` on.
    pub(super) fn unlink(&mut self, position: usize, count: usize) {
        if count == 0 {
            return;
        }
        let end = position.saturating_add(count).min(self.len());
        self.firsts.drain(position.min(end)..end);
        for number in self.numbers.drain(position.min(end)..end) {
            if let Some(run) = self.runs.get_mut(number as usize) {
                self.spare = core::mem::take(run);
                self.spare.clear();
            }
            // The vector has capacity for every number.
            self.free.push(number);
        }
    }

    /// Assigns a number and a position to `run`. [`new_run`](Self::new_run) has reserved the
    /// memory.
    fn link(&mut self, position: usize, first: u64, run: Vec<Entry>) {
        let number = match self.free.pop() {
            Some(number) => {
                if let Some(slot) = self.runs.get_mut(number as usize) {
                    *slot = run;
                }
                number
            }
            None => {
                let number = u32::try_from(self.runs.len()).unwrap_or(u32::MAX);
                self.runs.push(run);
                number
            }
        };
        self.numbers.insert(position, number);
        self.firsts.insert(position, first);
    }

    /// Allocates an empty leaf and reserves room for it in the vectors.
    fn new_run(&mut self) -> Result<Vec<Entry>, InsertError> {
        let out = |_| InsertError::OutOfMemory;
        if self.runs.len() >= u32::MAX as usize {
            return Err(InsertError::OutOfMemory);
        }
        self.firsts.try_reserve(1).map_err(out)?;
        self.numbers.try_reserve(1).map_err(out)?;
        self.runs.try_reserve(1).map_err(out)?;
        let numbers = self.runs.len() + 1;
        let more = numbers.saturating_sub(self.free.len());
        self.free.try_reserve(more).map_err(out)?;
        let mut run = core::mem::take(&mut self.spare);
        run.try_reserve_exact(LEAF).map_err(out)?;
        Ok(run)
    }
}
