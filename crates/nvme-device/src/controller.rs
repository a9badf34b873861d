//! The controller: registers, doorbells, reset and shutdown, and one command at a time.

use alloc::vec::Vec;

use ringfence_types::Iova;

use crate::command::{COMMAND_BYTES, COMPLETION_BYTES, Entry, NvmeCompletion, RawCompletion};
use crate::event::{ErrorEvent, Events};
use crate::features::Features;
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::register::{self, CC_ENABLE, CC_SHUTDOWN, CSTS_FATAL, CSTS_READY, CSTS_SHUTDOWN};
use crate::{Blocked, Config, Medium, MediumError, Memory, NvmeStatus, PAGE_BYTES};

/// Kind of an executed command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandKind {
    /// An admin command.
    Admin,
    /// A read command.
    Read,
    /// A write command.
    Write,
    /// A flush command.
    Flush,
    /// An I/O command with an unknown opcode.
    Other,
}

/// A command that the controller has executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Executed {
    /// Kind of the command.
    pub kind: CommandKind,
    /// Bytes of the blocks that it transferred.
    pub bytes: u64,
    /// Status of the command.
    pub status: NvmeStatus,
}

/// Result of [`Controller::step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There is nothing to do until the host writes a register.
    Idle,
    /// The controller executed a command.
    Executed(Executed),
    /// The controller completed an asynchronous event request.
    Event,
    /// The controller has set `CSTS.CFS`.
    Failed(FatalError),
}

/// The enabled controller had a value that it does not support.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartError {
    /// `CC` selects another command set, page size, arbitration or entry size.
    Configuration(u32),
    /// `AQA` has a size of one entry.
    QueueSize(u32),
    /// `ASQ` or `ACQ` is not aligned to a page.
    Base(Iova),
}

/// Reason why the controller has set `CSTS.CFS`. It executes nothing until the host resets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FatalError {
    /// A command could not be fetched from a submission queue.
    Fetch {
        /// Identifier of the queue.
        queue: u16,
        /// Address of the entry; `None` beyond the address space.
        at: Option<Iova>,
    },
    /// A completion could not be written to a completion queue.
    Complete {
        /// Identifier of the queue.
        queue: u16,
        /// Address of the entry; `None` beyond the address space.
        at: Option<Iova>,
    },
    /// The controller was enabled with a wrong configuration.
    Start(StartError),
    /// The medium could not be flushed at a shutdown: completed writes may be lost.
    Shutdown(MediumError),
}

impl core::fmt::Display for FatalError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let at = |at: &Option<Iova>| at.map_or(u64::MAX, |at| at.get());
        match self {
            Self::Fetch { queue, at: entry } => {
                write!(f, "submission queue {queue}: no access to {:#x}", at(entry))
            }
            Self::Complete { queue, at: entry } => {
                write!(f, "completion queue {queue}: no access to {:#x}", at(entry))
            }
            Self::Start(StartError::Configuration(cc)) => {
                write!(f, "unsupported controller configuration {cc:#x}")
            }
            Self::Start(StartError::QueueSize(aqa)) => {
                write!(f, "unsupported sizes of the admin queues {aqa:#x}")
            }
            Self::Start(StartError::Base(base)) => {
                write!(f, "admin queue at {:#x}: not aligned to a page", base.get())
            }
            Self::Shutdown(MediumError) => {
                f.write_str("shutdown: the medium could not be flushed; writes may be lost")
            }
        }
    }
}

impl core::error::Error for FatalError {}

/// Result of a command: its kind, and `None` if it completes later.
pub(crate) struct Outcome {
    kind: CommandKind,
    /// Result of the command and transferred bytes.
    completed: Option<Result<(u32, u64), NvmeStatus>>,
}

impl Outcome {
    pub(crate) const fn new(kind: CommandKind, result: Result<(u32, u64), NvmeStatus>) -> Self {
        Self {
            kind,
            completed: Some(result),
        }
    }

    pub(crate) const fn deferred(kind: CommandKind) -> Self {
        Self {
            kind,
            completed: None,
        }
    }
}

