//! The port `Invalidator`, bursts, and recovery from errors of the queue.

use ringfence_types::{
    FrameSource, Invalidation, InvalidationError, Invalidator, PhysMemory, Registers, Ticket,
};

use crate::command::Commands;
use crate::error::UnitError;
use crate::plan::Plan;
use crate::unit::{Invalidations, Unit};

impl<R: Registers, M: PhysMemory, S: FrameSource> Unit<R, M, S> {
    /// Submits several invalidations with one completion and, through the queue, one doorbell.
    /// Writes at most two descriptors per range of pages, and one wait. Invalidates all caches
    /// instead if the commands do not fit in an empty queue.
    ///
    /// # Errors
    /// As for [`Invalidator::submit`]. The queue is unchanged. [`InvalidationError::Failed`] after
    /// a refused command or a failed recovery, until [`recover`](Self::recover) succeeds.
    pub fn submit_all(&mut self, requests: &[Invalidation]) -> Result<Ticket, InvalidationError> {
        let is_scalable = self.is_scalable();
        // Not through `plan()`, which would borrow the queue too.
        let plan = Plan {
            attachments: &self.attachments,
            is_scalable,
            largest_mask: self.capabilities.page_selective,
        };
        let mut needed: usize = 0;
        for request in requests {
            let commands = plan.commands(request);
            let commands = commands.ok_or(InvalidationError::Unsupported)?;
            needed = needed.saturating_add(commands.iter().count());
        }
        let (registers, memory) = (&self.registers, &self.memory);
        let planned = requests.iter().filter_map(|request| plan.commands(request));
        let list = planned.flat_map(|commands| commands.into_iter());
        match &mut self.invalidations {
            Invalidations::Registers(interface) => interface.submit(registers, list),
            Invalidations::Queue(queue) if needed > queue.capacity() => {
                let everything = Commands::everything(is_scalable);
                let count = everything.iter().count();
                queue.submit(registers, memory, everything.iter(), count)
            }
            Invalidations::Queue(queue) => queue.submit(registers, memory, list, needed),
        }
    }

    pub(crate) fn plan(&self) -> Plan<'_> {
        Plan {
            attachments: &self.attachments,
            is_scalable: self.is_scalable(),
            largest_mask: self.capabilities.page_selective,
        }
    }

    /// Lets the unit continue after [`InvalidationError::Failed`] or a time-out, and invalidates
    /// all caches, because commands may have been lost. All earlier tickets then complete.
    ///
    /// # Errors
    /// The unit does not answer, or refuses. Submissions and polls then fail until a later call
    /// succeeds.
    pub fn recover(&mut self) -> Result<(), UnitError> {
        let recovered = self.restart();
        if recovered.is_err() {
            // The unit may have passed the waits of earlier tickets.
            match &mut self.invalidations {
                Invalidations::Registers(interface) => interface.fail(),
                Invalidations::Queue(queue) => queue.fail(),
            }
        }
        recovered
    }

    fn restart(&mut self) -> Result<(), UnitError> {
        match &mut self.invalidations {
            Invalidations::Registers(interface) => interface.recover(),
            Invalidations::Queue(queue) => queue.recover(&self.registers, &self.memory)?,
        }
        self.execute(Commands::everything(self.is_scalable()))
    }

    /// Submits commands of the driver's own and waits for them.
    pub(crate) fn execute(&mut self, commands: Commands) -> Result<(), UnitError> {
        let (registers, memory) = (&self.registers, &self.memory);
        let count = commands.iter().count();
        let ticket = match &mut self.invalidations {
            Invalidations::Registers(interface) => loop {
                match interface.submit(registers, commands.iter()) {
                    // Another command is under way; its limit of polls bounds this loop.
                    Err(InvalidationError::QueueFull) => core::hint::spin_loop(),
                    submitted => break submitted,
                }
            },
            Invalidations::Queue(queue) => {
                let submitted = queue.submit(registers, memory, commands.iter(), count);
                match submitted {
                    Err(InvalidationError::QueueFull) => {
                        queue.wait_for_all(registers, memory)?;
                        queue.submit(registers, memory, commands.iter(), count)
                    }
                    submitted => submitted,
                }
            }
        }?;
        Ok(self.wait(ticket)?)
    }
}

impl<R: Registers, M: PhysMemory, S: FrameSource> Invalidator for Unit<R, M, S> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.submit_all(&[request])
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        let (registers, memory) = (&self.registers, &self.memory);
        match &mut self.invalidations {
            Invalidations::Registers(interface) => interface.poll(registers, ticket),
            Invalidations::Queue(queue) => queue.poll(registers, memory, ticket),
        }
    }
}
