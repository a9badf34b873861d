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

/// Result of a request, as the disk reports it.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestOutcome {
    pub(super) tag: u16,
    pub(super) operation: Operation,
    pub(super) succeeded: bool,
}

/// Completed requests whose buffers are being returned.
#[derive(Debug, Default)]
pub(super) struct CompletedRequests {
    returns: OrderedCompletions<RequestOutcome, Vec<Option<Buffer>>>,
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
/// Returns the allocation's error. Nothing stays allocated, unless a release fails too.
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
                // The caller gets the first error. Memory that is not freed leaks, which is safe.
                for memory in memories {
                    let _ = memory.free(api, ring);
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
/// Returns the reason and the buffers that the layer has returned. Others stay mapped only if their
/// unmap failed too.
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
    let (refused, error) = failure;
    let (mut back, undone) = finishing.undo_map(api, ring, pages);
    back.push(refused);
    back.extend(buffers);
    Err(RejectedIo::new(back, undone.err().unwrap_or(error)))
}

impl CompletedRequests {
    /// Unmaps the pages of a request that could not be submitted because of `error`. Requests that
    /// have completed before stay for [`deliver`](Self::deliver).
    pub(super) fn reject<A: DmaApi>(
        &mut self,
        api: &mut A,
        ring: DeviceRing,
        pages: Vec<MappedPage<A::Handle>>,
        error: BlockError,
    ) -> RejectedIo {
        let (back, undone) = self.undo_map(api, ring, pages);
        RejectedIo::new(back, undone.err().unwrap_or(error))
    }

    /// Unmaps the pages of a request that the disk never owned, and ends their burst. Returns their
    /// buffers, except those that the layer keeps after an error, and the first error.
    fn undo_map<A: DmaApi>(
        &mut self,
        api: &mut A,
        ring: DeviceRing,
        pages: Vec<MappedPage<A::Handle>>,
    ) -> (Vec<Buffer>, Result<(), BlockError>) {
        let mut back = Vec::with_capacity(pages.len() + 1);
        let mut withheld = Vec::new();
        let mut result = Ok(());
        for page in pages {
            match api.unmap(ring, page.handle) {
                Ok(Some(buffer)) => back.push(buffer),
                Ok(None) => withheld.push(page.at),
                Err(failed) => result = result.and(Err(failed.into())),
            }
        }
        let ended = api.end_burst(ring, |buffer| {
            if let Err(buffer) = self.returns.released(buffer)
                && withheld.contains(&buffer.start())
            {
                back.push(buffer);
            }
            // Other buffers are those of an earlier rejected request whose burst did not end. They
            // leak, which is safe.
        });
        (back, result.and(ended.map_err(BlockError::from)))
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
        outcome: RequestOutcome,
        pages: Vec<MappedPage<A::Handle>>,
    ) -> Result<(), BlockError> {
        let buffers = pages.iter().map(|_| None).collect();
        let number = self.returns.begin(outcome, buffers, pages.len());
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
                // A buffer that `released` returns belongs to an abandoned request, or to a
                // rejected one whose burst did not end before. It leaks, which is safe.
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
        while let Some((outcome, buffers)) = self.returns.next() {
            each(CompletedIo {
                tag: outcome.tag,
                operation: outcome.operation,
                succeeded: outcome.succeeded,
                buffers: buffers.into_iter().flatten().collect(),
            });
        }
    }

    /// Abandons incomplete requests and passes their returned buffers to `each`.
    pub(super) fn abandon(&mut self, each: impl FnMut(Buffer)) {
        self.returns.abandon(each);
    }
}

#[cfg(test)]
mod tests {
    use ringfence_dma::Coherent;
    use ringfence_types::{InvalidationError, RequesterId};

    use super::*;
    use crate::api::{ApiError, FailedMap, NotFreed};
    use crate::{BufferOwner, ByteMemory, Unreachable};

    /// A layer that withholds every buffer until the end of its ring's burst.
    #[derive(Default)]
    struct WithholdingApi {
        withheld: Vec<(DeviceRing, Buffer)>,
        /// True if no burst ends.
        fails: bool,
        /// True if no page can be unmapped.
        keeps: bool,
    }

    struct NoMemory;

    impl ByteMemory for NoMemory {
        fn read(&self, _: PhysAddr, _: &mut [u8]) -> Result<(), Unreachable> {
            unreachable!("no test reads memory")
        }

        fn write(&self, _: PhysAddr, _: &[u8]) -> Result<(), Unreachable> {
            unreachable!("no test writes memory")
        }
    }

    impl DmaApi for WithholdingApi {
        type Handle = Buffer;
        type Memory = NoMemory;

        fn memory(&self) -> &NoMemory {
            &NoMemory
        }

        fn map(
            &mut self,
            _: DeviceRing,
            buffer: Buffer,
            memory: PhysRange,
        ) -> Result<Mapped<Buffer>, FailedMap> {
            let iova = Iova::new(memory.start().get());
            let handle = buffer;
            Ok(Mapped { iova, handle })
        }

