//! The command buffer (specification section 2.4 "Commands").
//!
//! Every burst ends with a COMPLETION_WAIT that stores the position behind it. The stored number is
//! therefore the sequence number of completed tickets, and tells which slots are free, so that the
//! driver never reads the head register. It has 64 bits and does not wrap.

use ringfence_pgtable::TableError;
use ringfence_types::{FrameSource, InvalidationError, PhysAddr, PhysMemory, Ticket};

use crate::command::Command;
use crate::memory::tables;
use crate::registers::LENGTH_SHIFT;

/// Number of commands in a frame of 4 KiB, the smallest length of the buffer.
const ENTRIES: u64 = 256;
/// ComLen: the base-2 logarithm of the number of commands.
const LENGTH: u64 = ENTRIES.trailing_zeros() as u64;
/// Bytes of a command.
const BYTES: u64 = 16;
/// Most outstanding commands, without the COMPLETION_WAIT of the burst: one slot stays free,
/// because a full buffer would look empty.
pub(crate) const MAX_OUTSTANDING: u64 = ENTRIES - 2;

/// The ring in memory, and the word of completed commands.
#[derive(Debug)]
pub(crate) struct CommandBuffer {
    buffer: PhysAddr,
    completion: PhysAddr,
    /// Commands that the tail register covers.
    issued: u64,
    /// Commands that have completed.
    completed: u64,
}

/// Commands that are in the buffer, but not yet covered by the tail register.
#[must_use = "`finish` issues the commands"]
#[derive(Debug)]
pub(crate) struct Burst {
    next: u64,
}

impl CommandBuffer {
    pub(crate) fn new<M: PhysMemory, S: FrameSource>(
        mem: &M,
        frames: &S,
    ) -> Result<Self, TableError> {
        let buffer = tables(mem).frame(frames)?;
        let completion = tables(mem)
            .frame(frames)
            .inspect_err(|_| frames.free(buffer))?;
        Ok(Self {
            buffer,
            completion,
            issued: 0,
            completed: 0,
        })
    }

    /// Frees the frames, which the unit no longer accesses.
    pub(crate) fn free<S: FrameSource>(&self, frames: &S) {
        frames.free(self.buffer);
        frames.free(self.completion);
    }

    /// Returns the value of the Command Buffer Base Address Register.
    pub(crate) const fn register(&self) -> u64 {
        self.buffer.get() | LENGTH << LENGTH_SHIFT
    }

    /// Empties the buffer, whose head and tail registers are zero. Tickets of lost commands count
    /// as completed: the caller invalidates everything before it polls one.
    pub(crate) fn restart<M: PhysMemory>(&mut self, mem: &M) -> Result<(), TableError> {
        let issued = self.issued.next_multiple_of(ENTRIES);
        tables(mem).store(self.completion, &[issued])?;
        (self.issued, self.completed) = (issued, issued);
        Ok(())
    }

    /// Begins a burst.
    pub(crate) fn begin<M: PhysMemory>(&mut self, mem: &M) -> Result<Burst, InvalidationError> {
        self.refresh(mem)?;
        Ok(Burst { next: self.issued })
    }

    /// Adds a command to `burst` and keeps room for its COMPLETION_WAIT.
    ///
    /// # Errors
    /// [`InvalidationError::QueueFull`]: the burst cannot be issued before earlier commands have
    /// completed.
    pub(crate) fn push<M: PhysMemory>(
        &self,
        mem: &M,
        burst: &mut Burst,
        command: Command,
    ) -> Result<(), InvalidationError> {
        if burst.next.wrapping_sub(self.completed) >= MAX_OUTSTANDING {
            return Err(InvalidationError::QueueFull);
        }
        self.store(mem, burst, command)
    }

    /// Ends `burst` with a COMPLETION_WAIT. Returns its ticket and the value of the tail register
    /// that issues it. An empty burst has the ticket of the last one, and no new tail.
    pub(crate) fn finish<M: PhysMemory>(
        &mut self,
        mem: &M,
        mut burst: Burst,
    ) -> Result<(Ticket, Option<u32>), InvalidationError> {
        if burst.next == self.issued {
            return Ok((Ticket::new(self.issued), None));
        }
        let number = burst.next.wrapping_add(1);
        let wait = Command::completion_wait(self.completion, number);
        self.store(mem, &mut burst, wait)?;
        self.issued = number;
        let tail = number % ENTRIES * BYTES;
        Ok((Ticket::new(number), Some(tail as u32)))
    }

    /// Returns true if the commands before the ticket's position have completed.
    pub(crate) fn has_completed<M: PhysMemory>(
        &mut self,
        mem: &M,
        ticket: Ticket,
    ) -> Result<bool, InvalidationError> {
        self.refresh(mem)?;
        Ok(ticket.get() <= self.completed)
    }

    /// Returns the number of completed commands.
    pub(crate) const fn completed(&self) -> u64 {
        self.completed
    }

    /// Reads the word of completed commands. The unit never stores more than the driver issued.
    fn refresh<M: PhysMemory>(&mut self, mem: &M) -> Result<(), InvalidationError> {
        let word = tables(mem).load(self.completion);
        let word = word.map_err(|_| InvalidationError::Failed)?;
        if word > self.issued {
            return Err(InvalidationError::Failed);
        }
        self.completed = self.completed.max(word);
        Ok(())
    }

    fn store<M: PhysMemory>(
        &self,
        mem: &M,
        burst: &mut Burst,
        command: Command,
    ) -> Result<(), InvalidationError> {
        let at = self.buffer.wrapping_add(burst.next % ENTRIES * BYTES);
        let stored = tables(mem).store(at, &command.0);
        stored.map_err(|_| InvalidationError::Failed)?;
        burst.next = burst.next.wrapping_add(1);
        Ok(())
    }
}
