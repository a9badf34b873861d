//! A descriptor chain as two lists of segments, taken once and kept while the device waits.

use std::ops::Deref;
use std::sync::atomic::Ordering;

use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory, GuestMemoryError};

use super::QueueBroken;

/// Most descriptors of one chain that are looked at. A longer chain is refused.
pub const MAX_SEGMENTS: usize = 256;

/// A run of bytes in the device's view of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainSegment {
    /// First address.
    pub start: GuestAddress,
    /// Bytes.
    pub bytes: u32,
}

/// A chain: its addresses are looked up again at each access.
#[derive(Debug)]
pub struct Chain {
    /// What the used ring calls it.
    pub head: u16,
    /// What the device reads, in order.
    pub readable: Segments,
    /// What it writes, in order.
    pub writable: Segments,
    /// It has more than [`MAX_SEGMENTS`] descriptors, or readable ones after writable ones: nothing
    /// of it is to be used.
    pub malformed: bool,
}

impl Chain {
    /// The next chain that the driver has made available.
    ///
    /// # Errors
    /// [`QueueBroken`] if the ring, or a part of it, is out of reach, or claims more than it can
    /// hold.
    pub fn next<M: GuestMemory>(
        queue: &mut Queue,
        memory: &M,
    ) -> Result<Option<Self>, QueueBroken> {
        let announced = queue.avail_idx(memory, Ordering::Acquire)?.0 != queue.next_avail();
        let next = queue.iter(memory)?.next().map(Self::collect);
        // The iterator ends without a word at an entry that it cannot read. A device that looks
        // again for what is announced would look for ever.
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

/// Bytes of guest memory in pieces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Segments {
    segments: Vec<ChainSegment>,
}

impl Segments {
    /// Bytes of all.
    pub fn bytes(&self) -> u64 {
        self.segments.iter().map(|s| u64::from(s.bytes)).sum()
    }

    /// The pieces in order.
    pub fn iter(&self) -> impl Iterator<Item = &ChainSegment> {
        self.segments.iter()
    }

    /// Takes the first `bytes` off. None if there are fewer.
    pub fn take_front(&mut self, bytes: u32) -> Option<Self> {
        if self.bytes() < u64::from(bytes) {
            return None;
        }
        let mut left = bytes;
        let mut front = Vec::new();
        while left > 0 {
            let first = self.segments.first_mut()?;
            let part = first.bytes.min(left);
            front.push(ChainSegment {
                start: first.start,
                bytes: part,
            });
            left -= part;
            if part == first.bytes {
                self.segments.remove(0);
            } else {
                first.bytes -= part;
                // Past the end of the address space nothing is mapped.
                first.start = GuestAddress(first.start.raw_value().wrapping_add(part.into()));
            }
        }
        Some(Self { segments: front })
    }

    /// Takes the last byte off: where devices put their status.
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

    /// Copies out of guest memory; `to` is as long as all segments together.
    ///
    /// # Errors
    /// What the memory says, at the first address that may not be read.
    pub fn read<M: GuestMemory>(&self, memory: &M, to: &mut [u8]) -> Result<(), GuestMemoryError> {
        let mut rest = to;
        for segment in &self.segments {
            let (part, more) = rest.split_at_mut((segment.bytes as usize).min(rest.len()));
            memory.read_slice(part, segment.start)?;
            rest = more;
        }
        Ok(())
    }

    /// Copies into guest memory, as far as `from` reaches.
    ///
    /// # Errors
    /// What the memory says, at the first address that may not be written.
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