/// An NVMe controller with one namespace.
///
/// It executes commands one after another, so no command is in flight between two calls.
#[derive(Clone, Debug)]
pub struct Controller {
    pub(crate) config: Config,
    cc: u32,
    csts: u32,
    aqa: u32,
    asq: u64,
    acq: u64,
    /// By identifier; 0 is the admin queue.
    pub(crate) submissions: Vec<Option<SubmissionQueue>>,
    pub(crate) completions: Vec<Option<CompletionQueue>>,
    pub(crate) features: Features,
    pub(crate) events: Events,
    /// Aborted event requests that are not completed yet.
    pub(crate) aborted: Vec<u16>,
    /// Submission queue that comes first in the next step.
    turn: usize,
    /// Interrupt vectors that are due, a bit each.
    due: u32,
    failure: Option<FatalError>,
    /// Data of the command that is executed.
    pub(crate) buffer: Vec<u8>,
}

impl Controller {
    /// Creates a controller in its state after power-on. Parameters beyond their bounds are
    /// replaced by the nearest bound.
    pub fn new(config: &Config) -> Self {
        let config = config.bounded();
        Self {
            config,
            cc: 0,
            csts: 0,
            aqa: 0,
            asq: 0,
            acq: 0,
            submissions: Vec::new(),
            completions: Vec::new(),
            features: Features::new(config.io_queues),
            events: Events::default(),
            aborted: Vec::new(),
            turn: 0,
            due: 0,
            failure: None,
            buffer: Vec::new(),
        }
    }

    /// Returns the parameters within their bounds.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns to the state after power-on.
    pub fn reset(&mut self) {
        *self = Self::new(&self.config);
    }

    /// Reads `bytes` bytes, 4 or 8, at `offset` of the BAR. Other accesses, and reads of doorbells
    /// and reserved registers, return 0.
    pub fn read(&self, offset: u64, bytes: u64) -> u64 {
        match (offset % 8, bytes) {
            (0, 8) => {
                u64::from(self.read_half(offset + 4)) << 32 | u64::from(self.read_half(offset))
            }
            (0 | 4, 4) => self.read_half(offset).into(),
            _ => 0,
        }
    }

    fn read_half(&self, offset: u64) -> u32 {
        let high = |value: u64| (value >> 32) as u32;
        let capabilities = register::capabilities(self.config.queue_entries);
        match offset {
            register::CAP => capabilities as u32,
            0x04 => high(capabilities),
            register::VS => register::VERSION,
            register::CC => self.cc,
            register::CSTS => self.csts,
            register::AQA => self.aqa,
            register::ASQ => self.asq as u32,
            0x2c => high(self.asq),
            register::ACQ => self.acq as u32,
            0x34 => high(self.acq),
            _ => 0,
        }
    }

    /// Writes `bytes` bytes, 4 or 8, at `offset` of the BAR. Ignores other accesses. A shutdown
    /// flushes the medium.
    pub fn write(&mut self, offset: u64, bytes: u64, value: u64, medium: &mut impl Medium) {
        match (offset % 8, bytes) {
            (0, 8) => {
                self.write_half(offset, value as u32, medium);
                self.write_half(offset + 4, (value >> 32) as u32, medium);
            }
            (0 | 4, 4) => self.write_half(offset, value as u32, medium),
            _ => {}
        }
    }

    fn write_half(&mut self, offset: u64, value: u32, medium: &mut impl Medium) {
        let low = |old: u64| old & !0xffff_ffff | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        match offset {
            register::CC => self.configure(value & register::CC_DEFINED, medium),
            register::AQA => self.aqa = value & register::AQA_DEFINED,
            register::ASQ => self.asq = low(self.asq),
            0x2c => self.asq = high(self.asq),
            register::ACQ => self.acq = low(self.acq),
            0x34 => self.acq = high(self.acq),
            register::DOORBELLS.. => self.doorbell(offset - register::DOORBELLS, value),
            _ => {}
        }
    }

