//! The interface through which device models access memory. A replay only probes addresses: it uses
//! `bus.rs`.

use ringfence_hw::Translate;
use ringfence_types::{Iova, PhysMemory, RequesterId};

use crate::{Bus, ByteMemory, DmaError, Observer};

/// Transfers bytes between a device and memory. Device models use this trait instead of [`Bus`], so
/// that they do not depend on the types of the IOMMU, the memory and the observer.
pub trait Transfer {
    /// Reads `into.len()` bytes at `iova` for `device`.
    ///
    /// # Errors
    /// [`DmaError`]; `into` is unchanged if the access was blocked.
    fn read(&mut self, device: RequesterId, iova: Iova, into: &mut [u8]) -> Result<(), DmaError>;

    /// Writes `from` at `iova` for `device`.
    ///
    /// # Errors
    /// [`DmaError`]; memory is unchanged if the access was blocked.
    fn write(&mut self, device: RequesterId, iova: Iova, from: &[u8]) -> Result<(), DmaError>;
}

impl<U: Translate, M: PhysMemory + ByteMemory, O: Observer> Transfer for Bus<'_, U, M, O> {
    #[inline]
    fn read(&mut self, device: RequesterId, iova: Iova, into: &mut [u8]) -> Result<(), DmaError> {
        Bus::read(self, device, iova, into)
    }

    #[inline]
    fn write(&mut self, device: RequesterId, iova: Iova, from: &[u8]) -> Result<(), DmaError> {
        Bus::write(self, device, iova, from)
    }
}
