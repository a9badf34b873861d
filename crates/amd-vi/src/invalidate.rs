//! Invalidations: requests to commands, bursts and their completion.

use ringfence_types::{
    CachedLevels, FrameSource, Invalidation, InvalidationError, Invalidator, PhysMemory, Registers,
    RequesterId, Ticket,
};

use crate::command::{Command, Entries};
use crate::command_buffer::{Burst, MAX_OUTSTANDING};
use crate::registers::{COMMAND_BUFFER_RUN, COMMAND_TAIL, STATUS};
use crate::unit::domain_command;
use crate::{Unit, UnitError};

impl<R: Registers, M: PhysMemory, S: FrameSource> Unit<R, M, S> {
    /// Submits several invalidations with one completion and one write of the tail register. Each
    /// takes at most two commands, but [`Invalidation::Context`] takes three, and
    /// [`Invalidation::Global`] without IASup one per attached device.
    ///
    /// # Errors
    /// Nothing was submitted: [`InvalidationError::QueueFull`] until earlier invalidations
    /// complete, [`InvalidationError::Unsupported`] for rings, unknown devices and bursts that no
    /// buffer holds, [`InvalidationError::Failed`] until [`recover`](Self::recover) succeeds.
    pub fn submit_all(&mut self, requests: &[Invalidation]) -> Result<Ticket, InvalidationError> {
        let mut burst = self.begin()?;
        let mut number = 0;
        for request in requests {
            self.push_request(&mut burst, &mut number, request)
                .map_err(|error| match error {
                    // An empty buffer would not hold the burst either.
                    InvalidationError::QueueFull if number > MAX_OUTSTANDING => {
                        InvalidationError::Unsupported
                    }
                    other => other,
                })?;
        }
        self.issue(burst)
    }

    /// Submits the commands in bursts, and waits until all have completed.
    pub(crate) fn run(
        &mut self,
        commands: impl IntoIterator<Item = Command>,
    ) -> Result<(), UnitError> {
        let mut burst = self.begin()?;
        for command in commands {
            if self
                .commands
                .push(&self.memory, &mut burst, command)
                .is_err()
            {
                let ticket = self.issue(burst)?;
                self.wait(ticket)?;
                burst = self.begin()?;
                self.commands.push(&self.memory, &mut burst, command)?;
            }
        }
        let ticket = self.issue(burst)?;
        Ok(self.wait(ticket)?)
    }

    fn begin(&mut self) -> Result<Burst, InvalidationError> {
        if self.stopped {
            return Err(InvalidationError::Failed);
        }
        let burst = self.commands.begin(&self.memory);
        // A word that the driver never stored.
        burst.inspect_err(|_| self.stopped = true)
    }

    fn issue(&mut self, burst: Burst) -> Result<Ticket, InvalidationError> {
        let (ticket, tail) = self.commands.finish(&self.memory, burst)?;
        if let Some(tail) = tail {
            self.registers.write32(COMMAND_TAIL, tail);
        }
        Ok(ticket)
    }

    /// Adds the commands of `request` to `burst`, and their number to `number`.
    fn push_request(
        &self,
        burst: &mut Burst,
        number: &mut u64,
        request: &Invalidation,
    ) -> Result<(), InvalidationError> {
        let mut push = |command| {
            *number = number.saturating_add(1);
            self.commands.push(&self.memory, burst, command)
        };
        match request {
            Invalidation::Pages {
                domain,
                range,
                levels,
            } => {
                let translations = self.translations(*domain);
                let entries = match levels {
                    CachedLevels::Leaves => Entries::Pages,
                    CachedLevels::All => Entries::PagesAndDirectories,
                };
                let (first, second) = range.cover();
                for block in [Some(first), second].into_iter().flatten() {
                    push(Command::invalidate_iommu_pages(
                        *domain,
                        translations,
                        block,
                        entries,
                    ))?;
                }
                Ok(())
            }
            Invalidation::Domain(domain) => {
                push(domain_command(*domain, self.translations(*domain)))
            }
            Invalidation::Global if self.capabilities.ia_sup => {
                push(Command::invalidate_iommu_all())
            }
            Invalidation::Global => self.push_domains(push),
            Invalidation::Context(device) => self.push_context(*device, push),
            Invalidation::Ring { .. } => Err(InvalidationError::Unsupported),
        }
    }

    /// Invalidates the domains of all attached devices. A domain without a device has no cached
    /// translations: detach has invalidated them.
    fn push_domains(
        &self,
        mut push: impl FnMut(Command) -> Result<(), InvalidationError>,
    ) -> Result<(), InvalidationError> {
        let mut last = None;
        for (_, entry) in self.table.attached(&self.memory) {
            let domain = entry.domain();
            if last != Some(domain) {
                push(domain_command(domain, self.translations(domain)))?;
            }
            last = Some(domain);
        }
        Ok(())
    }

    /// Invalidates the entry of `device`, then the translations of its domain, as
    /// [`detach`](Self::detach) does.
    fn push_context(
        &self,
        device: RequesterId,
        mut push: impl FnMut(Command) -> Result<(), InvalidationError>,
    ) -> Result<(), InvalidationError> {
        let entry = self
            .table
            .read(&self.memory, device)
            .map_err(|_| InvalidationError::Unsupported)?;
        push(Command::invalidate_devtab_entry(device))?;
        push(Command::barrier())?;
        let domain = entry.domain();
        push(domain_command(domain, self.translations(domain)))
    }

    /// Counts a poll without completion. Reads the status register only at the end and now and
    /// then, because such a read takes about as long as an invalidation.
    fn count_poll(&mut self) -> Result<bool, InvalidationError> {
        const POLLS_PER_STATUS: u32 = 256;
        self.polls = self.polls.saturating_add(1);
        let late = self.polls >= self.poll_limit;
        if !late && !self.polls.is_multiple_of(POLLS_PER_STATUS) {
            return Ok(false);
        }
        if self.registers.read32(STATUS) & COMMAND_BUFFER_RUN == 0 {
            self.stopped = true;
            return Err(InvalidationError::Failed);
        }
        if late {
            return Err(InvalidationError::TimedOut);
        }
        Ok(false)
    }
}

impl<R: Registers, M: PhysMemory, S: FrameSource> Invalidator for Unit<R, M, S> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.submit_all(&[request])
    }

    /// Returns [`InvalidationError::TimedOut`] after too many polls without any completion, and
    /// [`InvalidationError::Failed`] after an error of the command buffer or a failed attach or
    /// detach, until [`recover`](Unit::recover) succeeds.
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if self.stopped {
            return Err(InvalidationError::Failed);
        }
        let before = self.commands.completed();
        let done = self.commands.has_completed(&self.memory, ticket);
        if done.is_err() {
            self.stopped = true;
        }
        if self.commands.completed() != before {
            self.polls = 0;
        }
        if done? {
            return Ok(true);
        }
        self.count_poll()
    }
}
