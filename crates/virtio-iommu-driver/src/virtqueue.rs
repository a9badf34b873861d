//! A split virtqueue (virtio 1.3, section 2.7) in one frame, as the driver uses it.
//!
//! The driver trusts only the words of the available ring, which only the driver writes. The used
//! ring is the device's: indices are checked against the chains in flight and masked, and the
//! caller checks ids and lengths against its requests.

use core::sync::atomic::{Ordering, fence};

use ringfence_types::{MemoryError, PageSize, PhysAddr, PhysMemory};

use crate::error::Failure;
use crate::transport::QueueParts;

/// Most descriptors of a queue. With 256, the next power of two, the descriptor table would fill
/// the frame that it shares with both rings.
pub(crate) const MOST_DESCRIPTORS: u16 = 128;

/// Bytes of a word of [`PhysMemory`].
const WORD: u64 = 8;
/// Bytes of `struct virtq_desc`.
const DESCRIPTOR_BYTES: u64 = 16;
/// `virtq_desc.flags`: another descriptor follows.
const NEXT: u64 = 1;
/// `virtq_desc.flags`: the device writes the buffer.
const WRITE: u64 = 2;
/// `virtq_avail.flags`: the driver polls and wants no interrupts.
const NO_INTERRUPT: u64 = 1;

/// A buffer of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Buffer {
    pub(crate) at: PhysAddr,
    pub(crate) bytes: u32,
    /// True if the device writes it.
    pub(crate) is_writable: bool,
}

/// An element of the used ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Used {
    /// Index of the first descriptor of the chain.
    pub(crate) head: u32,
    /// Bytes that the device claims to have written.
    pub(crate) bytes: u32,
}

/// A virtqueue. Free-running indices have 16 bits and wrap.
#[derive(Debug)]
pub(crate) struct Virtqueue {
    /// Number of the queue.
    number: u16,
    frame: PhysAddr,
    /// Number of descriptors, a power of two.
    size: u16,
    /// Index of the next available entry.
    next: u16,
    /// Index of available entries that the device knows.
    published: u16,
    /// Index of the next used element.
    seen: u16,
}

impl Virtqueue {
    /// Makes a queue of at most `most` descriptors in `frame`. `None` if the device has none.
    pub(crate) fn new(number: u16, frame: PhysAddr, most: u16) -> Option<Self> {
        let size = most.min(MOST_DESCRIPTORS).checked_ilog2()?;
        Some(Self {
            number,
            frame,
            size: 1 << size,
            next: 0,
            published: 0,
            seen: 0,
        })
    }

    pub(crate) const fn number(&self) -> u16 {
        self.number
    }

    pub(crate) const fn size(&self) -> u16 {
        self.size
    }

    pub(crate) fn parts(&self) -> QueueParts {
        QueueParts {
            size: self.size,
            descriptors: self.frame,
            available: self.available(),
            used: self.used(),
        }
    }

    fn available(&self) -> PhysAddr {
        let bytes = u64::from(self.size).wrapping_mul(DESCRIPTOR_BYTES);
        self.frame.wrapping_add(bytes)
    }

    /// The used ring begins in the middle of a word, so that each element is a whole word.
    fn used(&self) -> PhysAddr {
        let bytes = u64::from(self.size).wrapping_mul(2).wrapping_add(6);
        let after = self.available().wrapping_add(bytes.next_multiple_of(WORD));
        after.wrapping_add(WORD / 2)
    }

    /// Empties the queue. The device does not know it.
    pub(crate) fn clear(&mut self, memory: &impl PhysMemory) -> Result<(), MemoryError> {
        (self.next, self.published, self.seen) = (0, 0, 0);
        let words = PageSize::Size4K.bytes() / WORD;
        for word in memory.words(self.frame, words as usize)? {
            word.store(0, Ordering::Relaxed);
        }
        memory
            .word(self.available())?
            .store(NO_INTERRUPT, Ordering::Release);
        Ok(())
    }

    /// Makes a chain of `buffers` available, in the descriptors from `head` on. The device does not
    /// see it before [`publish`](Self::publish). The caller owns these descriptors.
    pub(crate) fn offer(
        &mut self,
        memory: &impl PhysMemory,
        head: u16,
        buffers: &[Buffer],
    ) -> Result<(), MemoryError> {
        let mut index = u64::from(head);
        let last = index.wrapping_add(buffers.len() as u64).wrapping_sub(1);
        for buffer in buffers {
            let mut flags = if buffer.is_writable { WRITE } else { 0 };
            let mut next = 0;
            if index < last {
                flags |= NEXT;
                next = index.wrapping_add(1);
            }
            let at = self
                .frame
                .wrapping_add(index.wrapping_mul(DESCRIPTOR_BYTES));
            let words = memory.words(at, 2)?;
            let values = [
                buffer.at.get(),
                u64::from(buffer.bytes) | flags << 32 | next << 48,
            ];
            for (word, value) in words.iter().zip(values) {
                word.store(value, Ordering::Relaxed);
            }
            index = index.wrapping_add(1);
        }
        // `ring` begins after `flags` and `idx`.
        let slot = self.next & self.size.wrapping_sub(1);
        let offset = u64::from(slot).wrapping_mul(2).wrapping_add(4);
        self.store16(memory, offset, head)?;
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    /// Shows the device all chains. Returns true if it did not know one of them.
    pub(crate) fn publish(&mut self, memory: &impl PhysMemory) -> Result<bool, MemoryError> {
        if self.published == self.next {
            return Ok(false);
        }
        // Section 2.7.13.3: the device sees the entries before the index.
        fence(Ordering::SeqCst);
        self.store16(memory, 2, self.next)?;
        self.published = self.next;
        // Section 2.7.13.4: the device sees the index before the caller notifies it.
        fence(Ordering::SeqCst);
        Ok(true)
    }

    /// Stores 16 bits of the available ring, which only the driver writes.
    fn store16(
        &self,
        memory: &impl PhysMemory,
        offset: u64,
        value: u16,
    ) -> Result<(), MemoryError> {
        let at = self.available().wrapping_add(offset);
        let shift = at.offset_in(WORD).wrapping_mul(8) as u32;
        let word = memory.word(at.align_down(WORD))?;
        let others = word.load(Ordering::Relaxed) & !(0xffff_u64.wrapping_shl(shift));
        word.store(
            others | u64::from(value).wrapping_shl(shift),
            Ordering::Release,
        );
        Ok(())
    }

    /// Returns the next used element; `None` if the device has added none. `in_flight` is the
    /// number of chains that the device owns.
    ///
    /// # Errors
    /// [`Failure::UsedIndex`] if the used ring claims more than `in_flight` new elements;
    /// [`Failure::Memory`].
    pub(crate) fn next_used(
        &mut self,
        memory: &impl PhysMemory,
        in_flight: u16,
    ) -> Result<Option<Used>, Failure> {
        // The word before the first element holds `flags` and `idx` in its upper half.
        let word = self.used().align_down(WORD);
        let index = memory.word(word)?.load(Ordering::Acquire).wrapping_shr(48) as u16;
        let new = index.wrapping_sub(self.seen);
        if new == 0 {
            return Ok(None);
        }
        if new > in_flight {
            return Err(Failure::UsedIndex);
        }
        let slot = u64::from(self.seen & self.size.wrapping_sub(1));
        let element = word.wrapping_add(slot.wrapping_add(1).wrapping_mul(WORD));
        let value = memory.word(element)?.load(Ordering::Acquire);
        self.seen = self.seen.wrapping_add(1);
        Ok(Some(Used {
            head: value as u32,
            bytes: (value >> 32) as u32,
        }))
    }
}
