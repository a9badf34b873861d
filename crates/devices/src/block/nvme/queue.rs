//! The driver's side of a queue pair.

use ringfence_types::Direction;

use super::layout::{COMMAND_BYTES, MAX_PAGES, NvmeCommand, NvmeCompletion, Opcode};
use crate::Buffer;
use crate::api::{ApiError, DeviceRing, DmaApi};
use crate::block::pages::{
    CompletedRequests, MappedPage, Outstanding, RequestOutcome, alloc_structures, check_size, map,
};
use crate::block::{
    BLOCK_BYTES, BlockError, CompletedIo, DiskRequest, Operation, PAGE_BYTES, RejectedIo,
};
use crate::ring::{
    COMPLETION_BYTES, CompletionFault, CompletionQueue, MalformedCompletion, RingBase, RingMemory,
    RingSize,
};

/// Addresses of a queue pair for the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvmeAddresses {
    /// Identifier of the queue.
    pub queue: u16,
    /// Submission queue, which the controller reads.
    pub submissions: RingBase,
    /// Completion queue, which the controller writes.
    pub completions: RingBase,
}

/// The driver's side of a queue pair. `H` is the API's handle of a mapping.
///
/// The controller fetches submissions in ring order and completes them in any order. A ring IOMMU
/// has two rings per queue: one for reads and one for writes.
#[derive(Debug)]
pub struct NvmeQueue<H> {
    queue: u16,
    submissions: RingMemory,
    completions: CompletionQueue,
    /// One page per command for its PRP list.
    lists: RingMemory,
    tail: u32,
    /// By command identifier.
    commands: Vec<Option<Outstanding<H>>>,
    free: Vec<u16>,
    finishing: CompletedRequests,
}

impl<H> NvmeQueue<H> {
    /// Creates queue pair `queue` of `size` entries. One entry stays empty, so at most `size - 1`
    /// commands are outstanding.
    ///
    /// # Errors
    /// Returns the allocation's error; nothing stays allocated.
    pub fn open<A: DmaApi<Handle = H>>(
        api: &mut A,
        queue: u16,
        size: RingSize,
    ) -> Result<Self, BlockError> {
        let ring = static_ring(queue);
        let shapes = [COMMAND_BYTES as u32, COMPLETION_BYTES, PAGE_BYTES as u32];
        let shapes = shapes.map(|entry_bytes| (size, entry_bytes));
        let [submissions, completions, lists] = alloc_structures(api, ring, shapes)?;
        let commands = size.entries() - 1;
        Ok(Self {
            queue,
            submissions,
            completions: CompletionQueue::new(completions),
            lists,
            tail: 0,
            commands: (0..commands).map(|_| None).collect(),
            // A ring has at most 65536 entries, so identifiers fit. The lowest is allocated first.
            free: (0..commands).rev().map(|id| id as u16).collect(),
            finishing: CompletedRequests::default(),
        })
    }

    /// Returns the values for the Create I/O Queue commands.
    pub fn addresses(&self) -> NvmeAddresses {
        NvmeAddresses {
            queue: self.queue,
            submissions: self.submissions.base(),
            completions: self.completions.base(),
        }
    }

    /// Returns the number of commands that the controller owns.
    pub fn outstanding(&self) -> usize {
        self.commands.len() - self.free.len()
    }

