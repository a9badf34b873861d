//! Buffers and their pools.

use std::collections::VecDeque;

use ringfence_types::{PhysAddr, PhysRange};

/// A buffer of a [`Pool`], as a token that cannot be copied: its owner may access the memory. The
/// driver gives up the token when it maps the buffer, and gets it back when the mapping layer
/// returns it. Dropping it leaks the memory from its pool, which is safe.
#[derive(Debug, PartialEq, Eq)]
pub struct Buffer(PhysAddr);

impl Buffer {
    /// Returns the address of the first byte.
    #[inline]
    pub const fn start(&self) -> PhysAddr {
        self.0
    }
}

/// Representation of a buffer inside a mapping layer: the `B` of [`Dma`](ringfence_dma::Dma).
pub trait BufferOwner: Sized {
    /// Converts a buffer for the layer.
    fn hold(buffer: Buffer) -> Self;
    /// Converts back to the buffer.
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

/// The buffer's address, for layers that identify buffers by number.
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

/// Order in which a pool reuses its buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReuseOrder {
    /// Last in, first out: the CPU's caches may still hold the buffer.
    #[default]
    LastIn,
    /// First in, first out: neighbours are in use at the same time.
    FirstIn,
}

/// A pool of buffers of one size in one region of memory. Last in, first out, unless it is created
/// [otherwise](Self::with_order).
#[derive(Debug)]
pub struct Pool {
    region: PhysRange,
    slot_bytes: u64,
    free: VecDeque<Buffer>,
    order: ReuseOrder,
    slots: usize,
}

/// Error: a region has no room for a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{region} has no room for a buffer of {slot_bytes} bytes")]
pub struct PoolError {
    /// Region of the pool.
    pub region: PhysRange,
    /// Size of one buffer in bytes, which is zero or exceeds the region.
    pub slot_bytes: u64,
}

impl Pool {
    /// Creates a pool with as many buffers of `slot_bytes` bytes as fit `region`. The pool must be
    /// the only user of the region.
    ///
    /// # Errors
    /// [`PoolError`]: not even one buffer fits.
    pub fn new(region: PhysRange, slot_bytes: u64) -> Result<Self, PoolError> {
        let slots = region.bytes().checked_div(slot_bytes).unwrap_or(0);
        if slots == 0 {
            return Err(PoolError { region, slot_bytes });
        }
        // Reverse order, so that the pool allocates the first buffer first.
        let free: VecDeque<_> = (0..slots)
            .rev()
            .map(|slot| Buffer(region.start().wrapping_add(slot * slot_bytes)))
            .collect();
        Ok(Self {
            region,
            slot_bytes,
            slots: free.len(),
            free,
            order: ReuseOrder::LastIn,
        })
    }

    /// Reuses buffers in `order` from now on.
    #[must_use]
    pub fn with_order(mut self, order: ReuseOrder) -> Self {
        self.order = order;
        self
    }

    /// Allocates a buffer; `None` if the pool is empty.
    #[inline]
    pub fn alloc(&mut self) -> Option<Buffer> {
        self.free.pop_back()
    }

    /// Returns a buffer to the pool.
    ///
    /// # Errors
    /// Returns the buffer if it is outside the pool's region.
    #[inline]
    pub fn free(&mut self, buffer: Buffer) -> Result<(), Buffer> {
        if !self.region.contains_address(buffer.0) {
            return Err(buffer);
        }
        match self.order {
            ReuseOrder::LastIn => self.free.push_back(buffer),
            ReuseOrder::FirstIn => self.free.push_front(buffer),
        }
        Ok(())
    }

    /// Returns the first `bytes` bytes of a buffer of this pool; `None` if `bytes` is 0 or the
    /// buffer is smaller.
    #[inline]
    pub fn range(&self, buffer: &Buffer, bytes: u64) -> Option<PhysRange> {
        if bytes > self.slot_bytes {
            return None;
        }
        PhysRange::new(buffer.0, bytes)
    }

    /// Returns the size of a buffer in bytes.
    #[inline]
    pub const fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Returns the number of buffers.
    #[inline]
    pub const fn slots(&self) -> usize {
        self.slots
    }

    /// Returns the number of allocated buffers.
    #[inline]
    pub fn in_use(&self) -> usize {
        self.slots.saturating_sub(self.free.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_allocated_once_and_returned() {
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
