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

/// Polls `is_done` until it returns true, at most `limit` times, but at least once.
///
/// # Errors
/// `error` after the last poll.
pub fn poll_until<E>(limit: u32, error: E, mut is_done: impl FnMut() -> bool) -> Result<(), E> {
    for _ in 0..limit.max(1) {
        if is_done() {
            return Ok(());
        }
        core::hint::spin_loop();
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_end_at_the_limit() {
        for (limit, done_at, expected, polls) in [
            (3, 1, Ok(()), 1),
            (3, 3, Ok(()), 3),
            (3, 4, Err("late"), 3),
            (0, 1, Ok(()), 1),
            (0, 2, Err("late"), 1),
        ] {
            let mut count = 0;
            let found = poll_until(limit, "late", || {
                count += 1;
                count == done_at
            });
            assert_eq!((found, count), (expected, polls), "{limit} {done_at}");
        }
    }
}
