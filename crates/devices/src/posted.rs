//! Posted writes: a queue between the IOMMU and memory.
//!
//! A device does not wait for a write. The write is translated once, and then moves through buffers
//! of the root complex to memory. If an unmap returns before the write reaches memory, the device
//! changes a buffer that the driver already uses (attack A23). An invalidation with write draining
//! (VT-d specification, section 6.5.3; the DW bit) completes only after the writes before it have
//! reached memory.

use std::collections::VecDeque;

use ringfence_hw::Translate;
use ringfence_types::{
    Access, Fault, Invalidation, InvalidationError, Invalidator, Iova, PhysAddr, PhysMemory,
    PhysRange, RequesterId, Ticket,
};

use crate::{ByteMemory, DmaError, DmaRequest, Observer, Unreachable};

/// Effect of an invalidation on posted writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum WriteDraining {
    /// The invalidation completes after the writes before it have reached memory.
    #[default]
    Drained,
    /// The invalidation completes at once: DW = 0, or a unit that does not drain.
    NotDrained,
}

/// A write that has been translated and has not reached memory.
#[derive(Debug, Clone)]
struct Posted {
    request: DmaRequest,
    ranges: Vec<PhysRange>,
    bytes: Vec<u8>,
}

/// An IOMMU with a queue of posted writes in front of memory. It is the invalidator of the mapping
/// layer and the path of the devices.
///
/// The observer gets a write when its bytes reach memory. A read first delivers all earlier writes,
/// as PCI ordering requires.
#[derive(Debug)]
pub struct PostingUnit<'m, U, M, O> {
    unit: U,
    memory: &'m M,
    observer: O,
    draining: WriteDraining,
    queue: VecDeque<Posted>,
    /// Number of writes that the buffers hold. A further write first delivers the oldest one.
    capacity: usize,
    unreachable: u64,
}

impl<'m, U, M: PhysMemory + ByteMemory, O: Observer> PostingUnit<'m, U, M, O> {
    /// Creates the path through `unit` to `memory` with buffers for `capacity` writes.
    pub const fn new(
        unit: U,
        memory: &'m M,
        observer: O,
        draining: WriteDraining,
        capacity: usize,
    ) -> Self {
        Self {
            unit,
            memory,
            observer,
            draining,
            queue: VecDeque::new(),
            capacity,
            unreachable: 0,
        }
    }

    /// Returns the IOMMU.
    pub fn unit(&mut self) -> &mut U {
        &mut self.unit
    }

    /// Returns the observer.
    pub fn observer(&mut self) -> &mut O {
        &mut self.observer
    }

    /// Returns the number of writes that have not reached memory.
    pub fn posted(&self) -> usize {
        self.queue.len()
    }

    /// Returns the number of delivered writes to addresses without memory.
    pub fn unreachable(&self) -> u64 {
        self.unreachable
    }

    /// Delivers at most `writes` posted writes to memory, oldest first.
    pub fn deliver(&mut self, writes: usize) {
        for _ in 0..writes {
            let Some(Posted {
                request,
                ranges,
                bytes,
            }) = self.queue.pop_front()
            else {
                return;
            };
            self.observer.allowed(&request, &ranges);
            let mut rest = &bytes[..];
            let written = pieces(&ranges, |at, length| {
                let (piece, tail) = rest.split_at(length.min(rest.len()));
                rest = tail;
                self.memory.write(at, piece)
            });
            self.unreachable += u64::from(written.is_err());
        }
    }
}

impl<U: Translate, M: PhysMemory + ByteMemory, O: Observer> PostingUnit<'_, U, M, O> {
    /// Posts a write of `from` at `iova` by `device`. Returns before the bytes reach memory.
    ///
    /// # Errors
    /// The fault that blocked the write. An address without memory is no error for the device.
    pub fn post(&mut self, device: RequesterId, iova: Iova, from: &[u8]) -> Result<(), Fault> {
        let request = DmaRequest {
            device,
            iova,
            bytes: from.len() as u64,
            access: Access::Write,
        };
        let ranges = self.translate(&request)?;
        while self.queue.len() >= self.capacity.max(1) {
            self.deliver(1);
        }
        self.queue.push_back(Posted {
            request,
            ranges,
            bytes: from.to_vec(),
        });
        Ok(())
    }

    /// Reads `into.len()` bytes at `iova` by `device`, after all posted writes.
    ///
    /// # Errors
    /// [`DmaError`]; `into` is unchanged if the read was blocked.
    pub fn read(
        &mut self,
        device: RequesterId,
        iova: Iova,
        into: &mut [u8],
    ) -> Result<(), DmaError> {
        let request = DmaRequest {
            device,
            iova,
            bytes: into.len() as u64,
            access: Access::Read,
        };
        let ranges = self.translate(&request)?;
        self.deliver(usize::MAX);
        self.observer.allowed(&request, &ranges);
        let mut rest = into;
        pieces(&ranges, |at, length| {
            let (piece, tail) = core::mem::take(&mut rest).split_at_mut(length);
            rest = tail;
            self.memory.read(at, piece)
        })?;
        Ok(())
    }

    fn translate(&mut self, request: &DmaRequest) -> Result<Vec<PhysRange>, Fault> {
        let DmaRequest {
            device,
            iova,
            bytes,
            access,
        } = *request;
        match self
            .unit
            .translate(self.memory, device, iova, bytes, access)
        {
            Ok(ranges) => Ok(ranges.to_vec()),
            Err(fault) => {
                self.observer.faulted(request, &fault);
                Err(fault)
            }
        }
    }
}

/// Calls `act` for each range, with its length.
fn pieces(
    ranges: &[PhysRange],
    mut act: impl FnMut(PhysAddr, usize) -> Result<(), Unreachable>,
) -> Result<(), Unreachable> {
    // The lengths add up to the length of a buffer, which is a usize.
    ranges
        .iter()
        .try_for_each(|range| act(range.start(), range.bytes() as usize))
}

impl<U: Invalidator, M: PhysMemory + ByteMemory, O: Observer> Invalidator
    for PostingUnit<'_, U, M, O>
{
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.unit.submit(request)
    }

    /// With draining, delivers all posted writes before the request completes. This includes writes
    /// that were posted after the request, as hardware may do.
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        let completed = self.unit.poll(ticket)?;
        if completed && self.draining == WriteDraining::Drained {
            self.deliver(usize::MAX);
        }
        Ok(completed)
    }
}
