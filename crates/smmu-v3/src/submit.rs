//! Submission and completion of invalidations.

use ringfence_types::{
    DomainId, FrameSource, Invalidation, InvalidationError, Invalidator, PhysMemory, Registers,
    RequesterId, Ticket,
};

use crate::command::Command;
use crate::command_queue::CommandError;
use crate::error::UnitError;
use crate::invalidate::{Emit, Planner};
use crate::registers::{CR0_CMDQEN, write_cr0};
use crate::unit::{Unit, tables};

/// Polls between two looks at the global errors.
const POLLS_PER_STATUS: u32 = 16;

impl<R: Registers, M: PhysMemory, S: FrameSource> Unit<R, M, S> {
    /// Submits `requests` as one burst, with one `CMD_SYNC` at its end and one write of the index.
    ///
    /// # Errors
    /// [`InvalidationError::QueueFull`] until earlier bursts complete,
    /// [`InvalidationError::Unsupported`] for rings, [`InvalidationError::Failed`] after an error
    /// of the queue until [`recover`](Self::recover). Nothing was submitted.
    pub fn submit_all(&mut self, requests: &[Invalidation]) -> Result<Ticket, InvalidationError> {
        let ring = |request: &Invalidation| matches!(request, Invalidation::Ring { .. });
        if requests.iter().any(ring) {
            return Err(InvalidationError::Unsupported);
        }
        self.submit_plan(|planner, emit| planner.burst(requests, emit))
    }

    /// Submits the invalidation of stage 1 under the stage 2 of `guest`, for a guest that changed
    /// its tables: all entries, or those of one ASID.
    ///
    /// # Errors
    /// As for [`submit_all`](Self::submit_all), and [`InvalidationError::Unsupported`] if the unit
    /// does not have both stages, or ids of as many bits.
    pub fn submit_guest_stage1(
        &mut self,
        guest: DomainId,
        asid: Option<u16>,
    ) -> Result<Ticket, InvalidationError> {
        let unit = &self.capabilities;
        let fits = |id: u16, bits: u32| u32::from(id) >> bits == 0;
        // The unit may stop at a command with a wider id, and the guest chooses the ASID.
        let expressible =
            fits(guest.get(), unit.vmid_bits) && fits(asid.unwrap_or(0), unit.asid_bits);
        if !unit.stage1 || !unit.stage2 || !expressible {
            return Err(InvalidationError::Unsupported);
        }
        let vmid = guest.get();
        self.submit_plan(|_, emit| {
            emit(match asid {
                Some(asid) => Command::Stage1Space { vmid, asid },
                None => Command::Stage1 { vmid },
            });
        })
    }

    /// Submits the invalidation of the context descriptor of a device, for a guest that changed it.
    ///
    /// # Errors
    /// As for [`submit_all`](Self::submit_all), and [`InvalidationError::Unsupported`] if no stage
    /// 1 of a guest translates for `device`.
    pub fn submit_guest_context(
        &mut self,
        device: RequesterId,
    ) -> Result<Ticket, InvalidationError> {
        let found = self.attachments.devices.get(&device);
        let nested = found.filter(|device| device.is_nested());
        let stream = nested.ok_or(InvalidationError::Unsupported)?.stream;
        self.submit_plan(|_, emit| emit(Command::Context { stream }))
    }

    /// Returns the error at which the command queue has stopped; `None` if it runs.
    pub fn command_error(&self) -> Option<CommandError> {
        let has_stopped = self.errors.has_stopped(&self.registers);
        has_stopped.then(|| self.commands.error(&self.registers))
    }

    /// Restarts the command queue after an error or a time-out, and submits the invalidation of
    /// all caches. Its completion completes all earlier tickets, whose commands may be lost.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`] if the queue does not stop or start.
    pub fn recover(&mut self) -> Result<Ticket, UnitError> {
        let polls = self.options.poll_limit;
        write_cr0(&self.registers, self.control & !CR0_CMDQEN, polls)?;
        self.commands.restart(&self.registers);
        self.errors.acknowledge_commands(&self.registers);
        write_cr0(&self.registers, self.control, polls)?;
        let ticket = self.submit_everything()?;
        self.commands.recover_at(ticket.get());
        Ok(ticket)
    }

