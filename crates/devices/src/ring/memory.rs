//! The array of a ring, as each side reaches it.

use ringfence_dma::Coherent;
use ringfence_types::{Iova, PageSize, PhysAddr};

use super::RingSize;
use crate::api::{ApiError, DeviceRing, DmaApi};
use crate::{ByteMemory, Unreachable};

const PAGE: u64 = PageSize::Size4K.bytes();

/// The array as its driver reaches it: through the frames of coherent memory.
#[derive(Debug)]
pub struct RingMemory {
    coherent: Coherent,
    size: RingSize,
    entry_bytes: u32,
}

impl RingMemory {
    /// Allocates an array of `size` entries of `entry_bytes` bytes, a power of two up to a page, so
    /// that no entry lies on two pages.
    ///
    /// # Errors
    /// The allocation's.
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

    /// Frees it; where that fails it tries once more, since an invalidation may fail for want of
    /// room.
    ///
    /// # Errors
    /// It failed twice: the memory is lost, because the device may still reach it.
    pub fn free<A: DmaApi>(self, api: &mut A, ring: DeviceRing) -> Result<(), ApiError> {
        api.free_coherent(ring, self.coherent)
            .or_else(|refused| api.free_coherent(ring, refused.memory))
            .map_err(|refused| refused.error)
    }

    /// Where the device finds it.
    pub fn base(&self) -> RingBase {
        RingBase {
            at: self.coherent.range().start(),
            size: self.size,
            entry_bytes: self.entry_bytes,
        }
    }

    /// How many entries.
    #[inline]
    pub const fn size(&self) -> RingSize {
        self.size
    }

    /// Where entry `counter` lies for the processor.
    ///
    /// # Errors
    /// Never for memory as [`alloc`](Self::alloc) makes it.
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
    /// Memory's.
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
    /// Memory's.
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

/// The array as its device reaches it: what a driver writes into the base and size registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingBase {
    /// First byte.
    pub at: Iova,
    /// How many entries.
    pub size: RingSize,
    /// Bytes of one.
    pub entry_bytes: u32,
}

impl RingBase {
    /// Where entry `counter`, modulo the size, lies for the device.
    #[inline]
    pub const fn entry(&self, counter: u32) -> Iova {
        let index = self.size.index(counter) as u64;
        self.at.wrapping_add(index * self.entry_bytes as u64)
    }
}
