//! The event queue (IHI 0070, sections 3.5, 7.2 and 7.4).

use ringfence_pgtable::TableMemory;
use ringfence_types::{PhysAddr, PhysMemory, Registers};

use crate::command_queue::QUEUE_ADDRESS;
use crate::event::Loss;
use crate::global_errors::GlobalErrors;
use crate::registers::{ABSENT, EVENTQ_BASE, EVENTQ_CONS, EVENTQ_PROD, OVERFLOW};

/// Bytes of a record.
pub(crate) const RECORD_BYTES: u64 = 32;

/// The queue, in one frame.
#[derive(Debug)]
pub(crate) struct EventQueue {
    frame: PhysAddr,
    entries: u32,
    /// Index with the wrap bit: the next record to take.
    consumer: u32,
    /// The unit's index, as of the last read.
    producer: u32,
    /// `OVFLG` as of the last read.
    overflow: u32,
    /// Last value written to `OVACKFLG`.
    acknowledged: u32,
    /// The unit's index was not one of the queue.
    is_corrupt: bool,
}

impl EventQueue {
    pub(crate) const fn new(frame: PhysAddr, entries: u32) -> Self {
        Self {
            frame,
            entries,
            consumer: 0,
            producer: 0,
            overflow: 0,
            acknowledged: 0,
            is_corrupt: false,
        }
    }

    pub(crate) const fn frame(&self) -> PhysAddr {
        self.frame
    }

    /// Writes the base and equal indices. The queue must be disabled.
    pub(crate) fn write_base<R: Registers>(&self, unit: &R) {
        let log2 = u64::from(self.entries.trailing_zeros());
        unit.write64(EVENTQ_BASE, self.frame.get() & QUEUE_ADDRESS | log2);
        unit.write32(EVENTQ_PROD, 0);
        unit.write32(EVENTQ_CONS, 0);
    }

    const fn index_mask(&self) -> u32 {
        self.entries.wrapping_mul(2).wrapping_sub(1)
    }

    /// Takes the next record; `None` if the queue is empty.
    pub(crate) fn pop<R: Registers, M: PhysMemory>(
        &mut self,
        unit: &R,
        memory: &TableMemory<'_, M>,
    ) -> Option<[u64; 4]> {
        if self.producer == self.consumer {
            self.read_producer(unit);
            if self.producer == self.consumer {
                return None;
            }
        }
        let slot = u64::from(self.consumer & self.entries.wrapping_sub(1));
        let mut at = self.frame.wrapping_add(slot.wrapping_mul(RECORD_BYTES));
        let mut record = [0; 4];
        for word in &mut record {
            *word = memory.load(at).ok()?;
            at = at.wrapping_add(8);
        }
        self.consumer = self.consumer.wrapping_add(1) & self.index_mask();
        // One write of the index for all records that the last read of the unit's index found.
        if self.consumer == self.producer {
            self.write_consumer(unit);
        }
        Some(record)
    }

    fn read_producer<R: Registers>(&mut self, unit: &R) {
        let raw = unit.read32(EVENTQ_PROD);
        if raw == ABSENT {
            return;
        }
        self.overflow = raw & OVERFLOW;
        let producer = raw & self.index_mask();
        let filled = producer.wrapping_sub(self.consumer) & self.index_mask();
        if filled > self.entries {
            // No state of a queue: nothing in it is a record.
            self.consumer = producer;
            self.is_corrupt = true;
        }
        self.producer = producer;
    }

    fn write_consumer<R: Registers>(&self, unit: &R) {
        unit.write32(EVENTQ_CONS, self.consumer | self.acknowledged);
    }

    /// Reports and acknowledges the loss of records of an empty queue.
    pub(crate) fn take_loss<R: Registers>(
        &mut self,
        unit: &R,
        errors: &mut GlobalErrors,
    ) -> Option<Loss> {
        if self.is_corrupt {
            self.is_corrupt = false;
            self.write_consumer(unit);
            return Some(Loss::Index);
        }
        if self.overflow != self.acknowledged {
            self.acknowledged = self.overflow;
            self.write_consumer(unit);
            return Some(Loss::Overflow);
        }
        errors.take_event_abort(unit).then_some(Loss::Abort)
    }
}
