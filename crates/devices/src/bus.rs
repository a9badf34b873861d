//! The access engine: executes a device's requests on memory.

use ringfence_hw::{
    AtsUnit, ContextLookup, PageGroupResponse, PageRequest, Translate, TranslationCompletion,
    TranslationService,
};
use ringfence_types::{Access, Fault, Iova, PhysAddr, PhysMemory, RequesterId};

use crate::{ByteMemory, DmaPort, DmaRequest, Observer, Unreachable};

/// The path from devices to memory: through an IOMMU, or a machine with several, observed by an
/// observer. Borrows all of them, so creating a bus costs nothing.
#[derive(Debug)]
pub struct Bus<'a, U, M, O> {
    unit: &'a mut U,
    memory: &'a M,
    observer: O,
}

/// Reason why a DMA failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DmaError {
    /// The IOMMU blocked the access; no byte has moved.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The IOMMU allowed an access to an address without memory. Bytes of earlier pages may have
    /// moved.
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
}

impl<'a, U: Translate, M: PhysMemory, O: Observer> Bus<'a, U, M, O> {
    /// Creates the bus between `unit`, which walks the tables in `memory`, and `observer`.
    #[inline]
    pub const fn new(unit: &'a mut U, memory: &'a M, observer: O) -> Self {
        Self {
            unit,
            memory,
            observer,
        }
    }

    /// Makes an access without moving bytes. It is translated, observed, cached and recorded like
    /// any other. A replay needs only the target of an access; moving bytes would only page in a
    /// sparse memory.
    ///
    /// # Errors
    /// Returns the fault that blocked the access.
    #[inline]
    pub fn probe(&mut self, request: &DmaRequest) -> Result<(), Fault> {
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
            Ok(translation) => {
                self.observer.allowed(request, &translation);
                Ok(())
            }
            Err(fault) => {
                self.observer.faulted(request, &fault);
                Err(fault)
            }
        }
    }

    /// Reads `into.len()` bytes at `iova` for `device`.
    ///
    /// # Errors
    /// [`DmaError`]; `into` is unchanged if the access was blocked.
    pub fn read(&mut self, device: RequesterId, iova: Iova, into: &mut [u8]) -> Result<(), DmaError>
    where
        M: ByteMemory,
    {
        let memory = self.memory;
        let mut rest = into;
        self.transfer(device, iova, rest.len(), Access::Read, |at, bytes| {
            let (piece, tail) = core::mem::take(&mut rest).split_at_mut(bytes);
            rest = tail;
            memory.read(at, piece)
        })
    }

    /// Writes `from` at `iova` for `device`.
    ///
    /// # Errors
    /// [`DmaError`]; memory is unchanged if the access was blocked.
    pub fn write(&mut self, device: RequesterId, iova: Iova, from: &[u8]) -> Result<(), DmaError>
    where
        M: ByteMemory,
    {
        let memory = self.memory;
        let mut rest = from;
        self.transfer(device, iova, rest.len(), Access::Write, |at, bytes| {
            let (piece, tail) = rest.split_at(bytes);
            rest = tail;
            memory.write(at, piece)
        })
    }

    fn transfer(
        &mut self,
        device: RequesterId,
        iova: Iova,
        bytes: usize,
        access: Access,
        mut piece: impl FnMut(ringfence_types::PhysAddr, usize) -> Result<(), Unreachable>,
    ) -> Result<(), DmaError> {
        let request = DmaRequest {
            device,
            iova,
            bytes: bytes as u64,
            access,
        };
        let translated = self
            .unit
            .translate(self.memory, device, iova, request.bytes, access);
        match translated {
            Ok(ranges) => {
                self.observer.allowed(&request, &ranges);
                for range in ranges.iter() {
                    // The lengths add up to `bytes`, which is a usize.
                    piece(range.start(), range.bytes() as usize)?;
                }
                Ok(())
            }
            Err(fault) => {
                self.observer.faulted(&request, &fault);
                Err(fault.into())
            }
        }
    }
}

/// Requests of devices with a device TLB. The `iova` of an observed request is the host address that
/// the device supplied.
impl<U: TranslationService, M: PhysMemory, O: Observer> Bus<'_, U, M, O> {
    /// Asks for the translation of the page of `iova` (AT = 01b). Moves no byte and is not observed.
    pub fn translation_request(
        &mut self,
        device: RequesterId,
        iova: Iova,
    ) -> TranslationCompletion {
        self.unit.translation_request(self.memory, device, iova)
    }

    /// Makes a translated request (AT = 10b) without moving bytes.
    ///
    /// # Errors
    /// Returns the fault that blocked the request.
    pub fn probe_translated(
        &mut self,
        device: RequesterId,
        at: PhysAddr,
        bytes: u64,
        access: Access,
    ) -> Result<(), Fault> {
        let request = DmaRequest {
            device,
            iova: Iova::new(at.get()),
            bytes,
            access,
        };
        let checked = self
            .unit
            .translated_request(self.memory, device, at, bytes, access);
        match checked {
            Ok(ranges) => {
                self.observer.allowed(&request, &ranges);
                Ok(())
            }
            Err(fault) => {
                self.observer.faulted(&request, &fault);
                Err(fault)
            }
        }
    }

    /// Reads `into.len()` bytes at host address `at` (AT = 10b).
    ///
    /// # Errors
    /// [`DmaError`]; `into` is unchanged if the request was blocked.
    pub fn read_translated(
        &mut self,
        device: RequesterId,
        at: PhysAddr,
        into: &mut [u8],
    ) -> Result<(), DmaError>
    where
        M: ByteMemory,
    {
        self.probe_translated(device, at, into.len() as u64, Access::Read)?;
        Ok(self.memory.read(at, into)?)
    }

    /// Writes `from` at host address `at` (AT = 10b).
    ///
    /// # Errors
    /// [`DmaError`]; memory is unchanged if the request was blocked.
    pub fn write_translated(
        &mut self,
        device: RequesterId,
        at: PhysAddr,
        from: &[u8],
    ) -> Result<(), DmaError>
    where
        M: ByteMemory,
    {
        self.probe_translated(device, at, from.len() as u64, Access::Write)?;
        Ok(self.memory.write(at, from)?)
    }
}

impl<D: ContextLookup, M: PhysMemory, O: Observer> Bus<'_, AtsUnit<D>, M, O> {
    /// Sends a page request. Returns the unit's automatic response, if it has one.
    pub fn page_request(&mut self, request: &PageRequest) -> Option<PageGroupResponse> {
        self.unit.page_request(self.memory, request)
    }
}

/// Attackers only probe: the target of their access counts, not its content. In an oracle replay
/// they use `CheckedBus` of the crate `ringfence-lab`.
impl<U: Translate, M: PhysMemory, O: Observer> DmaPort for Bus<'_, U, M, O> {
    #[inline]
    fn access(&mut self, request: &DmaRequest) -> Result<(), Fault> {
        self.probe(request)
    }
}
