//! Registers of units that are absent or broken.

use std::sync::atomic::{AtomicUsize, Ordering};

use ringfence_types::Registers;

/// Registers that answer the reads with some values in turn, and ignore writes.
#[derive(Debug)]
pub struct AnyRegisters {
    values: Vec<u64>,
    reads: AtomicUsize,
}

impl AnyRegisters {
    /// Answers with `values`, over and over.
    ///
    /// # Panics
    /// A read panics if there is no value.
    pub const fn new(values: Vec<u64>) -> Self {
        Self {
            values,
            reads: AtomicUsize::new(0),
        }
    }

    /// Registers where no unit answers: all reads return ones.
    pub fn absent() -> Self {
        Self::new(vec![u64::MAX])
    }
}

impl Registers for AnyRegisters {
    fn read32(&self, offset: u64) -> u32 {
        self.read64(offset) as u32
    }

    fn read64(&self, _: u64) -> u64 {
        let read = self.reads.fetch_add(1, Ordering::Relaxed);
        self.values[read % self.values.len()]
    }

    fn write32(&self, _: u64, _: u32) {}

    fn write64(&self, _: u64, _: u64) {}
}
