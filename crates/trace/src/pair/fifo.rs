//! An arena whose contents are released in the order of their allocation.

/// A slice of a [`Fifo`], by position since its beginning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct FifoSpan {
    start: u64,
    count: usize,
}

impl FifoSpan {
    pub(super) fn len(self) -> usize {
        self.count
    }
}

/// An arena that grows at the back, is released from the front, and lends contiguous slices.
#[derive(Debug)]
pub(super) struct Fifo<T> {
    items: Vec<T>,
    /// Position of `items[0]`.
    base: u64,
    /// Number of released items at the front of `items`.
    released: usize,
}

impl<T> Default for Fifo<T> {
    fn default() -> Self {
        Self {
            items: Vec::new(),
            base: 0,
            released: 0,
        }
    }
}

impl<T: Copy> Fifo<T> {
    pub(super) fn push(&mut self, items: &[T]) -> FifoSpan {
        let span = self.mark();
        self.items.extend_from_slice(items);
        self.since(span)
    }

    /// Returns an empty span at the end; [`Fifo::since`] extends it over the items pushed
    /// afterwards.
    pub(super) fn mark(&self) -> FifoSpan {
        FifoSpan {
            start: self.base.wrapping_add(self.items.len() as u64),
            count: 0,
        }
    }

    pub(super) fn push_one(&mut self, item: T) {
        self.items.push(item);
    }

    pub(super) fn since(&self, mark: FifoSpan) -> FifoSpan {
        FifoSpan {
            start: mark.start,
            count: self.mark().start.wrapping_sub(mark.start) as usize,
        }
    }

    /// Returns the items of `span`; empty if they were released.
    pub(super) fn get(&self, span: FifoSpan) -> &[T] {
        let Some(first) = span.start.checked_sub(self.base) else {
            return &[];
        };
        let first = first as usize;
        self.items
            .get(first..first.saturating_add(span.count))
            .unwrap_or(&[])
    }

    /// Releases `span` and all items before it. The memory is reclaimed when half of the items are
    /// released.
    pub(super) fn release(&mut self, span: FifoSpan) {
        let end = span.start.wrapping_add(span.count as u64);
        let dead = end.saturating_sub(self.base) as usize;
        self.released = self.released.max(dead.min(self.items.len()));
        if self.released == self.items.len() || self.released > self.items.len() / 2 {
            self.items.drain(..self.released);
            self.base = self.base.wrapping_add(self.released as u64);
            self.released = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_survive_releases_before_them() {
        let mut fifo = Fifo::default();
        let mut spans = std::collections::VecDeque::new();
        for round in 0u64..1000 {
            let items: Vec<u64> = (0..round % 7).map(|item| item + round).collect();
            spans.push_back((fifo.push(&items), items));
            if round % 3 != 0 {
                let (span, items) = spans.pop_front().unwrap();
                assert_eq!(fifo.get(span), items);
                fifo.release(span);
            }
            for (span, items) in &spans {
                assert_eq!(fifo.get(*span), items);
            }
        }
        let held: usize = spans.iter().map(|(span, _)| span.len()).sum();
        assert!(fifo.items.len() <= 2 * held + 7);
    }
}
