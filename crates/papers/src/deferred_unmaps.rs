//! Linux's queue of deferred unmaps with its `struct iova`, as Fujita and Moriai describe them
//! (Fig. 3, sections 2.3 and 3.3). It shows the memory of the paper's layout: the product's queue
//! ([`ringfence_dma::flush::Deferred`]) keeps smaller records.

use alloc::collections::TryReserveError;
use alloc::vec::Vec;

use ringfence_types::{Nanos, PfnRange};

/// `struct rb_node` of Linux on a 64-bit machine: three words.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RbNode {
    /// Address of the parent. Bit 0 is the colour.
    pub rb_parent_color: u64,
    /// Address of the right child.
    pub rb_right: u64,
    /// Address of the left child.
    pub rb_left: u64,
}

/// `struct iova` (Fig. 3): an address range that is in use, 40 bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StructIova {
    /// Links of the tree of ranges in use.
    pub node: RbNode,
    /// Number of the last page.
    pub pfn_hi: u64,
    /// Number of the first page.
    pub pfn_lo: u64,
}

/// Memory of a [`DeferredUnmaps`], in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeferredMemory {
    /// The `struct iova` of all ranges that wait.
    pub records: usize,
    /// The array of pointers to them.
    pub array: usize,
}

/// Unmapped ranges that wait for the next global flush. Each keeps its `struct iova` and takes a
/// slot of an array of pointers.
#[derive(Debug)]
pub struct DeferredUnmaps {
    /// One record for each waiting range. Linux takes them from a slab cache, page by page.
    records: Vec<StructIova>,
    /// Pointers, here offsets in bytes from the first record.
    array: Vec<u64>,
    slots: usize,
    /// Time of the oldest entry.
    armed: Nanos,
}

impl DeferredUnmaps {
    /// Slots of the array in Linux 2.6.26 (`HIGH_WATER_MARK`).
    pub const SLOTS: usize = 250;
    /// Timeout in nanoseconds.
    pub const TIMEOUT_NS: u64 = 10_000_000;

    /// Creates an empty queue with an array of `slots` pointers.
    ///
    /// # Errors
    /// Out of memory for the array.
    pub fn new(slots: usize) -> Result<Self, TryReserveError> {
        let mut array = Vec::new();
        array.try_reserve_exact(slots)?;
        Ok(Self {
            records: Vec::new(),
            array,
            slots,
            armed: Nanos(0),
        })
    }

    /// Queues an unmapped range. If the array is full then, empties the queue and returns the
    /// number of ranges that one flush releases; otherwise returns 0.
    ///
    /// # Errors
    /// Out of memory for the record. The queue is unchanged.
    pub fn add(&mut self, range: PfnRange, now: Nanos) -> Result<usize, TryReserveError> {
        self.records.try_reserve(1)?;
        if self.records.is_empty() {
            self.armed = now;
        }
        let offset = self.records.len().saturating_mul(size_of::<StructIova>());
        self.array.push(offset as u64);
        self.records.push(StructIova {
            node: RbNode::default(),
            pfn_hi: range.hi().get(),
            pfn_lo: range.lo().get(),
        });
        Ok(if self.records.len() >= self.slots {
            self.flush()
        } else {
            0
        })
    }

    /// Handles the timer: flushes if the oldest entry has waited for [`Self::TIMEOUT_NS`]. Returns
    /// the number of released ranges.
    pub fn tick(&mut self, now: Nanos) -> usize {
        if !self.records.is_empty() && now.since(self.armed) >= Self::TIMEOUT_NS {
            self.flush()
        } else {
            0
        }
    }

    /// Returns the memory of the ranges that wait and of the whole array.
    pub fn memory(&self) -> DeferredMemory {
        DeferredMemory {
            records: self.records.len().saturating_mul(size_of::<StructIova>()),
            array: self.array.capacity().saturating_mul(size_of::<u64>()),
        }
    }

    fn flush(&mut self) -> usize {
        self.array.clear();
        let released = self.records.len();
        self.records.clear();
        released
    }
}

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    use ringfence_types::Pfn;

    use super::*;

    fn page(number: u64) -> PfnRange {
        PfnRange::inclusive(Pfn::new(number), Pfn::new(number)).unwrap()
    }

    #[test]
    fn struct_iova_has_the_layout_of_figure_3() {
        assert_eq!(size_of::<RbNode>(), 24);
        assert_eq!(size_of::<StructIova>(), 40);
        let offsets = [
            offset_of!(StructIova, node),
            offset_of!(StructIova, pfn_hi),
            offset_of!(StructIova, pfn_lo),
        ];
        assert_eq!(offsets, [0, 24, 32]);
    }

    #[test]
    fn waiting_ranges_keep_their_records_until_a_flush() {
        let mut queue = DeferredUnmaps::new(DeferredUnmaps::SLOTS).unwrap();
        let memory = |queue: &DeferredUnmaps| (queue.memory().records, queue.memory().array);
        assert_eq!(memory(&queue), (0, 250 * 8));
        for number in 0..249 {
            assert_eq!(queue.add(page(number), Nanos(number)).unwrap(), 0);
        }
        assert_eq!(memory(&queue), (249 * 40, 250 * 8));
        let last = queue.records.last().unwrap();
        assert_eq!((last.pfn_lo, last.pfn_hi), (248, 248));
        assert_eq!(queue.array.last(), Some(&(248 * 40)));
        // The entry number 250 fills the array.
        assert_eq!(queue.add(page(249), Nanos(249)).unwrap(), 250);
        assert_eq!(memory(&queue), (0, 250 * 8));
    }

    #[test]
    fn oldest_entry_sets_the_timer_of_10_ms() {
        let mut queue = DeferredUnmaps::new(DeferredUnmaps::SLOTS).unwrap();
        assert_eq!(queue.tick(Nanos(u64::MAX)), 0);
        queue.add(page(1), Nanos(5)).unwrap();
        queue.add(page(2), Nanos(9_000_000)).unwrap();
        assert_eq!(queue.tick(Nanos(10_000_004)), 0);
        assert_eq!(queue.tick(Nanos(10_000_005)), 2);
        assert_eq!(queue.tick(Nanos(30_000_000)), 0);
    }
}
