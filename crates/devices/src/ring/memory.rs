//! The array of a ring, for the driver and for the device.

use ringfence_dma::Coherent;
use ringfence_types::{Iova, PageSize, PhysAddr};

use super::RingSize;
use crate::api::{ApiError, DeviceRing, DmaApi};
use crate::{ByteMemory, Unreachable};

const PAGE: u64 = PageSize::Size4K.bytes();

/// The array as the driver accesses it: through the frames of coherent memory.
#[derive(Debug)]
pub struct RingMemory {
    coherent: Coherent,
    size: RingSize,
    entry_bytes: u32,
}

impl RingMemory {
    /// Allocates an array of `size` entries of `entry_bytes` bytes. `entry_bytes` must be a power
    /// of two up to a page, so that no entry crosses a page.
    ///
    /// # Errors
    /// Returns the allocation's error.
    pub fn alloc<A: DmaApi>(
        api: &mut A,
        ring: DeviceRing,
        size: RingSize,
        entry_bytes: u32,
    ) -> Result<Self, ApiError> {
        debug_assert!(entry_bytes.is_power_of_two() && u64::from(entry_bytes) <= PAGE);
        let bytes = u64::from(size.entries()) * u64::from(entry_bytes);
        let coherent = api.alloc_coherent(ring, bytes.div_ceil(PAGE) as usize)?;
        Ok(Self {
            coherent,
            size,
            entry_bytes,
        })
    }

    /// Frees the array. Retries a failure once, because the invalidation queue may have been full.
    ///
    /// # Errors
    /// Both attempts failed. The memory is lost, because the device may still access it.
    pub fn free<A: DmaApi>(self, api: &mut A, ring: DeviceRing) -> Result<(), ApiError> {
        api.free_coherent(ring, self.coherent)
            .or_else(|refused| api.free_coherent(ring, refused.memory))
            .map_err(|refused| refused.error)
    }

    /// Returns the address of the array for the device.
    pub fn base(&self) -> RingBase {
        RingBase {
            at: self.coherent.range().start(),
            size: self.size,
            entry_bytes: self.entry_bytes,
        }
    }

    /// Returns the number of entries.
    #[inline]
    pub const fn size(&self) -> RingSize {
        self.size
    }

    /// Returns the physical address of entry `counter`.
    ///
    /// # Errors
    /// Never fails for memory from [`alloc`](Self::alloc).
    #[inline]
    fn entry_address(&self, counter: u32) -> Result<PhysAddr, Unreachable> {
        let offset = u64::from(self.size.index(counter)) * u64::from(self.entry_bytes);
        let frame = self.coherent.frames().get((offset / PAGE) as usize);
        match frame {
            Some(frame) => Ok(frame.wrapping_add(offset % PAGE)),
            None => Err(Unreachable {
                at: PhysAddr::new(offset),
                bytes: u64::from(self.entry_bytes),
            }),
        }
    }

    /// Reads the first bytes of entry `counter`, modulo the size.
    ///
    /// # Errors
    /// The memory is not accessible.
    #[inline]
    pub fn read<M: ByteMemory>(
        &self,
        memory: &M,
        counter: u32,
        into: &mut [u8],
    ) -> Result<(), Unreachable> {
        memory.read(self.entry_address(counter)?, into)
    }

    /// Writes the first bytes of entry `counter`, modulo the size.
    ///
    /// # Errors
    /// The memory is not accessible.
    #[inline]
    pub fn write<M: ByteMemory>(
        &self,
        memory: &M,
        counter: u32,
        from: &[u8],
    ) -> Result<(), Unreachable> {
        memory.write(self.entry_address(counter)?, from)
    }
}

/// The array as the device accesses it: the values of its base and size registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingBase {
    /// Address of the first byte.
    pub at: Iova,
    /// Number of entries.
    pub size: RingSize,
    /// Bytes per entry.
    pub entry_bytes: u32,
}

impl RingBase {
    /// Returns the device address of entry `counter`, modulo the size.
    #[inline]
    pub const fn entry(&self, counter: u32) -> Iova {
        let index = self.size.index(counter) as u64;
        self.at.wrapping_add(index * self.entry_bytes as u64)
    }
}