    fn configure(&mut self, cc: u32, medium: &mut impl Medium) {
        let changed = self.cc ^ cc;
        self.cc = cc;
        if changed & CC_ENABLE != 0 {
            self.clear();
            if cc & CC_ENABLE != 0 {
                match self.start() {
                    Ok(()) => self.csts |= CSTS_READY,
                    Err(error) => self.fail(FatalError::Start(error)),
                }
            }
        }
        // Section 3.1.5, `SHN`: a notification while the controller is enabled, or after.
        if changed & CC_SHUTDOWN != 0 {
            self.csts &= !CSTS_SHUTDOWN;
            if cc & CC_SHUTDOWN != 0 {
                if let Err(error) = medium.flush() {
                    self.fail(FatalError::Shutdown(error));
                }
                // The shutdown is complete in any case, so that the driver does not wait.
                self.csts |= register::CSTS_SHUTDOWN_COMPLETE;
            }
        }
    }

    /// Controller reset (section 7.3.2): deletes all queues. The registers of the admin queues and
    /// `CC` keep their values.
    fn clear(&mut self) {
        *self = Self {
            cc: self.cc,
            aqa: self.aqa,
            asq: self.asq,
            acq: self.acq,
            ..Self::new(&self.config)
        };
    }

    /// Creates the admin queues.
    fn start(&mut self) -> Result<(), StartError> {
        if self.cc & register::CC_FIXED_MASK != register::CC_FIXED {
            return Err(StartError::Configuration(self.cc));
        }
        let sizes = [self.aqa, self.aqa >> 16].map(|size| (size & 0xfff) + 1);
        if sizes.iter().any(|size| *size < 2) {
            return Err(StartError::QueueSize(self.aqa));
        }
        let bases = [self.asq, self.acq].map(Iova::new);
        if let Some(base) = bases.into_iter().find(|base| !base.is_aligned(PAGE_BYTES)) {
            return Err(StartError::Base(base));
        }
        let ([asq, acq], [submissions, completions]) = (bases, sizes);
        let queues = usize::from(self.config.io_queues) + 1;
        self.submissions.resize(queues, None);
        self.completions.resize(queues, None);
        self.submissions[0] = Some(SubmissionQueue::new(asq, submissions, 0));
        self.completions[0] = Some(CompletionQueue::new(acq, completions, Some(0)));
        Ok(())
    }

    fn fail(&mut self, error: FatalError) {
        self.csts |= CSTS_FATAL;
        self.failure = Some(error);
    }

    /// Writes a doorbell (section 3.1.16).
    fn doorbell(&mut self, offset: u64, value: u32) {
        if self.csts & CSTS_READY == 0 {
            return;
        }
        let index = offset / 4;
        let queue = (index / 2).min(u64::from(u16::MAX)) as u16;
        let at = usize::from(queue);
        let value = value & 0xffff;
        let is_valid = if index.is_multiple_of(2) {
            let queue = self.submissions.get_mut(at).and_then(Option::as_mut);
            queue.map(|queue| queue.set_tail(value))
        } else {
            let queue = self.completions.get_mut(at).and_then(Option::as_mut);
            queue.map(|queue| queue.set_head(value))
        };
        match is_valid {
            Some(true) => {}
            Some(false) => self.events.error(ErrorEvent::InvalidDoorbellValue, queue),
            None => self
                .events
                .error(ErrorEvent::InvalidDoorbellRegister, queue),
        }
    }

    /// Returns the vectors whose interrupts are due, a bit each.
    pub fn take_interrupts(&mut self) -> u32 {
        core::mem::take(&mut self.due)
    }

    /// Executes at most one command.
    pub fn step(&mut self, memory: &mut impl Memory, medium: &mut impl Medium) -> Step {
        let step = self
            .failure
            .take()
            .map_or_else(|| self.try_step(memory, medium), Err);
        step.unwrap_or_else(|error| {
            self.csts |= CSTS_FATAL;
            Step::Failed(error)
        })
    }

