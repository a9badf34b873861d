//! The port to the registers of an IOMMU.

use core::ops::Deref;

/// Memory-mapped registers of one unit. Offsets are relative to the unit's first register.
///
/// # Contract
/// - The embedder maps the whole register file of the unit, uncached, for the life of the value.
/// - Accesses take place in program order, also relative to stores through
///   [`PhysMemory`](crate::PhysMemory): a write of a register is not visible to the unit before
///   earlier stores to memory are.
/// - A read of an offset where nothing answers returns all ones, as on PCI Express. A write there
///   has no effect.
/// - An implementor without 64-bit accesses writes the low half first.
pub trait Registers {
    /// Reads the 32-bit register at `offset`, a multiple of 4.
    fn read32(&self, offset: u64) -> u32;

    /// Reads the 64-bit register at `offset`, a multiple of 8.
    fn read64(&self, offset: u64) -> u64;

    /// Writes the 32-bit register at `offset`, a multiple of 4.
    fn write32(&self, offset: u64, value: u32);

    /// Writes the 64-bit register at `offset`, a multiple of 8.
    fn write64(&self, offset: u64, value: u64);
}

/// Pointers to registers implement the port too.
impl<P: Deref<Target: Registers>> Registers for P {
    #[inline]
    fn read32(&self, offset: u64) -> u32 {
        (**self).read32(offset)
    }

    #[inline]
    fn read64(&self, offset: u64) -> u64 {
        (**self).read64(offset)
    }

    #[inline]
    fn write32(&self, offset: u64, value: u32) {
        (**self).write32(offset, value);
    }

    #[inline]
    fn write64(&self, offset: u64, value: u64) {
        (**self).write64(offset, value);
    }
}
