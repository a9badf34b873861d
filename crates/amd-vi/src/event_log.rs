//! The event log (specification section 2.5 "Event Logging").

use core::sync::atomic::Ordering;

use ringfence_pgtable::TableError;
use ringfence_types::{FrameSource, PhysAddr, PhysMemory, Registers, poll_until};

use crate::event::FaultRecord;
use crate::memory::tables;
use crate::registers::{
    ABSENT, CONTROL, EVENT_HEAD, EVENT_LOG_EN, EVENT_LOG_INT, EVENT_LOG_RUN, EVENT_OVERFLOW,
    EVENT_TAIL, LENGTH_SHIFT, STATUS, wait_status,
};

/// Number of records in a frame of 4 KiB, the smallest length of the log.
const ENTRIES: u32 = 256;
const LENGTH: u64 = ENTRIES.trailing_zeros() as u64;
/// Bytes of a record.
const BYTES: u32 = 16;

/// The ring in memory.
#[derive(Debug)]
pub(crate) struct EventLog {
    log: PhysAddr,
    /// Index of the oldest record that was not read.
    head: u32,
    /// Index after the newest record, as last read from the tail register.
    tail: u32,
    /// The overflow was reported, and the unit has not cleared EventOverflow.
    reported: bool,
}

impl EventLog {
    pub(crate) fn new<M: PhysMemory, S: FrameSource>(
        mem: &M,
        frames: &S,
    ) -> Result<Self, TableError> {
        Ok(Self {
            log: tables(mem).frame(frames)?,
            head: 0,
            tail: 0,
            reported: false,
        })
    }

    /// Frees the frame, which the unit no longer accesses.
    pub(crate) fn free<S: FrameSource>(&self, frames: &S) {
        frames.free(self.log);
    }

    /// Returns the value of the Event Log Base Address Register.
    pub(crate) const fn register(&self) -> u64 {
        self.log.get() | LENGTH << LENGTH_SHIFT
    }

    /// Returns true if a record is known to be in the log.
    pub(crate) const fn has_known(&self) -> bool {
        self.head != self.tail
    }

    /// Returns the oldest record and removes it. Accesses registers only before the first and after
    /// the last of the known records.
    pub(crate) fn next<R: Registers, M: PhysMemory>(
        &mut self,
        registers: &R,
        mem: &M,
        limit: u32,
    ) -> Option<FaultRecord> {
        self.read_tail(registers);
        if !self.has_known() {
            let status = registers.read32(STATUS);
            if status == ABSENT as u32 {
                return None;
            }
            if status & EVENT_LOG_INT != 0 {
                // A record that follows the last read of the tail has set the bit too.
                registers.write32(STATUS, EVENT_LOG_INT);
                self.read_tail(registers);
            }
            if !self.has_known() {
                return self.overflow(registers, status, limit);
            }
        }
        let raw = self.take(mem, limit);
        self.head = (self.head + 1) % ENTRIES;
        if !self.has_known() {
            registers.write32(EVENT_HEAD, self.head * BYTES);
        }
        Some(FaultRecord::decode(raw?))
    }

    /// Reads the tail register unless a record is known.
    fn read_tail<R: Registers>(&mut self, registers: &R) {
        if self.has_known() {
            return;
        }
        let tail = registers.read32(EVENT_TAIL);
        if tail != ABSENT as u32 {
            self.tail = tail / BYTES % ENTRIES;
        }
    }

    /// Reads the record at the head and clears it. A unit may move the tail before the record is in
    /// memory (Linux waits for this too): a record that is zero is read again.
    fn take<M: PhysMemory>(&self, mem: &M, limit: u32) -> Option<[u64; 2]> {
        let at = self.log.wrapping_add(u64::from(self.head * BYTES));
        let [first, second] = mem.words(at, 2).ok()? else {
            return None;
        };
        let _ = poll_until(limit, (), || first.load(Ordering::Acquire) != 0);
        let raw = [
            first.load(Ordering::Acquire),
            second.load(Ordering::Acquire),
        ];
        second.store(0, Ordering::Relaxed);
        first.store(0, Ordering::Release);
        Some(raw)
    }

    /// Reports an overflow of the log, which is empty, and restarts the log: EventLogEn must be
    /// cleared and set again (section 2.5, EventOverflow).
    fn overflow<R: Registers>(
        &mut self,
        registers: &R,
        status: u32,
        limit: u32,
    ) -> Option<FaultRecord> {
        if status & EVENT_OVERFLOW == 0 {
            self.reported = false;
        }
        if status & EVENT_OVERFLOW == 0 || self.reported {
            return None;
        }
        let control = registers.read64(CONTROL);
        registers.write64(CONTROL, control & !EVENT_LOG_EN);
        // A unit that goes on logging loses nothing.
        let _ = wait_status(registers, EVENT_LOG_RUN, 0, limit);
        registers.write32(STATUS, EVENT_OVERFLOW);
        registers.write64(CONTROL, control | EVENT_LOG_EN);
        self.reported = registers.read32(STATUS) & EVENT_OVERFLOW != 0;
        Some(FaultRecord::LOST)
    }
}