    fn try_step(
        &mut self,
        memory: &mut impl Memory,
        medium: &mut impl Medium,
    ) -> Result<Step, FatalError> {
        if self.csts & (CSTS_READY | CSTS_FATAL | CSTS_SHUTDOWN) != CSTS_READY {
            return Ok(Step::Idle);
        }
        if self.report_event(memory)? {
            return Ok(Step::Event);
        }
        let Some(number) = self.next_queue() else {
            return Ok(Step::Idle);
        };
        let mut raw = [0; COMMAND_BYTES];
        let Some(queue) = self
            .submissions
            .get_mut(usize::from(number))
            .and_then(Option::as_mut)
        else {
            return Ok(Step::Idle);
        };
        let at = queue.front();
        if at.is_none_or(|at| memory.read(at, &mut raw).is_err()) {
            return Err(FatalError::Fetch { queue: number, at });
        }
        queue.advance();
        let (head, completions) = (queue.head(), queue.completions);
        let outcome = match number {
            0 => self.execute_admin(&raw, memory, medium),
            _ => self.execute_nvm(&raw, memory, medium),
        };
        let mut executed = Executed {
            kind: outcome.kind,
            bytes: 0,
            status: NvmeStatus::Success,
        };
        let mut result = 0;
        match outcome.completed {
            None => return Ok(Step::Executed(executed)),
            Some(Ok((value, bytes))) => (result, executed.bytes) = (value, bytes),
            Some(Err(status)) => executed.status = status,
        }
        let completion = NvmeCompletion {
            result,
            head,
            queue: number,
            id: Entry(&raw).id(),
            status: executed.status.field(),
        };
        self.complete(completions, &completion, memory)?;
        Ok(Step::Executed(executed))
    }

    /// Returns a submission queue with a command, whose completion queue has room. The queues take
    /// turns (section 4.13.1).
    fn next_queue(&mut self) -> Option<u16> {
        let count = self.submissions.len();
        let turns = (0..count).map(|offset| (self.turn + offset) % count);
        let found = turns.into_iter().find(|at| {
            let queue = self.submissions.get(*at).and_then(Option::as_ref);
            queue.is_some_and(|queue| !queue.is_empty() && self.has_room(queue.completions))
        })?;
        self.turn = (found + 1) % count;
        u16::try_from(found).ok()
    }

    fn has_room(&self, completions: u16) -> bool {
        self.completion(completions)
            .is_some_and(|queue| !queue.is_full())
    }

    /// Completes an event request, if one is due. Returns false if none is.
    fn report_event(&mut self, memory: &mut impl Memory) -> Result<bool, FatalError> {
        if !self.has_room(0) {
            return Ok(false);
        }
        let (id, result, status) = if let Some(id) = self.aborted.pop() {
            (id, 0, NvmeStatus::AbortRequested)
        } else if let Some((id, result)) = self.events.take() {
            (id, result, NvmeStatus::Success)
        } else {
            return Ok(false);
        };
        let completion = NvmeCompletion {
            result,
            head: self.submission(0).map_or(0, SubmissionQueue::head),
            queue: 0,
            id,
            status: status.field(),
        };
        self.complete(0, &completion, memory)?;
        Ok(true)
    }

    /// Writes a completion to a queue that has room.
    fn complete(
        &mut self,
        number: u16,
        completion: &NvmeCompletion,
        memory: &mut impl Memory,
    ) -> Result<(), FatalError> {
        let queue = self.completions.get_mut(usize::from(number));
        let Some(queue) = queue.and_then(Option::as_mut) else {
            return Ok(());
        };
        let at = queue.back();
        let raw = queue.encode(completion);
        if write_completion(memory, at, &raw).is_err() {
            return Err(FatalError::Complete { queue: number, at });
        }
        queue.advance();
        if let Some(vector) = queue.vector {
            self.due |= 1u32.checked_shl(vector.into()).unwrap_or(0);
        }
        Ok(())
    }

    pub(crate) fn submission(&self, number: u16) -> Option<&SubmissionQueue> {
        self.submissions.get(usize::from(number))?.as_ref()
    }

    pub(crate) fn completion(&self, number: u16) -> Option<&CompletionQueue> {
        self.completions.get(usize::from(number))?.as_ref()
    }
}

/// Writes the half of a completion that has the phase tag (dword 3, section 4.6) after the other: a
/// host that sees the new phase sees the result.
fn write_completion(
    memory: &mut impl Memory,
    at: Option<Iova>,
    raw: &RawCompletion,
) -> Result<(), Blocked> {
    let (first, last) = raw.split_at(COMPLETION_BYTES / 2);
    let at = at.ok_or(Blocked)?;
    memory.write(at, first)?;
    memory.write(at.checked_add(first.len() as u64).ok_or(Blocked)?, last)
}
