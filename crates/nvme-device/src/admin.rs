//! Admin commands (base specification, section 5).

use ringfence_types::Iova;

use crate::command::{Entry, RawCommand};
use crate::controller::{CommandKind, Controller, Outcome};
use crate::event::ERROR_ENTRY_BYTES;
use crate::prp::{scatter, segments};
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::{Medium, Memory, NvmeStatus, PAGE_BYTES, identify};

/// Opcodes (Figure 139).
mod opcode {
    pub(super) const DELETE_SUBMISSION: u8 = 0x00;
    pub(super) const CREATE_SUBMISSION: u8 = 0x01;
    pub(super) const GET_LOG_PAGE: u8 = 0x02;
    pub(super) const DELETE_COMPLETION: u8 = 0x04;
    pub(super) const CREATE_COMPLETION: u8 = 0x05;
    pub(super) const IDENTIFY: u8 = 0x06;
    pub(super) const ABORT: u8 = 0x08;
    pub(super) const SET_FEATURES: u8 = 0x09;
    pub(super) const GET_FEATURES: u8 = 0x0a;
    pub(super) const ASYNC_EVENT: u8 = 0x0c;
}

/// Bytes of the log pages of health and firmware.
const LOG_BYTES: usize = 512;
const LOG_ERROR: u8 = 0x01;
const LOG_HEALTH: u8 = 0x02;
const LOG_FIRMWARE: u8 = 0x03;
/// Retain Asynchronous Event (Get Log Page, dword 10).
const RETAIN_EVENT: u32 = 1 << 15;
/// Physically Contiguous (Create I/O queue, dword 11).
const CONTIGUOUS: u32 = 1;
/// Interrupts Enabled (Create I/O Completion Queue, dword 11).
const INTERRUPTS: u32 = 1 << 1;
/// Result of Abort: the command was not aborted.
const NOT_ABORTED: u32 = 1;
/// Identifier of the admin queues.
const ADMIN: u16 = 0;

impl Controller {
    pub(crate) fn execute_admin(
        &mut self,
        raw: &RawCommand,
        memory: &mut impl Memory,
        medium: &mut impl Medium,
    ) -> Outcome {
        let entry = Entry(raw);
        let result = match entry.opcode() {
            _ if entry.is_unsupported() => Err(NvmeStatus::InvalidField),
            opcode::DELETE_SUBMISSION => self.delete_submission(entry),
            opcode::CREATE_SUBMISSION => self.create_submission(entry),
            opcode::GET_LOG_PAGE => self.log_page(entry, memory),
            opcode::DELETE_COMPLETION => self.delete_completion(entry),
            opcode::CREATE_COMPLETION => self.create_completion(entry),
            opcode::IDENTIFY => self.identify(entry, memory),
            opcode::ABORT => Ok(self.abort(entry)),
            opcode::SET_FEATURES => self.set_feature(entry, medium),
            opcode::GET_FEATURES => self.features.get(entry.dword(10), entry.dword(11)),
            opcode::ASYNC_EVENT => match self.events.request(entry.id()) {
                true => return Outcome::deferred(CommandKind::Admin),
                false => Err(NvmeStatus::EventLimitExceeded),
            },
            _ => Err(NvmeStatus::InvalidOpcode),
        };
        Outcome::new(CommandKind::Admin, result.map(|result| (result, 0)))
    }

    /// Create I/O Completion Queue (section 5.3).
    fn create_completion(&mut self, entry: Entry<'_>) -> Result<u32, NvmeStatus> {
        let number = self.new_queue(entry, |controller, queue| {
            controller.completion(queue).is_some()
        })?;
        let (base, entries) = self.ring(entry)?;
        let flags = entry.dword(11);
        let vector = (flags >> 16) as u16;
        let has_interrupts = flags & INTERRUPTS != 0;
        if has_interrupts && vector >= self.config.vectors() {
            return Err(NvmeStatus::InvalidInterruptVector);
        }
        let queue = CompletionQueue::new(base, entries, has_interrupts.then_some(vector));
        if let Some(slot) = self.completions.get_mut(usize::from(number)) {
            *slot = Some(queue);
        }
        Ok(0)
    }

    /// Create I/O Submission Queue (section 5.4).
    fn create_submission(&mut self, entry: Entry<'_>) -> Result<u32, NvmeStatus> {
        let number = self.new_queue(entry, |controller, queue| {
            controller.submission(queue).is_some()
        })?;
        let completions = (entry.dword(11) >> 16) as u16;
        // The admin completion queue is only for the admin queue.
        if completions == ADMIN || self.completion(completions).is_none() {
            return Err(NvmeStatus::CompletionQueueInvalid);
        }
        let (base, entries) = self.ring(entry)?;
        let queue = SubmissionQueue::new(base, entries, completions);
        if let Some(slot) = self.submissions.get_mut(usize::from(number)) {
            *slot = Some(queue);
        }
        Ok(0)
    }

    /// Returns the identifier of a queue that does not exist yet.
    fn new_queue(
        &self,
        entry: Entry<'_>,
        exists: impl FnOnce(&Self, u16) -> bool,
    ) -> Result<u16, NvmeStatus> {
        let number = entry.dword(10) as u16;
        if number == ADMIN || number > self.config.io_queues || exists(self, number) {
            return Err(NvmeStatus::InvalidQueueIdentifier);
        }
        Ok(number)
    }

