//! Submission and completion of invalidations.

use ringfence_types::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, PfnRange, PhysMemory,
    Registers, RequesterId, Ticket,
};

use crate::command::{Addresses, Command};
use crate::error::UnitError;
use crate::invalidate::{Emit, Planner, device_tlb};
use crate::options::Interrupts;
use crate::page_request::{PageRequest, PageResponse};
use crate::registers::{ABSENT, CQCSR, CQCSR_ERRORS, CSR_ON};
use crate::translation::check_space;
use crate::unit::{Unit, tables};

/// Polls between two reads of `cqcsr`, which take longer than reads of memory.
const POLLS_PER_STATUS: u32 = 16;

impl<R: Registers, M: PhysMemory> Unit<R, M> {
    /// Submits `requests` as one burst, with one completion and one doorbell.
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
        let needed = self.count(|planner, emit| planner.burst(requests, emit));
        if needed <= self.commands.capacity() {
            return self.submit_plan(|planner, emit| planner.burst(requests, emit));
        }
        // A burst that exceeds the whole queue invalidates more with fewer commands.
        let is_context = |request: &Invalidation| matches!(request, Invalidation::Context(_));
        let contexts = requests.iter().any(is_context);
        self.submit_plan(|planner, emit| match contexts {
            true => planner.everything(emit),
            false => planner.burst(&[Invalidation::Global], emit),
        })
    }

    /// Submits the invalidation of first-stage entries under the second stage of `guest`, for a
    /// guest that changed its table: all entries, or those of one address space (PSCID), and of
    /// all addresses or of a range of guest-virtual pages.
    ///
    /// # Errors
    /// As for [`submit_all`](Self::submit_all), and [`InvalidationError::Unsupported`] if `space`
    /// has more than 20 bits.
    pub fn submit_guest_first_stage(
        &mut self,
        guest: DomainId,
        space: Option<u32>,
        range: Option<PfnRange>,
        levels: CachedLevels,
    ) -> Result<Ticket, InvalidationError> {
        check_id(space.unwrap_or(0))?;
        let part = range.map(|range| (range, levels));
        let needed = self.count(|planner, emit| planner.guest_tables(guest, space, part, emit));
        // A range that exceeds the whole queue becomes all addresses: one command.
        let part = part.filter(|_| needed <= self.commands.capacity());
        self.submit_plan(|planner, emit| planner.guest_tables(guest, space, part, emit))
    }

    /// Submits the invalidation of a process context of a guest's process directory. Translations
    /// by the old context stay cached: the caller also submits
    /// [`submit_guest_first_stage`](Self::submit_guest_first_stage) for its PSCID.
    ///
    /// # Errors
    /// As for [`submit_all`](Self::submit_all), and [`InvalidationError::Unsupported`] if the
    /// directory of devices does not reach `device`, or no process directory of the unit reaches
    /// `process`.
    pub fn submit_guest_process(
        &mut self,
        device: RequesterId,
        process: u32,
    ) -> Result<Ticket, InvalidationError> {
        // The unit would stop at the command.
        if process >> self.capabilities.process_id_bits() != 0 {
            return Err(InvalidationError::Unsupported);
        }
        let id = self.device_id(device);
        let device = id.map_err(|_| InvalidationError::Unsupported)?;
        self.submit_plan(|_, emit| emit(Command::ProcessContext { device, process }))
    }

    /// Submits the response to the group of a page request.
    ///
    /// # Errors
    /// As for [`submit_all`](Self::submit_all), and [`InvalidationError::Unsupported`] if the unit
    /// has no page-request queue.
    pub fn respond(
        &mut self,
        request: &PageRequest,
        response: PageResponse,
    ) -> Result<Ticket, InvalidationError> {
        if self.page_requests.is_none() {
            return Err(InvalidationError::Unsupported);
        }
        let device = self.attachments.devices.get(&request.requester());
        let tagged = device.and_then(|device| device.ats);
        let tagged = tagged.is_some_and(|ats| ats.response_process);
        let command = Command::PageResponse {
            device: request.device_id,
            process: request.process.filter(|_| tagged),
            group: request.group,
            code: response as u8,
        };
        self.submit_plan(|_, emit| emit(command))
    }

    /// Restarts the command queue after an error or a time-out, and submits the invalidation of
    /// all caches. Its completion completes all earlier tickets, whose commands may be lost.
    ///
    /// A device that does not answer the invalidation of its TLB stops the queue again at each
    /// recovery. [`detach`](Self::detach) it and recover once more.
    ///
    /// # Errors
    /// [`UnitError::TimedOut`] or [`UnitError::Rejected`] if the queue does not stop or start,
    /// [`UnitError::Invalidation`] if the commands cannot be submitted. Submissions then fail until
    /// a later call succeeds.
    pub fn recover(&mut self) -> Result<Ticket, UnitError> {
        // The restart discards the earlier commands. Before the invalidation of all caches, no
        // other burst may be submitted: its completion would complete their tickets.
        self.completion.failed = true;
        let polls = self.options.poll_limit;
        self.commands.disable(&self.registers, polls)?;
        // Enabling clears cqh and the error bits.
        self.commands.enable(&self.registers, polls)?;
        self.completion.failed = false;
        self.completion.stalled = 0;
        let submitted = self.submit_everything();
        self.completion.failed = submitted.is_err();
        Ok(submitted?)
    }

    pub(crate) fn submit_everything(&mut self) -> Result<Ticket, InvalidationError> {
        self.submit_plan(|planner, emit| planner.everything(emit))
    }

    /// Returns the number of commands of a plan with its completion.
    pub(crate) fn count(&self, plan: impl Fn(&Planner<'_>, Emit<'_>)) -> u32 {
        let mut count = 1_u32;
        plan(&self.planner(), &mut |_| count = count.saturating_add(1));
        count
    }

    /// Writes the commands of a plan and their completion, and rings the doorbell.
    pub(crate) fn submit_plan(
        &mut self,
        plan: impl Fn(&Planner<'_>, Emit<'_>),
    ) -> Result<Ticket, InvalidationError> {
        if self.completion.failed {
            return Err(InvalidationError::Failed);
        }
        let needed = self.count(&plan);
        self.reserve(needed)?;
        let planner = Planner {
            unit: &self.capabilities,
            attachments: &self.attachments,
            page_commands: self.options.page_commands,
        };
        let tables = tables(&self.memory, &self.options);
        let segments = self.options.segments();
        let begin = self.commands.index;
        let mut pushed = Ok(());
        let queue = &mut self.commands;
        let mut push = |command: Command| {
            if pushed.is_ok() {
                pushed = queue.push(&tables, command.encode(segments));
            }
        };
        plan(&planner, &mut push);
        push(Command::Completion {
            at: self.completion.word,
            data: self.completion.bursts.next() as u32,
            interrupt: self.options.interrupts == Interrupts::Wired,
        });
        if pushed.is_err() {
            // The unit has not seen the index: nothing was submitted.
            self.commands.index = begin;
            return Err(InvalidationError::Failed);
        }
        self.commands.ring(&self.registers);
        Ok(self.completion.bursts.submit())
    }

    /// Makes sure that the queue has `needed` free entries.
    fn reserve(&mut self, needed: u32) -> Result<(), InvalidationError> {
        if self.commands.free() >= needed {
            return Ok(());
        }
        if self.commands.read_unit_index(&self.registers).is_none() {
            self.completion.failed = true;
            return Err(InvalidationError::Failed);
        }
        match self.commands.free() >= needed {
            true => Ok(()),
            false => Err(InvalidationError::QueueFull),
        }
    }

    /// Returns true if the command queue has stopped.
    fn has_stopped(&self) -> bool {
        let csr = self.registers.read32(CQCSR);
        csr == ABSENT || csr & CQCSR_ERRORS != 0 || csr & CSR_ON == 0
    }
}

