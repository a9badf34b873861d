//! Buffers and the pools they come from.

use core::fmt;

use ringfence_types::{PhysAddr, PhysRange};

/// A buffer of a [`Pool`], as a token that cannot be copied: who holds it may touch the memory. A
/// driver gives it away when it maps it, and has it again when the mapping layer hands it up.
/// Dropped, the memory is lost to its pool, which is safe.
#[derive(Debug, PartialEq, Eq)]
pub struct Buffer(PhysAddr);

impl Buffer {
    /// First byte.
    #[inline]
    pub const fn start(&self) -> PhysAddr {
        self.0
    }
}

/// What stands for a buffer inside a mapping layer: the `B` of [`Dma`](ringfence_dma::Dma).
pub trait BufferOwner: Sized {
    /// Takes a buffer into custody.
    fn hold(buffer: Buffer) -> Self;
    /// Hands it up again.
    fn release(self) -> Buffer;
}

impl BufferOwner for Buffer {
    #[inline]
    fn hold(buffer: Buffer) -> Self {
        buffer
    }

    #[inline]
    fn release(self) -> Buffer {
        self
    }
}

/// The buffer's address, for layers whose buffers are numbers.
impl BufferOwner for u64 {
    #[inline]
    fn hold(buffer: Buffer) -> Self {
        buffer.0.get()
    }

    #[inline]
    fn release(self) -> Buffer {
        Buffer(PhysAddr::new(self))
    }
}

/// Buffers of one size in one region of memory, last in, first out.
#[derive(Debug)]
pub struct Pool {
    region: PhysRange,
    slot_bytes: u64,
    free: Vec<Buffer>,
    slots: usize,
}

/// Why there is no pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolError {
    /// The region.
    pub region: PhysRange,
    /// Size of one buffer in bytes, which is zero or does not fit the region.
    pub slot_bytes: u64,
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no buffers of {} bytes in {}",
            self.slot_bytes, self.region
        )
    }
}

impl core::error::Error for PoolError {}

impl Pool {
    /// As many buffers of `slot_bytes` bytes as fit `region`, which nothing else uses.
    ///
    /// # Errors
    /// [`PoolError`]: not even one fits.
    pub fn new(region: PhysRange, slot_bytes: u64) -> Result<Self, PoolError> {
        let slots = region.bytes().checked_div(slot_bytes).unwrap_or(0);
        if slots == 0 {
            return Err(PoolError { region, slot_bytes });
        }
        // The last one in front, so that the first one is taken first.
        let free: Vec<_> = (0..slots)
            .rev()
            .map(|slot| Buffer(region.start().wrapping_add(slot * slot_bytes)))
            .collect();
        Ok(Self {
            region,
            slot_bytes,
            slots: free.len(),
            free,
        })
    }

    /// A free buffer.
    #[inline]
    pub fn alloc(&mut self) -> Option<Buffer> {
        self.free.pop()
    }

    /// Takes a buffer back.
    ///
    /// # Errors
    /// It is not one of this pool.
    #[inline]
    pub fn free(&mut self, buffer: Buffer) -> Result<(), Buffer> {
        if !self.region.contains_address(buffer.0) {
            return Err(buffer);
        }
        self.free.push(buffer);
        Ok(())
    }

    /// The first `bytes` bytes of a buffer of this pool; `None` if there are none or the buffer is
    /// smaller.
    #[inline]
    pub fn range(&self, buffer: &Buffer, bytes: u64) -> Option<PhysRange> {
        if bytes > self.slot_bytes {
            return None;
        }
        PhysRange::new(buffer.0, bytes)
    }

    /// Size of a buffer in bytes.
    #[inline]
    pub const fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// How many buffers there are.
    #[inline]
    pub const fn slots(&self) -> usize {
        self.slots
    }

    /// How many of them are not in the pool.
    #[inline]
    pub fn in_use(&self) -> usize {
        self.slots.saturating_sub(self.free.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_once_and_go_home() {
        let region = PhysRange::new(PhysAddr::new(0x1000), 0x2800).unwrap();
        let mut pool = Pool::new(region, 0x1000).unwrap();
        let (a, b) = (pool.alloc().unwrap(), pool.alloc().unwrap());
        assert_eq!((a.start().get(), b.start().get()), (0x1000, 0x2000));
        assert_eq!(pool.alloc(), None);
        assert_eq!(pool.range(&a, 0x1001), None);
        assert_eq!(pool.range(&a, 0), None);
        assert_eq!(pool.in_use(), 2);
        assert_eq!(pool.free(a), Ok(()));
        let stranger = Buffer(PhysAddr::new(0x8000));
        assert!(pool.free(stranger).is_err());
        assert_eq!(
            <u64 as BufferOwner>::hold(b).release().start().get(),
            0x2000
        );
        assert!(Pool::new(region, 0).is_err());
        assert!(Pool::new(region, 0x2801).is_err());
    }
}
