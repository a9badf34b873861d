//! Finished work on its way up. It goes up once all its buffers are back; until then some may be
//! withheld by the layer.

use std::collections::VecDeque;

use ringfence_types::PhysAddr;

use crate::Buffer;

/// A piece of work and those of its buffers that are back. `C` holds them: `[Option<Buffer>; N]` or
/// `Vec<Option<Buffer>>`.
#[derive(Debug)]
struct CompletedWork<T, C> {
    item: T,
    buffers: C,
    missing: usize,
}

/// Finished work in the order of its completion.
#[derive(Debug)]
pub(crate) struct OrderedCompletions<T, C> {
    finished: VecDeque<CompletedWork<T, C>>,
    /// Number of the one in front.
    first: u64,
    /// Buffers that the layer withholds, in the order of their unmap: where, whose, which.
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
    /// One more piece of work, whose buffers will come into the first `missing` places of
    /// `buffers`; its number.
    pub(crate) fn begin(&mut self, item: T, buffers: C, missing: usize) -> u64 {
        self.finished.push_back(CompletedWork {
            item,
            buffers,
            missing,
        });
        self.first.wrapping_add(self.finished.len() as u64 - 1)
    }

    /// A buffer of `number` will come later.
    pub(crate) fn withhold(&mut self, at: PhysAddr, number: u64, which: usize) {
        self.withheld.push_back((at, number, which));
    }

    /// A buffer of `number` will never come: what is done goes up without it, and holds nothing up.
    pub(crate) fn lose(&mut self, number: u64) {
        let place = number.wrapping_sub(self.first) as usize;
        if let Some(finished) = self.finished.get_mut(place) {
            finished.missing = finished.missing.saturating_sub(1);
        }
    }

    /// A buffer of `number` is back.
    pub(crate) fn buffer_returned(&mut self, buffer: Buffer, number: u64, which: usize) {
        let place = number.wrapping_sub(self.first) as usize;
        if let Some(finished) = self.finished.get_mut(place)
            && let Some(empty) = finished.buffers.as_mut().get_mut(which)
        {
            *empty = Some(buffer);
            finished.missing = finished.missing.saturating_sub(1);
        }
    }

    /// A withheld buffer is back.
    ///
    /// # Errors
    /// It belongs to no finished work.
    pub(crate) fn released(&mut self, buffer: Buffer) -> Result<(), Buffer> {
        // They come back in the order of their unmap, so this looks at the first one only, unless a
        // burst's end had failed.
        let found = self
            .withheld
            .iter()
            .position(|(at, _, _)| *at == buffer.start());
        match found.and_then(|place| self.withheld.remove(place)) {
            Some((_, number, which)) => {
                self.buffer_returned(buffer, number, which);
                Ok(())
            }
            None => Err(buffer),
        }
    }

    /// The next piece of work, if it is complete.
    pub(crate) fn next(&mut self) -> Option<(T, C)> {
        if self.finished.front()?.missing > 0 {
            return None;
        }
        self.first = self.first.wrapping_add(1);
        let finished = self.finished.pop_front()?;
        Some((finished.item, finished.buffers))
    }

    /// Gives up on work whose buffers never came; `each` receives those that did.
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
    fn work_goes_up_whole_and_in_order() {
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
        // Out of order: b is whole before a is.
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