impl Planner<'_> {
    /// Emits the invalidation of first-stage entries of `guest`, of `part` or of all addresses.
    fn guest_tables(
        &self,
        guest: DomainId,
        space: Option<u32>,
        part: Option<(PfnRange, CachedLevels)>,
        emit: Emit<'_>,
    ) {
        let mut command = |addresses| {
            emit(Command::FirstStage {
                guest: Some(guest.get()),
                space,
                addresses,
            });
        };
        match part {
            Some((range, levels)) => self.addresses(&range, levels, &mut command),
            None => command(Addresses::All),
        }
        self.guest_device_tlbs(guest, emit);
    }

    /// Emits the invalidation of the device TLBs of a guest's devices, after a fence.
    fn guest_device_tlbs(&self, guest: DomainId, emit: Emit<'_>) {
        if self.attachments.with_ats == 0 {
            return;
        }
        emit(Command::Fence);
        for device in self.attachments.devices.values() {
            if device.ats.is_some() && device.domain == guest && device.is_nested() {
                device_tlb(device, Some(guest), None, emit);
            }
        }
    }
}

/// Returns an error if a PSCID has more than 20 bits.
fn check_id(id: u32) -> Result<(), InvalidationError> {
    check_space(id).map_err(|_| InvalidationError::Unsupported)
}

impl<R: Registers, M: PhysMemory> Invalidator for Unit<R, M> {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.submit_all(&[request])
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if !self.completion.bursts.is_submitted(ticket) {
            return Err(InvalidationError::Failed);
        }
        if self.completion.is_complete(&self.memory, ticket) {
            return Ok(true);
        }
        let stalled = self.completion.stalled;
        let is_last = stalled >= self.options.poll_limit;
        let reads_status = is_last || stalled.is_multiple_of(POLLS_PER_STATUS);
        if !self.completion.failed && reads_status && self.has_stopped() {
            self.completion.failed = true;
        }
        if self.completion.failed {
            return Err(InvalidationError::Failed);
        }
        if is_last {
            return Err(InvalidationError::TimedOut);
        }
        self.completion.stalled = stalled.saturating_add(1);
        Ok(false)
    }
}
