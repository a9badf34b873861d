//! The port `Registers`: memory-mapped registers of the unit and of the device.

use core::sync::atomic::{Ordering, fence};

use ringfence_types::{PhysAddr, Registers};

use crate::boot::MAPPED_END;

/// The registers of one device.
#[derive(Debug)]
pub(crate) struct Mmio {
    base: *mut u8,
    bytes: u64,
}

impl Mmio {
    /// Returns the `bytes` bytes of registers at `base`; `None` if they are not mapped.
    ///
    /// # Safety
    /// They are the registers of a device, and no other value accesses them.
    pub(crate) unsafe fn new(base: PhysAddr, bytes: u64) -> Option<Self> {
        let end = base.get().checked_add(bytes)?;
        let base = base.get() as *mut u8;
        (end <= MAPPED_END).then_some(Self { base, bytes })
    }

    /// Returns the pointer to a register of type `T`; `None` outside the registers.
    fn register<T>(&self, offset: u64) -> Option<*mut T> {
        let end = offset.checked_add(size_of::<T>() as u64)?;
        let is_inside = end <= self.bytes && offset.is_multiple_of(size_of::<T>() as u64);
        is_inside.then(|| self.base.wrapping_add(offset as usize).cast())
    }

    fn read<T>(&self, offset: u64) -> Option<T> {
        let register = self.register(offset)?;
        // SAFETY: `new`'s caller gave these registers to this value, and the pointer is aligned.
        let value = unsafe { core::ptr::read_volatile(register) };
        // Later loads see the memory that the device wrote before it answered.
        fence(Ordering::Acquire);
        Some(value)
    }

    fn write<T>(&self, offset: u64, value: T) {
        // Stores to memory come before the register write: x86 does not reorder stores, and the
        // compiler must not either.
        fence(Ordering::SeqCst);
        if let Some(register) = self.register(offset) {
            // SAFETY: as in `read`.
            unsafe { core::ptr::write_volatile(register, value) };
        }
    }
}

impl Registers for Mmio {
    fn read32(&self, offset: u64) -> u32 {
        self.read(offset).unwrap_or(u32::MAX)
    }

    fn read64(&self, offset: u64) -> u64 {
        self.read(offset).unwrap_or(u64::MAX)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write(offset, value);
    }

    fn write64(&self, offset: u64, value: u64) {
        self.write(offset, value);
    }
}