    /// Maps the buffers of a request and writes its command. Returns the command's identifier. The
    /// caller must ring the doorbell afterwards.
    ///
    /// # Errors
    /// Nothing was submitted. Returns the buffers with the reason.
    pub fn submit<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        io: DiskRequest,
    ) -> Result<u16, RejectedIo> {
        if let Err(error) = check_size(io.bytes, io.buffers.len(), MAX_PAGES) {
            return Err(RejectedIo::new(io.buffers, error));
        }
        let Some(id) = self.free.pop() else {
            return Err(RejectedIo::new(io.buffers, BlockError::Full));
        };
        let ring = DeviceRing::new(self.queue, io.operation.direction());
        let pages = match map(api, ring, io.buffers, io.bytes, &mut self.finishing) {
            Ok(pages) => pages,
            Err(refused) => {
                self.free.push(id);
                return Err(refused);
            }
        };
        let command = NvmeCommand {
            opcode: match io.operation {
                Operation::Read => Opcode::Read,
                Operation::Write => Opcode::Write,
            } as u8,
            id,
            prp1: pages
                .first()
                .map_or(ringfence_types::Iova::ZERO, |page| page.iova),
            prp2: match pages.as_slice() {
                [_, second] => second.iova,
                [_, _, _, ..] => self.lists.base().entry(u32::from(id)),
                _ => ringfence_types::Iova::ZERO,
            },
            block: io.block,
            blocks_less_one: (u64::from(io.bytes) / BLOCK_BYTES - 1) as u16,
        };
        if let Err(error) = self.write(api, &command, &pages) {
            self.free.push(id);
            return Err(self.finishing.reject(api, ring, pages, error));
        }
        if let Some(slot) = self.commands.get_mut(usize::from(id)) {
            *slot = Some(Outstanding {
                operation: io.operation,
                pages,
            });
        }
        Ok(id)
    }

    /// Writes the PRP list, if any, then the command.
    fn write<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        command: &NvmeCommand,
        pages: &[MappedPage<H>],
    ) -> Result<(), BlockError> {
        if let [_, rest @ ..] = pages
            && rest.len() > 1
        {
            let list: Vec<u8> = rest
                .iter()
                .flat_map(|page| page.iova.get().to_le_bytes())
                .collect();
            let id = u32::from(command.id);
            self.lists.write(api.memory(), id, &list)?;
        }
        self.submissions
            .write(api.memory(), self.tail, &command.encode())?;
        self.tail = self.tail.wrapping_add(1);
        Ok(())
    }

    /// Makes all submitted mappings visible to the hardware. Returns the value for the submission
    /// queue's tail doorbell.
    pub fn sync_map<A: DmaApi<Handle = H>>(&self, api: &mut A) -> u32 {
        for operation in [Operation::Read, Operation::Write] {
            api.sync_map(DeviceRing::new(self.queue, operation.direction()));
        }
        self.submissions.size().index(self.tail)
    }

    /// Returns the value for the completion queue's head doorbell.
    pub fn completion_head(&self) -> u32 {
        self.completions.head()
    }

    /// Handles at most `budget` completions as one burst, and passes completed requests to `each`.
    /// Returns their number.
    ///
    /// # Errors
    /// Returns the first error. An invalid completion stops the queue until it is closed.
    pub fn complete<A: DmaApi<Handle = H>>(
        &mut self,
        api: &mut A,
        budget: u32,
        each: impl FnMut(CompletedIo),
    ) -> Result<u32, BlockError> {
        let mut done = 0;
        let mut result = Ok(());
        while done < budget && result.is_ok() {
            match self.complete_one(api) {
                Ok(true) => done += 1,
                Ok(false) => break,
                Err(error) => result = Err(error),
            }
        }
        if done > 0 || result.is_err() {
            result = result.and(self.finishing.end_bursts(api, self.queue));
        }
        self.finishing.deliver(each);
        result.map(|()| done)
    }

    fn complete_one<A: DmaApi<Handle = H>>(&mut self, api: &mut A) -> Result<bool, BlockError> {
        let Some(raw) = self.completions.peek(api.memory())? else {
            return Ok(false);
        };
        let claim = NvmeCompletion::decode(&raw);
        let malformed = |kind| {
            Err(BlockError::Device(MalformedCompletion {
                ring: static_ring(self.queue),
                kind,
            }))
        };
        if claim.queue != self.queue {
            return malformed(CompletionFault::Queue(claim.queue));
        }
        // The reported head needs no check: an entry is not rewritten before its command has
        // completed.
        let command = self.commands.get_mut(usize::from(claim.id));
        let Some(Outstanding { operation, pages }) = command.and_then(Option::take) else {
            return malformed(CompletionFault::NotOutstanding {
                command: u32::from(claim.id),
            });
        };
        self.completions.advance();
        self.free.push(claim.id);
        let ring = DeviceRing::new(self.queue, operation.direction());
        let outcome = RequestOutcome {
            tag: claim.id,
            operation,
            succeeded: claim.status == 0,
        };
        self.finishing.finish(api, ring, outcome, pages)?;
        Ok(true)
    }

    /// Deletes the queue: unmaps everything and frees the memory. The controller must have deleted
    /// it before. Passes the buffers of incomplete commands to `each`. Continues after errors.
    ///
    /// # Errors
    /// Returns the first error.
    pub fn close<A: DmaApi<Handle = H>>(
        mut self,
        api: &mut A,
        mut each: impl FnMut(Buffer),
    ) -> Result<(), BlockError> {
        let mut result = Ok(());
        for (id, command) in self.commands.iter_mut().enumerate() {
            if let Some(Outstanding { operation, pages }) = command.take() {
                let ring = DeviceRing::new(self.queue, operation.direction());
                let outcome = RequestOutcome {
                    tag: id as u16,
                    operation,
                    succeeded: false,
                };
                result = result.and(self.finishing.finish(api, ring, outcome, pages));
            }
        }
        result = result.and(self.finishing.end_last_bursts(api, self.queue));
        self.finishing
            .deliver(|done| done.buffers.into_iter().for_each(&mut each));
        self.finishing.abandon(each);
        let ring = static_ring(self.queue);
        let freed: [Result<(), ApiError>; 3] = [
            self.submissions.free(api, ring),
            self.completions.free(api, ring),
            self.lists.free(api, ring),
        ];
        for freed in freed {
            result = result.and(freed.map_err(BlockError::from));
        }
        result
    }
}

/// Returns the ring whose table of descriptors holds the queue pair: that of its commands, which
/// the controller reads.
const fn static_ring(queue: u16) -> DeviceRing {
    DeviceRing::new(queue, Direction::ToDevice)
}