    /// Returns the address and the number of entries of a new queue.
    fn ring(&self, entry: Entry<'_>) -> Result<(Iova, u32), NvmeStatus> {
        let entries = (entry.dword(10) >> 16) + 1;
        if entries < 2 || entries > u32::from(self.config.queue_entries) {
            return Err(NvmeStatus::InvalidQueueSize);
        }
        // `CAP.CQR`.
        if entry.dword(11) & CONTIGUOUS == 0 {
            return Err(NvmeStatus::InvalidField);
        }
        let [base, _] = entry.prps();
        if !base.is_aligned(PAGE_BYTES) {
            return Err(NvmeStatus::PrpOffsetInvalid);
        }
        Ok((base, entries))
    }

    /// Delete I/O Submission Queue (section 5.6). Commands that the queue still holds are not
    /// executed.
    fn delete_submission(&mut self, entry: Entry<'_>) -> Result<u32, NvmeStatus> {
        let number = entry.dword(10) as u16;
        let slot = self.submissions.get_mut(usize::from(number));
        match slot {
            Some(slot @ Some(_)) if number != ADMIN => *slot = None,
            _ => return Err(NvmeStatus::InvalidQueueIdentifier),
        }
        Ok(0)
    }

    /// Delete I/O Completion Queue (section 5.5).
    fn delete_completion(&mut self, entry: Entry<'_>) -> Result<u32, NvmeStatus> {
        let number = entry.dword(10) as u16;
        let mut users = self.submissions.iter().flatten();
        let is_used = users.any(|queue| queue.completions == number);
        let slot = self.completions.get_mut(usize::from(number));
        match slot {
            Some(Some(_)) if number != ADMIN && is_used => Err(NvmeStatus::InvalidQueueDeletion),
            Some(slot @ Some(_)) if number != ADMIN => {
                *slot = None;
                Ok(0)
            }
            _ => Err(NvmeStatus::InvalidQueueIdentifier),
        }
    }

    /// Identify (section 5.15).
    fn identify(&self, entry: Entry<'_>, memory: &mut impl Memory) -> Result<u32, NvmeStatus> {
        let data = identify::data(&self.config, entry.dword(10) as u8, entry.namespace())?;
        let buffers = segments(memory, entry.prps(), data.len() as u64)?;
        scatter(memory, &buffers, &data)?;
        Ok(0)
    }

    /// Get Log Page (section 5.14). The bytes behind the end of a page are zero.
    fn log_page(&mut self, entry: Entry<'_>, memory: &mut impl Memory) -> Result<u32, NvmeStatus> {
        let [low, high] = [entry.dword(10), entry.dword(11)];
        let words = u64::from(high & 0xffff) << 16 | u64::from(low >> 16);
        let bytes = (words + 1) * 4;
        let offset = u64::from(entry.dword(13)) << 32 | u64::from(entry.dword(12));
        let mut page = [0; LOG_BYTES];
        let length = match low as u8 {
            LOG_ERROR => {
                let (first, _) = page.split_at_mut(ERROR_ENTRY_BYTES);
                first.copy_from_slice(&self.events.log());
                ERROR_ENTRY_BYTES
            }
            LOG_HEALTH => {
                // Temperature in Kelvin, and spare capacity with its threshold in percent.
                page[1..5].copy_from_slice(&[0x36, 0x01, 100, 10]);
                LOG_BYTES
            }
            LOG_FIRMWARE => {
                // Slot 1 is active.
                page[0] = 1;
                page[8] = b'1';
                LOG_BYTES
            }
            _ => return Err(NvmeStatus::InvalidLogPage),
        };
        let is_valid = offset.is_multiple_of(4) && offset <= length as u64;
        if !is_valid || bytes > self.config.transfer_bytes() {
            return Err(NvmeStatus::InvalidField);
        }
        let buffers = segments(memory, entry.prps(), bytes)?;
        let mut data = alloc::vec![0; bytes as usize];
        let content = page.get(offset as usize..length).unwrap_or_default();
        for (to, from) in data.iter_mut().zip(content) {
            *to = *from;
        }
        scatter(memory, &buffers, &data)?;
        if low as u8 == LOG_ERROR && low & RETAIN_EVENT == 0 {
            self.events.unmask();
        }
        Ok(0)
    }

    /// Abort (section 5.1). Every other command has completed before the controller fetches this
    /// one.
    fn abort(&mut self, entry: Entry<'_>) -> u32 {
        let [queue, id] = [entry.dword(10), entry.dword(10) >> 16].map(|word| word as u16);
        let is_aborted = queue == ADMIN && self.events.abort(id);
        if is_aborted {
            self.aborted.push(id);
            return 0;
        }
        NOT_ABORTED
    }

    /// Set Features (section 5.21). If the command clears Volatile Write Cache Enable, completed
    /// writes become durable before it completes: without a cache, the host sends no flush.
    fn set_feature(
        &mut self,
        entry: Entry<'_>,
        medium: &mut impl Medium,
    ) -> Result<u32, NvmeStatus> {
        let has_queues = self.completions.iter().skip(1).flatten().next().is_some();
        let mut features = self.features.clone();
        let result = features.set(entry.dword(10), entry.dword(11), has_queues)?;
        if self.features.has_write_cache() && !features.has_write_cache() {
            medium.flush().map_err(|_| NvmeStatus::WriteFault)?;
        }
        self.features = features;
        Ok(result)
    }
}
