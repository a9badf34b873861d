//! The invalidation queue (VT-d specification, section 6.5.2): a ring of descriptors in one frame,
//! and a word where the unit writes the sequence number of the last completed burst.

use ringfence_pgtable::{Coherency, TableMemory};
use ringfence_types::{
    FrameSource, InvalidationError, PageSize, PhysAddr, PhysMemory, Registers, Sequence, Ticket,
    poll_until,
};

use crate::command::Command;
use crate::error::{Register, UnitError};
use crate::registers::{self, ABSENT, FSTS, IQA, IQH, IQT, QIE, QUEUE_ERRORS};

/// IQA.DW: descriptors of 256 bits.
const DW: u64 = 1 << 11;
/// Polls between two looks at the fault status.
const LOOKS: u32 = 256;

/// The width of descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    /// 128 bits, in legacy mode.
    Narrow,
    /// 256 bits, in scalable mode.
    Wide,
}

impl Width {
    /// Binary logarithm of the bytes of a descriptor: its position in IQH and IQT.
    const fn shift(self) -> u32 {
        match self {
            Self::Narrow => 4,
            Self::Wide => 5,
        }
    }
}

/// The queue, with one descriptor always free.
#[derive(Debug)]
pub(crate) struct Queue {
    ring: PhysAddr,
    status: PhysAddr,
    width: Width,
    /// Index of the next descriptor to write.
    tail: u32,
    /// Index of the oldest descriptor that the unit may not have fetched yet.
    head: u32,
    bursts: Sequence,
    /// Polls since the last progress.
    polls: u32,
    poll_limit: u32,
    /// A recovery failed. The unit may have passed waits whose commands were lost.
    is_failed: bool,
}

impl Queue {
    /// Allocates the queue and enables it.
    pub(crate) fn enable<S: FrameSource>(
        registers: &impl Registers,
        memory: &impl PhysMemory,
        frames: &S,
        width: Width,
        poll_limit: u32,
    ) -> Result<Self, UnitError> {
        let ring = tables(memory).frame(frames)?;
        let status = tables(memory).frame(frames);
        let status = status.inspect_err(|_| frames.free(ring))?;
        let queue = Self {
            ring,
            status,
            width,
            tail: 0,
            head: 0,
            bursts: Sequence::default(),
            polls: 0,
            poll_limit,
            is_failed: false,
        };
        if let Err(error) = queue.start(registers) {
            queue.free(frames);
            return Err(error);
        }
        Ok(queue)
    }

    fn start(&self, registers: &impl Registers) -> Result<(), UnitError> {
        if registers.read32(registers::GSTS) & QIE != 0 {
            self.stop(registers)?;
        }
        let wide = match self.width {
            Width::Narrow => 0,
            Width::Wide => DW,
        };
        registers.write64(IQT, 0);
        // QS = 0: one frame.
        registers.write64(IQA, self.ring.get() | wide);
        registers::set(registers, QIE, self.poll_limit)
    }

    pub(crate) fn stop(&self, registers: &impl Registers) -> Result<(), UnitError> {
        stop_queue(registers, self.poll_limit)
    }

    /// Frees the frames. The queue is disabled, or was never enabled.
    pub(crate) fn free(self, frames: &impl FrameSource) {
        frames.free(self.ring);
        frames.free(self.status);
    }

    const fn entries(&self) -> u32 {
        PageSize::Size4K.bytes() as u32 >> self.width.shift()
    }

    /// Returns the most commands of a burst: one descriptor is the wait, one stays free.
    pub(crate) const fn capacity(&self) -> usize {
        self.entries() as usize - 2
    }

    /// Writes `count` commands and a wait, then the doorbell. Writes nothing if the queue is full.
    pub(crate) fn submit(
        &mut self,
        registers: &impl Registers,
        memory: &impl PhysMemory,
        commands: impl Iterator<Item = Command>,
        count: usize,
    ) -> Result<Ticket, InvalidationError> {
        if self.is_failed {
            return Err(InvalidationError::Failed);
        }
        let needed = u32::try_from(count).map_or(u32::MAX, |count| count.saturating_add(1));
        if needed > self.free_entries() {
            self.head = self.index(registers.read64(IQH));
            if needed > self.free_entries() {
                return Err(InvalidationError::QueueFull);
            }
        }
        let wait = Command::Wait {
            status: self.status,
            value: self.bursts.next() as u32,
        };
        let mut tail = self.tail;
        for command in commands.take(count).chain([wait]) {
            self.store(memory, tail, command)?;
            tail = self.after(tail);
        }
        self.tail = tail;
        registers.write64(IQT, u64::from(tail) << self.width.shift());
        Ok(self.bursts.submit())
    }

