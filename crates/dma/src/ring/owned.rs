//! A ring that one driver on one processor owns: no lock, no token a mapping, one burst.

use alloc::vec::Vec;
use core::fmt;
use core::mem::ManuallyDrop;

use ringfence_pgtable::RingWords;
use ringfence_types::{
    Batch, DeviceId, Direction, DomainId, Flushed, Invalidation, InvalidationError, Invalidator,
    Iova, IovaRange, Pending, PhysMemory, PhysRange, RingId, RingIova,
};

use super::error::RingError;
use super::lines::Lines;
use super::table::{Ring, Run};
use crate::MapReason;
use crate::flush::Withheld;
use crate::mapping::Custody;
use crate::space::UnmapRefusal;

/// A [`Ring`] and the buffers that are in its keeping. Unmapped buffers come back when their burst ends, after one invalidation for all
/// of them; there is no other way to them. What is withheld when it is dropped is leaked: the device may still reach it.
#[derive(Debug)]
pub struct OwnedRing<'m, B> {
    ring: Ring,
    lines: Lines,
    /// The ring's table, kept mapped.
    entries: &'m [RingWords],
    device: DeviceId,
    domain: DomainId,
    burst: Cleared,
    withheld: Vec<Custody<B>>,
}

/// A live mapping of an [`OwnedRing`]; owns the driver's buffer, and leaks it if dropped.
#[must_use = "a mapping that is dropped stays reachable by the device for ever"]
#[derive(Debug, PartialEq, Eq)]
pub struct RingMapping<B> {
    /// Behind the buffer's last byte: slot and length in one word, since offsets count from the buffer's start.
    end: RingIova,
    domain: DomainId,
    buffer: Custody<B>,
}

impl<B> RingMapping<B> {
    /// What the device is told: the buffer's first byte. A driver may move the offset within the buffer (section 4, "Software").
    #[inline]
    pub fn iova(&self) -> Iova {
        RingIova::start(self.end.ring(), self.end.slot()).iova()
    }

    /// The device-visible bytes.
    #[inline]
    pub fn range(&self) -> Option<IovaRange> {
        IovaRange::new(self.iova(), u64::from(self.end.offset()))
    }

    /// What stands for the buffer.
    #[inline]
    pub fn buffer(&self) -> &B {
        &self.buffer
    }

    /// A mapping of `ring` from what a driver remembers of it, for embedders whose interface passes addresses; `None` if no slot takes
    /// that many bytes, or no buffer begins there. What is not mapped is refused by unmap.
    #[inline]
    pub fn claim(ring: &OwnedRing<'_, B>, range: IovaRange, buffer: B) -> Option<Self> {
        let start = RingIova::from(range.start());
        let bytes = u32::try_from(range.bytes()).ok()?;
        if start.offset() != 0 {
            return None;
        }
        Some(Self {
            end: RingIova::new(start.ring(), start.slot(), bytes)?,
            domain: ring.domain,
            buffer: ManuallyDrop::new(buffer),
        })
    }
}

/// A mapping that was not unmapped: none of this ring is live exactly there. Nothing has changed.
#[derive(Debug)]
pub struct RingUnmapError<B>(pub RingMapping<B>);

impl<B> fmt::Display for RingUnmapError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mapping = &self.0;
        write!(
            f,
            "no mapping of {} bytes at {} in this ring",
            mapping.end.offset(),
            mapping.iova()
        )
    }
}

impl<B: fmt::Debug> core::error::Error for RingUnmapError<B> {}

/// The slots of one ring that were unmapped in the open burst, as runs: a driver that unmaps in order has one. The run that unmaps are at
/// is the ring's until the burst ends.
#[derive(Debug)]
struct Cleared {
    domain: DomainId,
    ring: RingId,
    runs: Vec<Run>,
}

impl Cleared {
    fn release(this: Flushed<Self>, ring: &mut Ring) -> Self {
        let mut cleared = this.into_batch();
        for run in cleared.runs.drain(..) {
            ring.release_run(run.first, run.slots());
        }
        cleared
    }
}

impl Batch for Cleared {
    fn covered_by(&self, request: &Invalidation) -> bool {
        request.covers(self.domain, &self.ring.pages())
    }
}

