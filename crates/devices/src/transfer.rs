//! The port through which device models reach memory.

use ringfence_hw::Translate;
use ringfence_types::{Iova, PhysMemory, RequesterId};

use crate::{Bus, ByteMemory, DmaError, Observer};

/// Moves bytes between a device and the addresses it was given. Device models ask for this and not
/// for a [`Bus`], which has a unit, a memory and an observer that they need not know.
pub trait Transfer {
    /// `device` reads `into.len()` bytes at `iova`.
    ///
    /// # Errors
    /// [`DmaError`]; `into` is as it was if the access was stopped.
    fn read(&mut self, device: RequesterId, iova: Iova, into: &mut [u8]) -> Result<(), DmaError>;

    /// `device` writes `from` at `iova`.
    ///
    /// # Errors
    /// [`DmaError`]; memory is as it was if the access was stopped.
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
