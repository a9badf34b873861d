//! The controller's side of a queue pair.

use ringfence_types::{Iova, RequesterId};

use super::layout::{COMMAND_BYTES, LIST_ENTRIES, NvmeCommand, NvmeCompletion, NvmeStatus, Opcode};
use super::queue::NvmeAddresses;
use crate::block::{BLOCK_BYTES, PAGE_BYTES, RamDisk};
use crate::ring::CompletionWriter;
use crate::seed::Seed;
use crate::{DmaError, Transfer};

/// A controller with one queue pair in front of a disk. It fetches commands in order and executes
/// them in a random order, like flash behind several channels.
#[derive(Debug)]
pub struct NvmeController {
    id: RequesterId,
    at: NvmeAddresses,
    completions: CompletionWriter,
    head: u32,
    tail: u32,
    completion_head: u32,
    fetched: Vec<NvmeCommand>,
    seed: Seed,
}

impl NvmeController {
    /// Creates a controller with the queue pair at `at`.
    pub fn new(id: RequesterId, at: NvmeAddresses, seed: u64) -> Self {
        Self {
            id,
            completions: CompletionWriter::new(at.completions),
            at,
            head: 0,
            tail: 0,
            completion_head: 0,
            fetched: Vec::new(),
            seed: Seed::new(seed),
        }
    }

    /// Writes the submission queue's tail doorbell. Ignores a value beyond the queue (base
    /// specification: Invalid Doorbell Write Value).
    pub fn submission_doorbell(&mut self, tail: u32) {
        if tail < self.at.submissions.size.entries() {
            self.tail = tail;
        }
    }

    /// Writes the completion queue's head doorbell.
    pub fn completion_doorbell(&mut self, head: u32) {
        if head < self.at.completions.size.entries() {
            self.completion_head = head;
        }
    }

    /// Fetches all offered commands and executes them. Stops early when the completion queue is
    /// full. Returns the number of executed commands.
    ///
    /// # Errors
    /// The controller could not fetch a command or write a completion. The controller stops.
    pub fn run<T: Transfer>(&mut self, bus: &mut T, disk: &mut RamDisk) -> Result<u32, DmaError> {
        let size = self.at.submissions.size;
        while self.head != self.tail {
            let mut raw = [0; COMMAND_BYTES];
            let iova = self.at.submissions.entry(self.head);
            bus.read(self.id, iova, &mut raw)?;
            self.fetched.push(NvmeCommand::decode(&raw));
            self.head = size.index(self.head.wrapping_add(1));
        }
        let mut done = 0;
        while !self.fetched.is_empty() && !self.is_full() {
            let chosen = self.seed.below(self.fetched.len() as u64) as usize;
            let command = self.fetched.swap_remove(chosen);
            let status = match execute(self.id, bus, disk, &command) {
                Ok(()) => NvmeStatus::Success,
                Err(status) => status,
            };
            let completion = NvmeCompletion {
                result: 0,
                head: self.head as u16,
                queue: self.at.queue,
                id: command.id,
                status: status as u16,
            };
            self.completions.post(bus, self.id, completion.encode())?;
            done += 1;
        }
        Ok(done)
    }

    fn is_full(&self) -> bool {
        let size = self.at.completions.size;
        size.index(self.completions.tail().wrapping_add(1)) == self.completion_head
    }
}

/// Transfers the data of one command, page by page along its PRPs.
fn execute<T: Transfer>(
    id: RequesterId,
    bus: &mut T,
    disk: &mut RamDisk,
    command: &NvmeCommand,
) -> Result<(), NvmeStatus> {
    let opcode = Opcode::from_raw(command.opcode).ok_or(NvmeStatus::InvalidOpcode)?;
    let bytes = (u64::from(command.blocks_less_one) + 1) * BLOCK_BYTES;
    let data = disk
        .at(command.block, bytes)
        .map_err(|_| NvmeStatus::LbaOutOfRange)?;
    let mut rest = data;
    let mut page = command.prp1;
    if !page.is_aligned(4) {
        return Err(NvmeStatus::PrpOffsetInvalid);
    }
    let first = (PAGE_BYTES - page.offset_in(PAGE_BYTES)).min(bytes);
    let mut pages = Pages::new(command, bytes - first);
    let mut part_bytes = first;
    loop {
        let (part, tail) = rest.split_at_mut(part_bytes as usize);
        rest = tail;
        let moved = match opcode {
            Opcode::Read => bus.write(id, page, part),
            Opcode::Write => bus.read(id, page, part),
        };
        moved.map_err(|_| NvmeStatus::DataTransferError)?;
        if rest.is_empty() {
            return Ok(());
        }
        page = pages.next(id, bus)?;
        part_bytes = PAGE_BYTES.min(rest.len() as u64);
    }
}

/// The pages after the first one.
struct Pages {
    /// The second page, if there are only two.
    only: Option<Iova>,
    list: Iova,
    index: u64,
}

impl Pages {
    fn new(command: &NvmeCommand, bytes_behind: u64) -> Self {
        let only = (bytes_behind <= PAGE_BYTES).then_some(command.prp2);
        Self {
            only,
            list: command.prp2,
            index: 0,
        }
    }

    fn next<T: Transfer>(&mut self, id: RequesterId, bus: &mut T) -> Result<Iova, NvmeStatus> {
        let page = match self.only {
            Some(page) => page,
            None => {
                // Chained lists are not supported; drivers stay below that length.
                let at = self.list.checked_add(8 * self.index);
                let at = at.filter(|_| self.index < LIST_ENTRIES as u64);
                let mut raw = [0; 8];
                bus.read(id, at.ok_or(NvmeStatus::PrpOffsetInvalid)?, &mut raw)
                    .map_err(|_| NvmeStatus::DataTransferError)?;
                self.index += 1;
                Iova::new(u64::from_le_bytes(raw))
            }
        };
        if !page.is_aligned(PAGE_BYTES) {
            return Err(NvmeStatus::PrpOffsetInvalid);
        }
        Ok(page)
    }
}