impl<'m, B> OwnedRing<'m, B> {
    /// The ring of `device`, whose context entry names `domain`, in `mem`. No other device is in that domain.
    ///
    /// # Errors
    /// [`RingError::Memory`]: the table is not in `mem`.
    pub fn new<M: PhysMemory + ?Sized>(
        ring: Ring,
        mem: &'m M,
        domain: DomainId,
        device: DeviceId,
    ) -> Result<Self, RingError> {
        let words = mem.words(ring.table().base(), ring.slots() as usize * 2);
        let (entries, _) = words.map_err(|_| RingError::Memory)?.as_chunks();
        let burst = Cleared {
            domain,
            ring: ring.id(),
            runs: Vec::new(),
        };
        Ok(Self {
            ring,
            lines: Lines::none(),
            entries,
            device,
            domain,
            burst,
            withheld: Vec::new(),
        })
    }

    /// The ring.
    #[inline]
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Makes the bytes of `memory` reachable by the device in `direction`, and takes `buffer` into custody. The device may be told of it
    /// after [`doorbell`](Self::doorbell).
    ///
    /// # Errors
    /// The buffer comes back. [`MapReason::RingFull`] is back-pressure: try again later.
    #[inline(always)]
    pub fn map<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        buffer: B,
        memory: &PhysRange,
        direction: Direction,
    ) -> Result<RingMapping<B>, (B, MapReason)> {
        let permissions = direction.permissions();
        let bytes = memory.bytes();
        let (entries, lines) = (self.entries, &mut self.lines);
        match self.ring.map_in(entries, mem, lines, memory, permissions) {
            Ok(start) => Ok(RingMapping {
                // The entry took 30 bits of length.
                end: start.iova().wrapping_add(bytes).into(),
                domain: self.domain,
                buffer: ManuallyDrop::new(buffer),
            }),
            Err(reason) => Err((buffer, reason)),
        }
    }

    /// Makes what was mapped visible to a walker that does not snoop, line by line. Nothing is to be done where it does.
    #[inline]
    pub fn doorbell<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        self.lines.sync(mem);
    }

    /// Takes a mapping down; its buffer comes back with the others of the burst.
    ///
    /// # Errors
    /// The mapping comes back: it is another ring's, or was unmapped before.
    #[inline(always)]
    pub fn unmap<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        mapping: RingMapping<B>,
    ) -> Result<Withheld, RingUnmapError<B>> {
        // Of an address in this ring only the slot's bits are left above the offset; in any other, more than a slot can be.
        let relative = mapping.end.iova().get() ^ self.ring.base().iova().get();
        let (slot, bytes) = (relative >> RingIova::OFFSET_BITS, mapping.end.offset());
        let cleared = if mapping.domain == self.domain {
            let (entries, lines) = (self.entries, &mut self.lines);
            self.ring.unmap_in(entries, mem, lines, slot, bytes)
        } else {
            Err(UnmapRefusal::NotAllocated)
        };
        match cleared {
            Ok(ended) => {
                if let Some(run) = ended {
                    self.burst.runs.push(run);
                }
                self.withheld.push(mapping.buffer);
                Ok(Withheld)
            }
            Err(_) => Err(RingUnmapError(mapping)),
        }
    }

    /// Ends the burst: writes back what was cleared, invalidates the ring once, and hands every buffer to `each`.
    ///
    /// # Errors
    /// The invalidation failed: buffers and slots stay withheld for another attempt.
    pub fn end_burst<M: PhysMemory + ?Sized, I: Invalidator + ?Sized>(
        &mut self,
        mem: &M,
        invalidator: &mut I,
        each: impl FnMut(B),
    ) -> Result<(), InvalidationError> {
        if self.withheld.is_empty() {
            return Ok(());
        }
        self.lines.sync(mem);
        let last = self.ring.end_run();
        if last.slots() > 0 {
            self.burst.runs.push(last);
        }
        let request = Invalidation::Ring {
            domain: self.domain,
            device: self.device,
            ring: self.ring.id(),
        };
        let empty = Cleared {
            runs: Vec::new(),
            ..self.burst
        };
        let batch = core::mem::replace(&mut self.burst, empty);
        let (batch, result) = match Pending::submit(invalidator, request, batch) {
            Ok(pending) => match pending.wait(invalidator) {
                Ok(flushed) => (Cleared::release(flushed, &mut self.ring), Ok(())),
                Err((pending, error)) => (pending.abandon(), Err(error)),
            },
            Err((batch, error)) => (batch, Err(error)),
        };
        self.burst = batch;
        if result.is_ok() {
            self.withheld
                .drain(..)
                .map(ManuallyDrop::into_inner)
                .for_each(each);
        }
        result
    }
}