    fn free_entries(&self) -> u32 {
        let used = self.tail.wrapping_sub(self.head) & self.entries().wrapping_sub(1);
        self.entries().wrapping_sub(1).wrapping_sub(used)
    }

    const fn after(&self, index: u32) -> u32 {
        index.wrapping_add(1) & self.entries().wrapping_sub(1)
    }

    /// Returns the index in a value of IQH, which may be anything.
    const fn index(&self, value: u64) -> u32 {
        (value >> self.width.shift()) as u32 & self.entries().wrapping_sub(1)
    }

    fn store(
        &self,
        memory: &impl PhysMemory,
        index: u32,
        command: Command,
    ) -> Result<(), InvalidationError> {
        let at = self
            .ring
            .wrapping_add(u64::from(index) << self.width.shift());
        let [first, second] = command.descriptor();
        let stored = match self.width {
            Width::Narrow => tables(memory).store(at, &[first, second]),
            Width::Wide => tables(memory).store(at, &[first, second, 0, 0]),
        };
        stored.map_err(|_| InvalidationError::Failed)
    }

    /// Returns true if the burst of `ticket` has completed.
    pub(crate) fn poll(
        &mut self,
        registers: &impl Registers,
        memory: &impl PhysMemory,
        ticket: Ticket,
    ) -> Result<bool, InvalidationError> {
        if self.is_failed || !self.bursts.is_submitted(ticket) {
            return Err(InvalidationError::Failed);
        }
        if self.bursts.is_complete(ticket) {
            return Ok(true);
        }
        let status = tables(memory).load(self.status);
        let status = status.map_err(|_| InvalidationError::Failed)?;
        if self.bursts.complete(status as u32) {
            self.polls = 0;
        }
        if self.bursts.is_complete(ticket) {
            return Ok(true);
        }
        self.check(registers)?;
        Ok(false)
    }

    /// Waits for all bursts.
    pub(crate) fn wait_for_all(
        &mut self,
        registers: &impl Registers,
        memory: &impl PhysMemory,
    ) -> Result<(), InvalidationError> {
        let last = self.bursts.last();
        while !self.poll(registers, memory, last)? {
            core::hint::spin_loop();
        }
        Ok(())
    }

    /// Counts a poll without progress, and looks for errors now and then.
    fn check(&mut self, registers: &impl Registers) -> Result<(), InvalidationError> {
        self.polls = self.polls.saturating_add(1);
        let is_due = self.polls.is_power_of_two() || self.polls.is_multiple_of(LOOKS);
        if is_due || self.polls >= self.poll_limit {
            let fsts = registers.read32(FSTS);
            if fsts == ABSENT || fsts & QUEUE_ERRORS != 0 {
                return Err(InvalidationError::Failed);
            }
        }
        if self.polls >= self.poll_limit {
            return Err(InvalidationError::TimedOut);
        }
        Ok(())
    }

    /// Lets the unit continue after an error (section 6.5.2.10): replaces the descriptor at the
    /// head, at which it stopped, by one without effect, and clears the error bits. Commands may
    /// have been lost, so the caller then invalidates everything.
    pub(crate) fn recover(
        &mut self,
        registers: &impl Registers,
        memory: &impl PhysMemory,
    ) -> Result<(), InvalidationError> {
        let fsts = registers.read32(FSTS);
        if fsts == ABSENT {
            return Err(InvalidationError::Failed);
        }
        if fsts & registers::IQE != 0 {
            let head = self.index(registers.read64(IQH));
            self.store(memory, head, Command::Fence)?;
        }
        registers.write32(FSTS, fsts & QUEUE_ERRORS);
        self.polls = 0;
        self.is_failed = false;
        Ok(())
    }

    /// Fails all submissions and polls until a recovery succeeds.
    pub(crate) const fn fail(&mut self) {
        self.is_failed = true;
    }
}

/// Disables the queue once it is empty.
pub(crate) fn stop_queue(registers: &impl Registers, poll_limit: u32) -> Result<(), UnitError> {
    let late = UnitError::TimedOut {
        register: Register::QueueHead,
    };
    let is_empty = || registers.read64(IQH) == registers.read64(IQT);
    poll_until(poll_limit, late, is_empty)?;
    registers::clear(registers, QIE, poll_limit)
}

/// The unit always snoops accesses to the queue and the status word (section 11.4.3, C).
const fn tables<M: PhysMemory>(memory: &M) -> TableMemory<'_, M> {
    TableMemory::new(memory, Coherency::Coherent, u64::BITS)
}
