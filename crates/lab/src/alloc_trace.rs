//! The recorded results of an allocator.

use std::cell::{Cell, RefCell};

use ringfence_types::PfnRange;

/// The results of an allocator for one chunk, in order.
#[derive(Debug, Default)]
pub struct AllocTrace {
    results: RefCell<Vec<Option<PfnRange>>>,
    next: Cell<usize>,
}

impl AllocTrace {
    /// Removes all results.
    pub fn clear(&self) {
        self.results.borrow_mut().clear();
        self.next.set(0);
    }

    /// Appends one result.
    pub fn record(&self, answer: Option<PfnRange>) {
        self.results.borrow_mut().push(answer);
    }

    /// Returns to the first result.
    pub fn rewind(&self) {
        self.next.set(0);
    }

    #[inline]
    pub(crate) fn next(&self) -> Option<PfnRange> {
        let index = self.next.get();
        self.next.set(index + 1);
        self.results.borrow().get(index).copied().flatten()
    }
}
