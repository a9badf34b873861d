//! A descriptor chain as two lists of segments. They are read from the ring once and stay valid
//! while the device waits.

use std::ops::Deref;
use std::sync::atomic::Ordering;

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory, GuestMemoryError};

use super::QueueBroken;

/// Most descriptors of one chain. A longer chain is malformed.
pub const MAX_SEGMENTS: usize = 256;

/// A contiguous range of guest memory, as the device addresses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainSegment {
    /// First address of the segment, an IOVA if the device is behind an IOMMU.
    pub start: GuestAddress,
    /// Length in bytes.
    pub bytes: u32,
}

/// A descriptor chain. Each access to its memory translates the addresses again.
#[derive(Debug)]
pub struct Chain {
    /// Index of the head descriptor, for the used ring.
    pub head: u16,
    /// Device-readable segments, in order.
    pub readable: Segments,
    /// Device-writable segments, in order.
    pub writable: Segments,
    /// True if the chain has more than [`MAX_SEGMENTS`] descriptors, or a readable one after a
    /// writable one. The device must not use such a chain.
    pub malformed: bool,
}

impl Chain {
    /// Takes the next available chain. `None` if the available ring is empty.
    ///
    /// # Errors
    /// [`QueueBroken`] if part of the ring is inaccessible, or if the ring announces more chains
    /// than it can hold.
    pub fn next<M: GuestMemory>(
        queue: &mut Queue,
        memory: &M,
    ) -> Result<Option<Self>, QueueBroken> {
        let announced = queue.avail_idx(memory, Ordering::Acquire)?.0 != queue.next_avail();
        let next = queue.iter(memory)?.next().map(Self::collect);
        // The iterator ends silently at an entry that it cannot read. Without this error the device
        // would retry forever.
        if next.is_none() && announced {
            return Err(QueueBroken(virtio_queue::Error::InvalidAvailRingIndex));
        }
        Ok(next)
    }

    fn collect<M>(chain: DescriptorChain<M>) -> Self
    where
        M: Deref,
        M::Target: GuestMemory,
    {
        let head = chain.head_index();
        let mut readable = Segments::default();
        let mut writable = Segments::default();
        let mut malformed = false;
        let mut seen = 0;
        for descriptor in chain {
            seen += 1;
            if seen > MAX_SEGMENTS {
                malformed = true;
                break;
            }
            let segment = ChainSegment {
                start: descriptor.addr(),
                bytes: descriptor.len(),
            };
            if descriptor.is_write_only() {
                writable.segments.push(segment);
            } else {
                malformed |= !writable.segments.is_empty();
                readable.segments.push(segment);
            }
        }
        Self {
            head,
            readable,
            writable,
            malformed,
        }
    }
}

/// A list of guest memory segments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segments {
    segments: Vec<ChainSegment>,
}

impl FromIterator<ChainSegment> for Segments {
    fn from_iter<T: IntoIterator<Item = ChainSegment>>(segments: T) -> Self {
        Self {
            segments: segments.into_iter().collect(),
        }
    }
}

impl Segments {
    /// Returns the total length in bytes.
    pub fn bytes(&self) -> u64 {
        self.segments.iter().map(|s| u64::from(s.bytes)).sum()
    }

    /// Iterates over the segments in order.
    pub fn iter(&self) -> impl Iterator<Item = &ChainSegment> {
        self.segments.iter()
    }

    /// Removes and returns the first `bytes` bytes. `None` if the list is shorter.
    pub fn take_front(&mut self, bytes: u32) -> Option<Self> {
        if self.bytes() < u64::from(bytes) {
            return None;
        }
        let mut left = bytes;
        let mut segments = Vec::new();
        while left > 0 {
            let first = self.segments.first_mut()?;
            let part = first.bytes.min(left);
            segments.push(ChainSegment {
                start: first.start,
                bytes: part,
            });
            left -= part;
            if part == first.bytes {
                self.segments.remove(0);
            } else {
                first.bytes -= part;
                // Nothing is mapped beyond the end of the address space.
                first.start = GuestAddress(first.start.raw_value().wrapping_add(part.into()));
            }
        }
        Some(Self { segments })
    }

    /// Removes and returns the last byte, where block devices write their status. `None` if the
    /// list is empty.
    pub fn take_last_byte(&mut self) -> Option<Self> {
        while self.segments.last().is_some_and(|last| last.bytes == 0) {
            self.segments.pop();
        }
        let last = self.segments.last_mut()?;
        last.bytes = last.bytes.checked_sub(1)?;
        let start = last.start.checked_add(last.bytes.into())?;
        Some(Self {
            segments: vec![ChainSegment { start, bytes: 1 }],
        })
    }

    /// Copies from guest memory to `to`, up to the shorter of both lengths.
    ///
    /// # Errors
    /// The error of the first access that fails.
    pub fn read<M: GuestMemory>(&self, memory: &M, to: &mut [u8]) -> Result<(), GuestMemoryError> {
        let mut rest = to;
        for segment in &self.segments {
            let (part, more) = rest.split_at_mut((segment.bytes as usize).min(rest.len()));
            memory.read_slice(part, segment.start)?;
            rest = more;
        }
        Ok(())
    }

    /// Copies `from` to guest memory, up to the shorter of both lengths.
    ///
    /// # Errors
    /// The error of the first access that fails.
    pub fn write<M: GuestMemory>(&self, memory: &M, from: &[u8]) -> Result<(), GuestMemoryError> {
        let mut rest = from;
        for segment in &self.segments {
            let (part, more) = rest.split_at((segment.bytes as usize).min(rest.len()));
            if part.is_empty() {
                continue;
            }
            memory.write_slice(part, segment.start)?;
            rest = more;
        }
        Ok(())
    }
}
