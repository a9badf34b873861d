//! The buffers of one request. Each page has its own mapping, because a disk request needs
//! contiguous addresses neither in memory nor for the device.

use ringfence_types::{Iova, PageSize, PhysAddr, PhysRange};

use super::{BLOCK_BYTES, BlockError, CompletedIo, Operation, RejectedIo};
use crate::Buffer;
use crate::api::{DeviceRing, DmaApi, Mapped};
use crate::returns::OrderedCompletions;
use crate::ring::{RingMemory, RingSize};

/// Size of a disk buffer in bytes.
pub const PAGE_BYTES: u64 = PageSize::Size4K.bytes();

/// A page that the disk owns.
#[derive(Debug)]
pub(super) struct MappedPage<H> {
    handle: H,
    at: PhysAddr,
    /// Address for the command.
    pub(super) iova: Iova,
    /// Number of bytes that the disk may access.
    pub(super) bytes: u32,
}

/// A request that the disk owns.
#[derive(Debug)]
pub(super) struct Outstanding<H> {
    pub(super) operation: Operation,
    pub(super) pages: Vec<MappedPage<H>>,
}

/// Completed requests whose buffers are being returned.
#[derive(Debug, Default)]
pub(super) struct CompletedRequests {
    returns: OrderedCompletions<(u16, Operation, bool), Vec<Option<Buffer>>>,
}

/// Checks that `bytes` is a multiple of the block size, and that `pages` is the matching number of
/// pages and at most `at_most`.
pub(super) fn check_size(bytes: u32, pages: usize, at_most: usize) -> Result<(), BlockError> {
    let needed = u64::from(bytes).div_ceil(PAGE_BYTES);
    let whole = bytes > 0 && u64::from(bytes).is_multiple_of(BLOCK_BYTES);
    if !whole || pages as u64 != needed || pages > at_most {
        return Err(BlockError::Size { bytes, pages });
    }
    Ok(())
}

/// Allocates the structures of a queue: each has this many entries of this many bytes.
///
/// # Errors
/// Returns the allocation's error; nothing stays allocated.
pub(super) fn alloc_structures<A: DmaApi, const N: usize>(
    api: &mut A,
    ring: DeviceRing,
    shapes: [(RingSize, u32); N],
) -> Result<[RingMemory; N], BlockError> {
    let mut memories = Vec::new();
    for (size, entry_bytes) in shapes {
        match RingMemory::alloc(api, ring, size, entry_bytes) {
            Ok(memory) => memories.push(memory),
            Err(error) => {
                for memory in memories {
                    memory.free(api, ring)?;
                }
                return Err(error.into());
            }
        }
    }
    memories.try_into().map_err(|_| BlockError::TooFewBuffers)
}

/// Maps all buffers of a request.
///
/// # Errors
/// Nothing stays mapped. Returns the reason and the buffers that the layer has returned.
pub(super) fn map<A: DmaApi>(
    api: &mut A,
    ring: DeviceRing,
    buffers: Vec<Buffer>,
    bytes: u32,
    finishing: &mut CompletedRequests,
) -> Result<Vec<MappedPage<A::Handle>>, RejectedIo> {
    let mut pages = Vec::with_capacity(buffers.len());
    let mut left = u64::from(bytes);
    let mut buffers = buffers.into_iter();
    let failure = loop {
        let Some(buffer) = buffers.next() else {
            return Ok(pages);
        };
        let at = buffer.start();
        let part_bytes = left.min(PAGE_BYTES);
        left -= part_bytes;
        let Some(memory) = PhysRange::new(at, part_bytes) else {
            let size = BlockError::Size {
                bytes,
                pages: pages.len(),
            };
            break (buffer, size);
        };
        match api.map(ring, buffer, memory) {
            Ok(Mapped { iova, handle }) => pages.push(MappedPage {
                handle,
                at,
                iova,
                bytes: part_bytes as u32,
            }),
            Err(refused) => {
                break (refused.buffer, BlockError::of_map(refused.failure, ring));
            }
        }
    };
    let (refused, mut error) = failure;
    let mut back = Vec::with_capacity(pages.len() + 1);
    for page in pages {
        match api.unmap(ring, page.handle) {
            Ok(Some(buffer)) => back.push(buffer),
            Ok(None) => {}
            Err(failed) => error = failed.into(),
        }
    }
    let ended = api.end_burst(ring, |buffer| {
        if let Err(buffer) = finishing.returns.released(buffer) {
            back.push(buffer);
        }
    });
    if let Err(failed) = ended {
        error = failed.into();
    }
    back.push(refused);
    back.extend(buffers);
    Err(RejectedIo::new(back, error))
}