        fn unmap(&mut self, ring: DeviceRing, handle: Buffer) -> Result<Option<Buffer>, ApiError> {
            if self.keeps {
                return Err(ApiError::NoSuchRing(ring));
            }
            self.withheld.push((ring, handle));
            Ok(None)
        }

        fn end_burst(
            &mut self,
            ring: DeviceRing,
            mut back: impl FnMut(Buffer),
        ) -> Result<(), ApiError> {
            if self.fails {
                let (device, cause) = (RequesterId::new(1), InvalidationError::Failed);
                return Err(ApiError::EndBurst { device, cause });
            }
            let all = std::mem::take(&mut self.withheld).into_iter();
            let (ended, others): (Vec<_>, Vec<_>) = all.partition(|(of, _)| *of == ring);
            self.withheld = others;
            ended.into_iter().for_each(|(_, buffer)| back(buffer));
            Ok(())
        }

        fn sync_map(&mut self, _: DeviceRing) {}

        fn alloc_coherent(&mut self, _: DeviceRing, _: usize) -> Result<Coherent, ApiError> {
            unreachable!("no test allocates")
        }

        fn free_coherent(&mut self, _: DeviceRing, _: Coherent) -> Result<(), Box<NotFreed>> {
            unreachable!("no test frees")
        }
    }

    const RING: DeviceRing = DeviceRing::new(1, Operation::Read.direction());

    fn buffer(page: u64) -> Buffer {
        <Buffer as BufferOwner>::hold(u64::release(page << 12))
    }

    fn pages(api: &mut WithholdingApi, page: u64) -> Vec<MappedPage<Buffer>> {
        let completed = &mut CompletedRequests::default();
        map(api, RING, vec![buffer(page)], 4096, completed).unwrap()
    }

    fn delivered(completed: &mut CompletedRequests) -> Vec<(u16, bool, Vec<Buffer>)> {
        let mut all = Vec::new();
        completed.deliver(|io| all.push((io.tag, io.succeeded, io.buffers)));
        all
    }

    /// The burst of a completed request could not end; a later submission ends it.
    #[test]
    fn a_rejected_request_leaves_completed_ones_to_their_delivery() {
        let (mut api, mut completed) = (WithholdingApi::default(), CompletedRequests::default());
        let first = pages(&mut api, 7);
        let outcome = RequestOutcome {
            tag: 3,
            operation: Operation::Read,
            succeeded: true,
        };
        completed.finish(&mut api, RING, outcome, first).unwrap();
        api.fails = true;
        completed.end_bursts(&mut api, RING.queue).unwrap_err();
        assert!(delivered(&mut completed).is_empty());
        api.fails = false;
        let second = pages(&mut api, 9);
        let rejected = completed.reject(&mut api, RING, second, BlockError::Full);
        assert_eq!(rejected.error, BlockError::Full);
        assert_eq!(rejected.buffers, [buffer(9)]);
        let wanted = [(3, true, vec![buffer(7)])];
        assert_eq!(delivered(&mut completed), wanted);
    }

    /// The disk never owned the request, so it never completes.
    #[test]
    fn a_rejected_request_whose_burst_does_not_end_never_completes() {
        let (mut api, mut completed) = (WithholdingApi::default(), CompletedRequests::default());
        let rejected_pages = pages(&mut api, 9);
        api.fails = true;
        let rejected = completed.reject(&mut api, RING, rejected_pages, BlockError::Full);
        assert!(matches!(rejected.error, BlockError::Api(_)));
        assert!(rejected.buffers.is_empty());
        api.fails = false;
        completed.end_bursts(&mut api, RING.queue).unwrap();
        assert!(delivered(&mut completed).is_empty());
    }

    /// The buffers of a rejected request whose burst did not end belong to no later request.
    #[test]
    fn a_rejected_request_returns_only_its_own_buffers() {
        let (mut api, mut completed) = (WithholdingApi::default(), CompletedRequests::default());
        let first = pages(&mut api, 9);
        api.fails = true;
        completed.reject(&mut api, RING, first, BlockError::Full);
        api.fails = false;
        let second = pages(&mut api, 11);
        let rejected = completed.reject(&mut api, RING, second, BlockError::Full);
        assert_eq!(rejected.buffers, [buffer(11)]);
    }

    #[test]
    fn the_first_error_of_a_rejected_request_is_reported() {
        let (mut api, mut completed) = (WithholdingApi::default(), CompletedRequests::default());
        let rejected_pages = pages(&mut api, 9);
        (api.keeps, api.fails) = (true, true);
        let rejected = completed.reject(&mut api, RING, rejected_pages, BlockError::Full);
        assert_eq!(rejected.error, BlockError::Api(ApiError::NoSuchRing(RING)));
    }
}
