//! Buffers of a pool that stays mapped: a DMA neither maps nor unmaps anything (Markuze, Smolyar,
//! Morrison and Tsafrir, "DAMN", ASPLOS 2018).
//!
//! A driver takes its buffers from the pool of a [`LendingSpace`]. The device reaches the pool at
//! all times, and the pool's pages hold nothing else. So a map is the address of the buffer, and an
//! unmap costs nothing. The price: after the unmap, the device may still change the bytes. The
//! driver therefore gets them only by copying, each byte once, so that no byte changes between its
//! check and its use (TOCTTOU):
//!
//! ```text
//! pool --alloc_buffer--> PoolBuffer --for_device--> PostedBuffer --unmap--> ReceivedBuffer
//!   ^                    |  ^  fill_buffer                                  |  read_buffer, skip
//!   +----free_buffer-----+  +----------------into_buffer--------------------+
//! ```
//!
//! The device may read what the driver writes into a buffer from the write on, not only after
//! `for_device`. Departures from the paper: the driver, not the kernel's packet structure, copies;
//! and a buffer has whole pages of its own.

use core::fmt;

use ringfence_types::{Direction, DomainId, Iova, IovaRange, MemoryError, PhysAddr};

use crate::copy::{read, write};
use crate::domain_table::domain_index;
use crate::flush::FlushPolicy;
use crate::map::map_error;
use crate::space::{LendingSpace, LentSlot, Space};
use crate::token::{Attachment, DomainHandle};
use crate::{Cpu, Dma, MapError, MapReason, Platform};

/// A buffer of a pool that the CPU owns.
#[must_use = "a dropped buffer stays in use until its device is detached"]
#[derive(Debug, PartialEq, Eq)]
pub struct PoolBuffer {
    range: IovaRange,
    start: PhysAddr,
    domain_handle: DomainHandle,
    direction: Direction,
}

/// A buffer of a pool that the device owns. Only this state has an address for the device.
#[must_use = "a dropped buffer stays in use until its device is detached"]
#[derive(Debug, PartialEq, Eq)]
pub struct PostedBuffer(PoolBuffer);

/// A buffer of a pool after its unmap. The device may still change its bytes.
#[must_use = "a dropped buffer stays in use until its device is detached"]
#[derive(Debug, PartialEq, Eq)]
pub struct ReceivedBuffer {
    buffer: PoolBuffer,
    /// Offset of the first byte that was neither read nor skipped.
    next: u64,
    /// Number of bytes that the device wrote, as its driver states.
    received: u64,
}

/// An unmap with more received bytes than the buffer has.
#[derive(Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct TooManyReceived {
    pub received: u64,
    /// The unchanged buffer.
    pub buffer: PostedBuffer,
}

impl fmt::Display for TooManyReceived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (received, range) = (self.received, self.buffer.range());
        write!(f, "{received} bytes received exceed the buffer at {range}")
    }
}

impl core::error::Error for TooManyReceived {}

/// The reason why bytes of a buffer were neither read nor written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PoolBufferError {
    /// The part exceeds the buffer, or the received bytes that are left.
    Outside {
        /// Bytes of the part.
        bytes: u64,
        /// Bytes that are left from its first byte on.
        left: u64,
    },
    /// The buffer's domain was detached or belongs to another layer. The memory may have another
    /// use by now.
    Detached,
    /// A part of the pool lies outside memory.
    Memory(MemoryError),
}

impl fmt::Display for PoolBufferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside { bytes, left } => {
                write!(f, "{bytes} bytes exceed the {left} that are left")
            }
            Self::Detached => f.write_str("the domain of the buffer is detached"),
            Self::Memory(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for PoolBufferError {}

impl PoolBuffer {
    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.range.bytes()
    }

    /// Returns the direction.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Transfers the buffer to the device.
    #[inline]
    pub fn for_device(self) -> PostedBuffer {
        PostedBuffer(self)
    }
}

impl PostedBuffer {
    /// Returns the DMA address for the device.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.0.range.start()
    }

    /// Returns the mapped bytes of the I/O virtual address space.
    pub fn range(&self) -> IovaRange {
        self.0.range
    }

    /// Returns the direction.
    pub fn direction(&self) -> Direction {
        self.0.direction
    }

    /// Returns the domain of the pool.
    pub fn domain(&self) -> DomainId {
        self.0.domain_handle.domain()
    }

    /// Transfers the buffer to the CPU after the device has completed it. `received` is the number
    /// of bytes that the device wrote. A device that only reads the buffer wrote none.
    ///
    /// # Errors
    /// The device reports more bytes than the buffer has.
    #[inline]
    pub fn unmap(self, received: u64) -> Result<ReceivedBuffer, TooManyReceived> {
        let writes = self.0.direction != Direction::ToDevice;
        if received > self.0.bytes() || received > 0 && !writes {
            return Err(TooManyReceived {
                received,
                buffer: self,
            });
        }
        Ok(ReceivedBuffer {
            buffer: self.0,
            next: 0,
            received,
        })
    }
}

