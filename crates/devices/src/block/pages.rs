//! The buffers of one request: each page a mapping of its own, because neither physical regions nor
//! tables of them need to be contiguous for a disk.

use ringfence_types::{Iova, PageSize, PhysAddr, PhysRange};

use super::{BLOCK_BYTES, BlockError, CompletedIo, Operation, RejectedIo};
use crate::Buffer;
use crate::api::{ApiError, DeviceRing, DmaApi, MapFailure, Mapped};
use crate::returns::OrderedCompletions;

/// Bytes of a buffer of a disk's driver.
pub const PAGE_BYTES: u64 = PageSize::Size4K.bytes();

/// A page while the disk owns it.
#[derive(Debug)]
pub(super) struct MappedPage<H> {
    handle: H,
    at: PhysAddr,
    /// For the command.
    pub(super) iova: Iova,
    /// How much of it is the disk's.
    pub(super) bytes: u32,
}

/// Requests that are done, and their buffers on the way up.
#[derive(Debug, Default)]
pub(super) struct CompletedRequests {
    returns: OrderedCompletions<(u16, Operation, bool), Vec<Option<Buffer>>>,
}

/// Checks that `bytes` are whole blocks, and that `pages` pages, at most `at_most`, are what they
/// take.
pub(super) fn check_size(bytes: u32, pages: usize, at_most: usize) -> Result<(), BlockError> {
    let wanted = u64::from(bytes).div_ceil(PAGE_BYTES);
    let whole = bytes > 0 && u64::from(bytes).is_multiple_of(BLOCK_BYTES);
    if !whole || pages as u64 != wanted || pages > at_most {
        return Err(BlockError::Size { bytes, pages });
    }
    Ok(())
}

/// Maps all buffers of a request.
///
/// # Errors
/// Nothing stays mapped. The buffers come back with the reason, as far as the layer hands them up.
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
        let here = left.min(PAGE_BYTES);
        left -= here;
        let Some(memory) = PhysRange::new(at, here) else {
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
                bytes: here as u32,
            }),
            Err(refused) => {
                let error = match refused.failure {
                    MapFailure::Busy => BlockError::Full,
                    MapFailure::NoSuchRing => ApiError::NoSuchRing(ring).into(),
                    MapFailure::Failed(error) => ApiError::Map(error).into(),
                };
                break (refused.buffer, error);
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
    Err(RejectedIo {
        buffers: back,
        error,
    })
}

impl CompletedRequests {
    /// Unmaps the pages of a request that is done. Its buffers go up with it, after the end of the
    /// burst if the layer withholds them.
    ///
    /// # Errors
    /// The first one; the other pages are unmapped all the same.
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
        for (which, page) in pages.into_iter().enumerate() {
            match api.unmap(ring, page.handle) {
                Ok(Some(buffer)) => self.returns.buffer_returned(buffer, number, which),
                Ok(None) => self.returns.withhold(page.at, number, which),
                Err(error) => {
                    self.returns.lose(number);
                    result = result.and(Err(error.into()));
                }
            }
        }
        result
    }

    /// Ends the bursts of a queue, both directions.
    ///
    /// # Errors
    /// The first one; both are tried.
    pub(super) fn end_bursts<A: DmaApi>(
        &mut self,
        api: &mut A,
        queue: u16,
    ) -> Result<(), BlockError> {
        let mut result = Ok(());
        for operation in [Operation::Read, Operation::Write] {
            let ring = DeviceRing {
                queue,
                direction: operation.direction(),
            };
            let ended = api.end_burst(ring, |buffer| {
                // A buffer of no request was given up on; it is lost, which is safe.
                let _ = self.returns.released(buffer);
            });
            result = result.and(ended.map_err(BlockError::from));
        }
        result
    }

    /// The same when no other will follow: where an invalidation fails it is tried once more, since
    /// it may for want of room.
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

    /// Hands up what is complete.
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

    /// Gives up on what is not complete; `each` receives the buffers that came.
    pub(super) fn abandon(&mut self, each: impl FnMut(Buffer)) {
        self.returns.abandon(each);
    }
}