    /// Submits the commands of `plan`, if need be after earlier ones, and waits for their
    /// completion. The wait is bounded by the limit of polls without progress.
    pub(crate) fn complete(
        &mut self,
        plan: impl Fn(&Planner<'_>, Emit<'_>),
    ) -> Result<(), InvalidationError> {
        let ticket = match self.submit_plan(&plan) {
            Err(InvalidationError::QueueFull) => {
                self.wait(Ticket::new(self.commands.produced()))?;
                self.submit_plan(&plan)?
            }
            submitted => submitted?,
        };
        self.wait(ticket)
    }

    fn planner(&self) -> Planner<'_> {
        Planner {
            unit: &self.capabilities,
            attachments: &self.attachments,
            page_commands: self.options.page_commands,
        }
    }

    /// Returns the number of commands of a plan with its `CMD_SYNC`.
    fn count(&self, plan: impl Fn(&Planner<'_>, Emit<'_>)) -> u64 {
        let mut count = 1_u64;
        plan(&self.planner(), &mut |_| count = count.saturating_add(1));
        count
    }

    /// Writes the commands of a plan and a `CMD_SYNC`, and tells the unit. A plan that exceeds the
    /// whole queue is replaced by the invalidation of everything, which needs fewer commands.
    fn submit_plan(
        &mut self,
        plan: impl Fn(&Planner<'_>, Emit<'_>),
    ) -> Result<Ticket, InvalidationError> {
        match self.count(&plan) {
            needed if needed <= u64::from(self.commands.capacity()) => self.write(plan, needed),
            _ => self.submit_everything(),
        }
    }

    /// Submits the invalidation of everything that the unit caches.
    pub(crate) fn submit_everything(&mut self) -> Result<Ticket, InvalidationError> {
        let plan = |_: &Planner<'_>, emit: Emit<'_>| Planner::everything(emit);
        self.write(plan, self.count(plan))
    }

    /// Writes the `needed` commands of a plan with its `CMD_SYNC`, and tells the unit.
    fn write(
        &mut self,
        plan: impl Fn(&Planner<'_>, Emit<'_>),
        needed: u64,
    ) -> Result<Ticket, InvalidationError> {
        if self.commands.failed {
            return Err(InvalidationError::Failed);
        }
        self.reserve(needed)?;
        let begin = self.commands.produced();
        let planner = Planner {
            unit: &self.capabilities,
            attachments: &self.attachments,
            page_commands: self.options.page_commands,
        };
        let memory = tables(&self.memory, &self.capabilities);
        let queue = &mut self.commands;
        let mut pushed = Ok(());
        let mut push = |command: Command| {
            if pushed.is_ok() {
                pushed = queue.push(&memory, command.encode());
            }
        };
        plan(&planner, &mut push);
        push(Command::Sync);
        if pushed.is_err() {
            self.commands.withdraw(begin);
            return Err(InvalidationError::Failed);
        }
        self.commands.write_prod(&self.registers);
        Ok(Ticket::new(self.commands.produced()))
    }

    /// Makes sure that the queue has `needed` free entries.
    fn reserve(&mut self, needed: u64) -> Result<(), InvalidationError> {
        if self.commands.free() >= needed {
            return Ok(());
        }
        self.commands.read_consumed(&self.registers);
        match self.commands.free() >= needed {
            _ if self.commands.failed => Err(InvalidationError::Failed),
            true => Ok(()),
            false => Err(InvalidationError::QueueFull),
        }
    }
}

impl<R: Registers, M: PhysMemory, S: FrameSource> Invalidator for Unit<R, M, S> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.submit_all(&[request])
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        let position = ticket.get();
        if !self.commands.is_submitted(position) {
            return Err(InvalidationError::Failed);
        }
        if self.commands.is_complete(position) {
            return Ok(true);
        }
        if !self.commands.failed {
            self.commands.read_consumed(&self.registers);
        }
        if self.commands.is_complete(position) {
            return Ok(true);
        }
        let stalled = self.commands.stalled;
        // A unit at an error does not consume the command, and does not move on.
        let look = stalled.is_multiple_of(POLLS_PER_STATUS);
        if look && self.errors.has_stopped(&self.registers) {
            self.commands.failed = true;
        }
        if self.commands.failed {
            return Err(InvalidationError::Failed);
        }
        if stalled >= self.options.poll_limit {
            return Err(InvalidationError::TimedOut);
        }
        self.commands.stalled = stalled.saturating_add(1);
        Ok(false)
    }
}
