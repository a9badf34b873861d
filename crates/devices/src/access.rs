//! The access engine: from a device's request to bytes in memory.

use core::fmt;

use ringfence_hw::Translate;
use ringfence_types::{Access, Fault, Iova, PhysMemory, RequesterId};

use crate::{ByteMemory, DmaPort, DmaRequest, Observer, Unreachable};

/// The way from devices to memory: through a unit, or a machine of several, under the eyes of an
/// observer. Borrows all of them, costs nothing to make.
#[derive(Debug)]
pub struct Bus<'a, U, M, O> {
    unit: &'a mut U,
    memory: &'a M,
    observer: O,
}

/// Why a device did not get its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaError {
    /// The unit stopped the access; no byte has moved.
    Fault(Fault),
    /// The unit let it through to where there is no memory. Bytes of earlier pages may have moved.
    Unreachable(Unreachable),
}

impl fmt::Display for DmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(fault) => fault.fmt(f),
            Self::Unreachable(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for DmaError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        Some(match self {
            Self::Fault(fault) => fault,
            Self::Unreachable(error) => error,
        })
    }
}

impl From<Fault> for DmaError {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<Unreachable> for DmaError {
    fn from(error: Unreachable) -> Self {
        Self::Unreachable(error)
    }
}

impl<'a, U: Translate, M: PhysMemory, O: Observer> Bus<'a, U, M, O> {
    /// The bus between `unit`, which walks the tables in `memory`, and `observer`.
    #[inline]
    pub const fn new(unit: &'a mut U, memory: &'a M, observer: O) -> Self {
        Self {
            unit,
            memory,
            observer,
        }
    }

    /// Makes the access without its bytes: translated, observed, cached and recorded like any
    /// other. What counts in a replay is where the access leads, and the bytes of a sparse memory
    /// would only be paged in.
    ///
    /// # Errors
    /// The fault that stopped it.
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

    /// `device` reads `into.len()` bytes at `iova`.
    ///
    /// # Errors
    /// [`DmaError`]; `into` is as it was if the access was stopped.
    pub fn read(&mut self, device: RequesterId, iova: Iova, into: &mut [u8]) -> Result<(), DmaError>
    where
        M: ByteMemory,
    {
        let memory = self.memory;
        let mut rest = into;
        self.transfer(device, iova, rest.len(), Access::Read, |at, bytes| {
            let (piece, behind) = core::mem::take(&mut rest).split_at_mut(bytes);
            rest = behind;
            memory.read(at, piece)
        })
    }

    /// `device` writes `from` at `iova`.
    ///
    /// # Errors
    /// [`DmaError`]; memory is as it was if the access was stopped.
    pub fn write(&mut self, device: RequesterId, iova: Iova, from: &[u8]) -> Result<(), DmaError>
    where
        M: ByteMemory,
    {
        let memory = self.memory;
        let mut rest = from;
        self.transfer(device, iova, rest.len(), Access::Write, |at, bytes| {
            let (piece, behind) = rest.split_at(bytes);
            rest = behind;
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
                    // The ranges add up to `bytes`, which is a usize.
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

/// Attackers probe: what they reach counts, not what stands there.
impl<U: Translate, M: PhysMemory, O: Observer> DmaPort for Bus<'_, U, M, O> {
    #[inline]
    fn access(&mut self, request: &DmaRequest) -> Result<(), Fault> {
        self.probe(request)
    }
}
