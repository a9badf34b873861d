//! Ordered return of completed work. An item is returned when all its buffers are back; until then
//! the mapping layer may withhold some of them.

use std::collections::VecDeque;

use ringfence_types::PhysAddr;

use crate::Buffer;

/// An item of work and its returned buffers. `C` stores them: `[Option<Buffer>; N]` or
/// `Vec<Option<Buffer>>`.
#[derive(Debug)]
struct CompletedWork<T, C> {
    item: T,
    buffers: C,
    missing: usize,
}

/// Completed work in the order of completion.
#[derive(Debug)]
pub(crate) struct OrderedCompletions<T, C> {
    finished: VecDeque<CompletedWork<T, C>>,
    /// Number of the first item in `finished`.
    first: u64,
    /// Buffers that the layer withholds, in the order of their unmap: address, item, index in the
    /// item.
    withheld: VecDeque<(PhysAddr, u64, usize)>,
}

impl<T, C> Default for OrderedCompletions<T, C> {
    fn default() -> Self {
        Self {
            finished: VecDeque::new(),
            first: 0,
            withheld: VecDeque::new(),
        }
    }
}

impl<T, C: AsMut<[Option<Buffer>]>> OrderedCompletions<T, C> {
    /// Adds an item, whose buffers will fill the first `missing` slots of `buffers`. Returns its
    /// number.
    pub(crate) fn begin(&mut self, item: T, buffers: C, missing: usize) -> u64 {
        self.finished.push_back(CompletedWork {
            item,
            buffers,
            missing,
        });
        self.first.wrapping_add(self.finished.len() as u64 - 1)
    }

    /// Records that the layer withholds a buffer of item `number`.
    pub(crate) fn withhold(&mut self, at: PhysAddr, number: u64, buffer_index: usize) {
        self.withheld.push_back((at, number, buffer_index));
    }

    /// Records that a buffer of item `number` is lost, so that the item does not wait for it.
    pub(crate) fn lose(&mut self, number: u64) {
        let position = number.wrapping_sub(self.first) as usize;
        if let Some(finished) = self.finished.get_mut(position) {
            finished.missing = finished.missing.saturating_sub(1);
        }
    }

    /// Stores a returned buffer of item `number`.
    pub(crate) fn buffer_returned(&mut self, buffer: Buffer, number: u64, buffer_index: usize) {
        let position = number.wrapping_sub(self.first) as usize;
        if let Some(finished) = self.finished.get_mut(position)
            && let Some(empty) = finished.buffers.as_mut().get_mut(buffer_index)
        {
            *empty = Some(buffer);
            finished.missing = finished.missing.saturating_sub(1);
        }
    }

    /// Stores a withheld buffer that the layer has released.
    ///
    /// # Errors
    /// Returns the buffer if it belongs to no item.
    pub(crate) fn released(&mut self, buffer: Buffer) -> Result<(), Buffer> {
        // The layer releases buffers in the order of their unmap, so the first one matches, unless
        // the end of a burst failed before.
        let found = self
            .withheld
            .iter()
            .position(|(at, _, _)| *at == buffer.start());
        match found.and_then(|position| self.withheld.remove(position)) {
            Some((_, number, buffer_index)) => {
                self.buffer_returned(buffer, number, buffer_index);
                Ok(())
            }
            None => Err(buffer),
        }
    }

    /// Takes the first item, if it is complete.
    pub(crate) fn next(&mut self) -> Option<(T, C)> {
        if self.finished.front()?.missing > 0 {
            return None;
        }
        self.first = self.first.wrapping_add(1);
        let finished = self.finished.pop_front()?;
        Some((finished.item, finished.buffers))
    }

    /// Discards all items; passes the returned buffers to `each`.
    pub(crate) fn abandon(&mut self, mut each: impl FnMut(Buffer)) {
        self.withheld.clear();
        self.first = self.first.wrapping_add(self.finished.len() as u64);
        for mut finished in self.finished.drain(..) {
            let buffers = finished.buffers.as_mut().iter_mut();
            buffers.filter_map(Option::take).for_each(&mut each);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BufferOwner;

    #[test]
    fn completions_are_delivered_whole_and_in_order() {
        let buffer = |at: u64| <Buffer as BufferOwner>::hold(u64::release(at));
        let at = PhysAddr::new;
        let mut returns: OrderedCompletions<char, [Option<Buffer>; 2]> =
            OrderedCompletions::default();
        let a = returns.begin('a', [None, None], 2);
        returns.buffer_returned(buffer(1), a, 0);
        returns.withhold(at(2), a, 1);
        let b = returns.begin('b', [None, None], 1);
        returns.withhold(at(3), b, 0);
        assert!(returns.next().is_none());
        // Out of order: b is complete before a.
        assert_eq!(returns.released(buffer(3)), Ok(()));
        assert!(returns.next().is_none());
        assert_eq!(returns.released(buffer(9)), Err(buffer(9)));
        assert_eq!(returns.released(buffer(2)), Ok(()));
        assert_eq!(
            returns.next(),
            Some(('a', [Some(buffer(1)), Some(buffer(2))]))
        );
        assert_eq!(returns.next(), Some(('b', [Some(buffer(3)), None])));
        let c = returns.begin('c', [None, None], 2);
        returns.buffer_returned(buffer(4), c, 1);
        let mut left = Vec::new();
        returns.abandon(|buffer| left.push(buffer));
        assert_eq!(left, [buffer(4)]);
        assert!(returns.next().is_none());
    }
}
