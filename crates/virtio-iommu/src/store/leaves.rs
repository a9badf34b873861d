//! The leaves of a store: in order of address, and under numbers that stay.

use alloc::vec::Vec;

use super::{Entry, InsertError};

/// Mappings in a leaf at most.
pub(super) const LEAF: usize = 32;

/// Leaves have a position in the order of their addresses, which moves when leaves come and go
/// before them, and a number, which does not.
#[derive(Debug, Default)]
pub(super) struct Leaves {
    /// The first address of each leaf, by position.
    firsts: Vec<u64>,
    /// The number of each leaf, by position.
    numbers: Vec<u32>,
    /// The mappings of each leaf, by number; none where no leaf has it. Every leaf has some, and
    /// room for `LEAF`.
    runs: Vec<Vec<Entry>>,
    /// Numbers that no leaf has.
    free: Vec<u32>,
    /// An empty leaf kept for the next one, so that a mapping that comes and goes allocates
    /// nothing.
    spare: Vec<Entry>,
}

impl Leaves {
    pub(super) const fn len(&self) -> usize {
        self.firsts.len()
    }

    /// The first address of the leaf at `position`.
    #[inline]
    pub(super) fn first(&self, position: usize) -> Option<u64> {
        self.firsts.get(position).copied()
    }

    /// The position of the leaf that a mapping starting at `address` belongs to.
    #[inline]
    pub(super) fn position_of(&self, address: u64) -> usize {
        self.firsts
            .partition_point(|first| *first <= address)
            .saturating_sub(1)
    }

    /// The number of the leaf at `position`.
    #[inline]
    pub(super) fn number(&self, position: usize) -> Option<usize> {
        self.numbers.get(position).map(|number| *number as usize)
    }

    /// The mappings of the leaf at `position`.
    #[inline]
    pub(super) fn run(&self, position: usize) -> Option<&[Entry]> {
        self.numbered(self.number(position)?)
    }

    /// The mappings of leaf `number`.
    #[inline]
    pub(super) fn numbered(&self, number: usize) -> Option<&[Entry]> {
        self.runs.get(number).map(Vec::as_slice)
    }

    /// The mapping in slot `at` of leaf `number`, which keeps its start.
    #[inline]
    pub(super) fn entry_mut(&mut self, number: usize, at: usize) -> Option<&mut Entry> {
        self.runs.get_mut(number)?.get_mut(at)
    }

    /// The mappings of the leaves from `position` on.
    #[inline]
    pub(super) fn runs_from(&self, position: usize) -> impl Iterator<Item = &[Entry]> {
        let numbers = self.numbers.get(position..).unwrap_or_default();
        numbers
            .iter()
            .filter_map(|number| self.numbered(*number as usize))
    }

    /// Every mapping, with the number of its leaf and its slot.
    pub(super) fn places(&self) -> impl Iterator<Item = (u64, usize, usize)> {
        self.runs.iter().enumerate().flat_map(|(number, run)| {
            let slots = run.iter().enumerate();
            slots.map(move |(at, entry)| (entry.start, number, at))
        })
    }

    /// Puts `entry` into slot `at` of the leaf at `position`, which is not full.
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

    /// Removes up to `count` mappings from slot `at` on of a leaf that keeps some: how many it
    /// were.
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

    /// Makes a leaf of `entry` alone at `position`.
    #[cold]
    pub(super) fn add(&mut self, position: usize, entry: Entry) -> Result<(), InsertError> {
        let mut run = self.new_run()?;
        run.push(entry);
        self.link(position.min(self.len()), entry.start, run);
        Ok(())
    }

    /// Moves the upper half of the leaf at `position` into one behind it.
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

    /// Appends the mappings of the leaf behind `position` to those of the one there.
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

    /// Drops `count` leaves from `position` on.
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
            // There is room for every number.
            self.free.push(number);
        }
    }

    /// Gives `run` a number and a position. There is room: see [`new_run`](Self::new_run).
    fn link(&mut self, position: usize, first: u64, run: Vec<Entry>) {
        let number = match self.free.pop() {
            Some(number) => {
                if let Some(place) = self.runs.get_mut(number as usize) {
                    *place = run;
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

    /// An empty leaf, with room for it in the vectors.
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