impl ReceivedBuffer {
    /// Returns the number of received bytes that were neither read nor skipped.
    pub fn left(&self) -> u64 {
        self.received.saturating_sub(self.next)
    }

    /// Skips received bytes, at most those that are left.
    pub fn skip(&mut self, bytes: u64) {
        self.next = self.next.saturating_add(bytes).min(self.received);
    }

    /// Ends the use of the received bytes. The driver fills or posts the buffer again, or frees it.
    #[inline]
    pub fn into_buffer(self) -> PoolBuffer {
        self.buffer
    }
}

impl<S: Space + LendingSpace, F: FlushPolicy<S, B>, B> Dma<S, F, B> {
    /// Takes a buffer of `bytes` bytes from the pool of the device's space. The device already
    /// reaches it. Its bytes are zeroes, or those of earlier buffers of this device and direction.
    ///
    /// # Errors
    /// [`MapReason::Shadow`] if the pool has no such buffer: try again after
    /// [`free_buffer`](Self::free_buffer). The layer is unchanged.
    #[inline]
    pub fn alloc_buffer<P: Platform>(
        &self,
        cpu: &mut Cpu<S, F, B>,
        platform: &mut P,
        at: &Attachment,
        bytes: u64,
        direction: Direction,
    ) -> Result<PoolBuffer, MapError> {
        self.refresh_if_stale(cpu);
        let Some((space, own)) = self.space_and_cpu(&mut cpu.spaces, at) else {
            return Err(map_error(at, None, MapReason::NotAttached));
        };
        let permissions = direction.permissions();
        match space.lend(own, platform, bytes, permissions, at.limits) {
            Ok(LentSlot { range, memory }) => Ok(PoolBuffer {
                range,
                start: memory.start(),
                domain_handle: at.domain_handle,
                direction,
            }),
            Err(reason) => Err(map_error(at, None, reason)),
        }
    }

    /// Copies `from` into the buffer, from byte `offset` on.
    ///
    /// # Errors
    /// See [`PoolBufferError`]. Nothing was written.
    #[inline]
    pub fn fill_buffer<P: Platform>(
        &self,
        platform: &P,
        buffer: &mut PoolBuffer,
        offset: u64,
        from: &[u8],
    ) -> Result<(), PoolBufferError> {
        let left = buffer.bytes().saturating_sub(offset);
        let at = self.part(buffer, offset, from.len() as u64, left)?;
        write(platform.memory(), at, from).map_err(PoolBufferError::Memory)
    }

    /// Copies the next received bytes into `into`. No byte is copied twice: the device may change
    /// the buffer, but not what the driver has read.
    ///
    /// # Errors
    /// See [`PoolBufferError`]. Nothing was read.
    #[inline]
    pub fn read_buffer<P: Platform>(
        &self,
        platform: &P,
        from: &mut ReceivedBuffer,
        into: &mut [u8],
    ) -> Result<(), PoolBufferError> {
        let bytes = into.len() as u64;
        let at = self.part(&from.buffer, from.next, bytes, from.left())?;
        read(platform.memory(), at, into).map_err(PoolBufferError::Memory)?;
        from.skip(bytes);
        Ok(())
    }

    /// Returns the address of a part of a buffer, of which `left` bytes are left.
    #[inline]
    fn part(
        &self,
        buffer: &PoolBuffer,
        offset: u64,
        bytes: u64,
        left: u64,
    ) -> Result<PhysAddr, PoolBufferError> {
        if self.domains.space_of(buffer.domain_handle).is_none() {
            return Err(PoolBufferError::Detached);
        }
        if bytes > left {
            return Err(PoolBufferError::Outside { bytes, left });
        }
        Ok(buffer.start.wrapping_add(offset))
    }

    /// Returns a buffer to its pool. The device keeps its access. If the domain was detached since,
    /// the buffer's memory has left the layer with the space, and the call does nothing.
    ///
    /// # Errors
    /// Returns a buffer of another layer.
    #[inline]
    pub fn free_buffer(
        &self,
        cpu: &mut Cpu<S, F, B>,
        buffer: PoolBuffer,
    ) -> Result<(), PoolBuffer> {
        self.refresh_if_stale(cpu);
        let handle = buffer.domain_handle;
        let own = cpu.spaces.get_mut(domain_index(handle.domain()));
        let parts = self
            .domains
            .space_of(handle)
            .zip(own.and_then(Option::as_mut));
        match parts {
            Some((space, own)) => space.take_back(own, buffer.range).map_err(|_| buffer),
            None if self.domains.is_stale(handle) => Ok(()),
            None => Err(buffer),
        }
    }
}