impl CompletedRequests {
    /// Unmaps the pages of a request that could not be submitted because of `error`.
    pub(super) fn reject<A: DmaApi>(
        &mut self,
        api: &mut A,
        ring: DeviceRing,
        (tag, operation): (u16, Operation),
        pages: Vec<MappedPage<A::Handle>>,
        error: BlockError,
    ) -> RejectedIo {
        let mut back = Vec::new();
        let unmapped = self.finish(api, ring, (tag, operation, false), pages);
        let ended = self.end_bursts(api, ring.queue);
        self.deliver(|done| back.extend(done.buffers));
        RejectedIo::new(back, unmapped.and(ended).err().unwrap_or(error))
    }

    /// Unmaps the pages of a completed request. It is delivered with its buffers; if the layer
    /// withholds them, after the end of the burst.
    ///
    /// # Errors
    /// Returns the first error; the other pages are still unmapped.
    pub(super) fn finish<A: DmaApi>(
        &mut self,
        api: &mut A,
        ring: DeviceRing,
        request: (u16, Operation, bool),
        pages: Vec<MappedPage<A::Handle>>,
    ) -> Result<(), BlockError> {
        let places = pages.iter().map(|_| None).collect();
        let number = self.returns.begin(request, places, pages.len());
        let mut result = Ok(());
        for (page_index, page) in pages.into_iter().enumerate() {
            match api.unmap(ring, page.handle) {
                Ok(Some(buffer)) => self.returns.buffer_returned(buffer, number, page_index),
                Ok(None) => self.returns.withhold(page.at, number, page_index),
                Err(error) => {
                    self.returns.lose(number);
                    result = result.and(Err(error.into()));
                }
            }
        }
        result
    }

    /// Ends the bursts of a queue in both directions.
    ///
    /// # Errors
    /// Returns the first error, after trying both.
    pub(super) fn end_bursts<A: DmaApi>(
        &mut self,
        api: &mut A,
        queue: u16,
    ) -> Result<(), BlockError> {
        let mut result = Ok(());
        for operation in [Operation::Read, Operation::Write] {
            let ring = DeviceRing::new(queue, operation.direction());
            let ended = api.end_burst(ring, |buffer| {
                // The request of this buffer was abandoned. The buffer leaks, which is safe.
                let _ = self.returns.released(buffer);
            });
            result = result.and(ended.map_err(BlockError::from));
        }
        result
    }

    /// Ends the last bursts of a queue. Retries a failed invalidation once, because the failure may
    /// be a full queue.
    ///
    /// # Errors
    /// See [`end_bursts`](Self::end_bursts).
    pub(super) fn end_last_bursts<A: DmaApi>(
        &mut self,
        api: &mut A,
        queue: u16,
    ) -> Result<(), BlockError> {
        self.end_bursts(api, queue)
            .or_else(|_| self.end_bursts(api, queue))
    }

    /// Delivers the completed requests.
    pub(super) fn deliver(&mut self, mut each: impl FnMut(CompletedIo)) {
        while let Some(((tag, operation, succeeded), buffers)) = self.returns.next() {
            each(CompletedIo {
                tag,
                operation,
                succeeded,
                buffers: buffers.into_iter().flatten().collect(),
            });
        }
    }

    /// Abandons incomplete requests and passes their returned buffers to `each`.
    pub(super) fn abandon(&mut self, each: impl FnMut(Buffer)) {
        self.returns.abandon(each);
    }
}
