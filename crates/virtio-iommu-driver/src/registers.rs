//! The port to registers of 8 and 16 bits, which virtio devices have.

use core::ops::Deref;

use ringfence_types::Registers;

/// Memory-mapped registers with narrow fields. A driver accesses each field with its own width
/// (virtio 1.3, sections 4.1.3.1 and 4.2.2.2), so that [`Registers`] alone is not enough.
///
/// The contract of [`Registers`] holds for these accesses too.
pub trait NarrowRegisters: Registers {
    /// Reads the 8-bit register at `offset`.
    fn read8(&self, offset: u64) -> u8;

    /// Reads the 16-bit register at `offset`, a multiple of 2.
    fn read16(&self, offset: u64) -> u16;

    /// Writes the 8-bit register at `offset`.
    fn write8(&self, offset: u64, value: u8);

    /// Writes the 16-bit register at `offset`, a multiple of 2.
    fn write16(&self, offset: u64, value: u16);
}

/// Pointers to registers implement the port too.
impl<P: Deref<Target: NarrowRegisters>> NarrowRegisters for P {
    #[inline]
    fn read8(&self, offset: u64) -> u8 {
        (**self).read8(offset)
    }

    #[inline]
    fn read16(&self, offset: u64) -> u16 {
        (**self).read16(offset)
    }

    #[inline]
    fn write8(&self, offset: u64, value: u8) {
        (**self).write8(offset, value);
    }

    #[inline]
    fn write16(&self, offset: u64, value: u16) {
        (**self).write16(offset, value);
    }
}
