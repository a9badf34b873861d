//! A driver with persistent mappings (OS19, W03, CG08): it maps its buffers when it opens its
//! device, and reuses them.
//!
//! ```text
//!   buffer of the pool    map: no call, its address          unmap: no call
//!   other buffers (page cache), by PersistentUse:
//!     Own                 map: a map of the layer            unmap: an unmap of the layer
//!     Copy                map: a copy into a mapped slot     unmap: a copy out of it
//! ```
//! A device reaches every buffer of the pool until the driver closes the pool, also after the
//! driver has taken the data. Neither a time nor a number of operations bounds this exposure. The
//! safety of these buffers is therefore `none` over every mode. With [`PersistentUse::Copy`] the
//! device reaches only slots, whose unused bytes are zero.
//!
//! The buffers of storage I/O come from the page cache (Fujita and Moriai, section 2.2), so they
//! are never in a pool. [`PersistentStats`] counts how the driver passed them to the device.

use std::collections::HashMap;

use ringfence_dma::{
    Coherent, CpuOwned, DeviceOwned, FlushPolicy, MapMultiRequest, Mapping as LayerMapping,
    Platform, Premapped, PremappedError, Space,
};
use ringfence_types::{Direction, IovaRange, PhysAddr, PhysRange};

use super::{
    ApiError, Attachments, DeviceRing, DmaApi, DmaHooks, FailedMap, LayerApi, Mapped, NotFreed,
    UnmapOutcome,
};
use crate::buffer::BufferOwner;
use crate::{Buffer, ByteMemory, DeviceMapping, Pool, PoolError};

/// Use of the mapped buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PersistentUse {
    /// The driver allocates its own buffers from the pool's memory. It maps all others.
    Own,
    /// The driver copies buffers outside the pool into its slots, and back. It maps buffers that
    /// fit no idle slot.
    Copy,
}

/// Counts of the buffers that a driver passed to its device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PersistentStats {
    /// Buffers of the pool.
    pub reused: u64,
    /// Buffers outside the pool that were mapped and unmapped.
    pub mapped: u64,
    /// Buffers outside the pool that were copied.
    pub copied: u64,
    /// Bytes copied into slots and out of slots.
    pub copied_bytes: u64,
}

/// Buffers that stay mapped. `B` is the layer's representation of a buffer.
#[must_use = "the device reaches dropped buffers permanently"]
#[derive(Debug)]
pub struct PersistentBuffers<B> {
    pool: Premapped<B>,
    idle: HashMap<PhysAddr, CpuOwned<B>>,
    /// Starts of idle slots, for copies.
    free: Vec<PhysAddr>,
    purpose: PersistentUse,
    direction: Direction,
    slot_bytes: u64,
    stats: PersistentStats,
}

/// Error: buffers were not mapped, or not unmapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PersistentError<B: std::fmt::Debug> {
    /// The memory has no room for a buffer.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The layer did not map them.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The device owns some of them. The pool is unchanged.
    #[error("the device owns {0} buffers of the pool")]
    InUse(usize, Box<PersistentBuffers<B>>),
    /// The layer did not unmap all of them.
    #[error("cannot unmap the pool: {0}")]
    Unmap(Box<PremappedError<B>>),
}

impl<B> PersistentBuffers<B> {
    /// Returns the counts.
    pub fn stats(&self) -> PersistentStats {
        self.stats
    }

    /// Takes an idle slot for `memory`, and the part of it to use. `None` if `memory` is outside
    /// the pool, or no slot is idle or large enough.
    fn take(
        &mut self,
        buffer: &Buffer,
        memory: &PhysRange,
        direction: Direction,
    ) -> Option<TakenSlot<B>> {
        let fits = self.direction == direction || self.direction == Direction::Bidirectional;
        if !fits || memory.bytes() > self.slot_bytes {
            return None;
        }
        let start = match self.purpose {
            PersistentUse::Own => buffer.start(),
            PersistentUse::Copy => self.free.pop()?,
        };
        let offset = match self.purpose {
            PersistentUse::Own => memory.start().get().checked_sub(start.get())?,
            PersistentUse::Copy => 0,
        };
        if offset.checked_add(memory.bytes())? > self.slot_bytes {
            return None;
        }
        let owned = self.idle.remove(&start)?;
        let part = PhysRange::new(start.wrapping_add(offset), memory.bytes())?;
        Some(TakenSlot {
            owned,
            slot: start,
            part,
        })
    }

    fn return_slot(&mut self, slot: PhysAddr, owned: CpuOwned<B>) {
        self.idle.insert(slot, owned);
        if self.purpose == PersistentUse::Copy {
            self.free.push(slot);
        }
    }
}

struct TakenSlot<B> {
    owned: CpuOwned<B>,
    slot: PhysAddr,
    part: PhysRange,
}

/// The handle of a buffer that the device owns.
#[derive(Debug)]
pub enum PersistentHandle<B> {
    /// A buffer of the pool, or the copy of a buffer outside it.
    Pooled {
        /// The mapped slot.
        posted: DeviceOwned<B>,
        /// Start of the slot.
        slot: PhysAddr,
        /// The driver's buffer.
        buffer: Buffer,
        /// Bytes of the buffer that the driver mapped.
        memory: PhysRange,
        /// The mapping as the device knows it.
        mapping: DeviceMapping,
    },
    /// A buffer that the layer has mapped.
    Mapped(LayerMapping<B>),
}

/// The DMA API of a driver with persistent mappings, in front of the layer's.
pub struct PersistentApi<'a, S: Space, F: FlushPolicy<S, B>, B, P, A, W> {
    /// The layer's DMA API.
    pub layer: LayerApi<'a, S, F, B, P, A, W>,
    /// The mapped buffers.
    pub buffers: &'a mut PersistentBuffers<B>,
}

impl<S, F, B, P, A, W> LayerApi<'_, S, F, B, P, A, W>
where
    S: Space,
    F: FlushPolicy<S, B>,
    B: BufferOwner + std::fmt::Debug,
    P: Platform,
    A: Attachments,
{
    /// Maps as many buffers of `slot_bytes` bytes as fit `memory`, in the ring's direction, for the
    /// life of the returned pool.
    ///
    /// # Errors
    /// Nothing stays mapped.
    pub fn open_persistent(
        &mut self,
        ring: DeviceRing,
        memory: PhysRange,
        slot_bytes: u64,
        purpose: PersistentUse,
    ) -> Result<PersistentBuffers<B>, PersistentError<B>> {
        let at = self.at.targets(ring).ok_or(ApiError::NoSuchRing(ring))?;
        // These tokens identify the slots in the layer only. The driver's own pool has the tokens
        // that permit accesses.
        let mut tokens = Pool::new(memory, slot_bytes)?;
        let mut requests = Vec::with_capacity(tokens.slots());
        while let Some(token) = tokens.alloc() {
            let slot = tokens.range(&token, slot_bytes);
            let slot = slot.ok_or(PoolError {
                region: memory,
                slot_bytes,
            })?;
            requests.push(MapMultiRequest {
                buffer: B::hold(token),
                memory: slot,
                direction: ring.direction,
            });
        }
        let starts: Vec<_> = requests
            .iter()
            .map(|request| request.memory.start())
            .collect();
        let pool = self.dma.premap(self.cpu, self.platform, at, requests);
        let mut pool = pool.map_err(|(_, error)| ApiError::Map(error))?;
        let (mut idle, mut free) = (HashMap::new(), Vec::new());
        // The pool returns the slot of the last request first.
        for start in starts.into_iter().rev() {
            if let Some(owned) = pool.acquire() {
                idle.insert(start, owned);
                if purpose == PersistentUse::Copy {
                    free.push(start);
                }
            }
        }
        Ok(PersistentBuffers {
            pool,
            idle,
            free,
            purpose,
            direction: ring.direction,
            slot_bytes,
            stats: PersistentStats::default(),
        })
    }

    /// Unmaps the pool.
    ///
    /// # Errors
    /// See [`PersistentError`].
    pub fn close_persistent(
        &mut self,
        mut buffers: PersistentBuffers<B>,
    ) -> Result<(), PersistentError<B>> {
        let in_use = buffers.pool.in_use().saturating_sub(buffers.idle.len());
        if in_use > 0 {
            return Err(PersistentError::InUse(in_use, Box::new(buffers)));
        }
        for (_, owned) in buffers.idle.drain() {
            // Every idle slot belongs to this pool.
            let _ = buffers.pool.release(owned);
        }
        let pool = buffers.pool;
        let closed = self
            .dma
            .unmap_premapped(self.cpu, self.platform, pool, |token| {
                // The driver's own pool has the token that permits accesses.
                let _ = token.release();
            });
        closed.map_err(|error| PersistentError::Unmap(Box::new(error)))
    }
}

impl<S, F, B, P, A, W> PersistentApi<'_, S, F, B, P, A, W>
where
    S: Space,
    F: FlushPolicy<S, B>,
    B: BufferOwner,
    P: Platform<Memory: ByteMemory>,
{
    /// Copies the buffer into its slot, and zeroes the rest of the slot. As in Linux's swiotlb,
    /// this happens in every direction, so that a short transfer returns no older data. `None` if
    /// the buffer's memory does not exist.
    fn fill(&mut self, taken: TakenSlot<B>, memory: &PhysRange) -> Option<TakenSlot<B>> {
        if self.buffers.purpose == PersistentUse::Own {
            return Some(taken);
        }
        let rest = self.buffers.slot_bytes.saturating_sub(memory.bytes());
        let tail = taken.slot.wrapping_add(memory.bytes());
        let zeros = vec![0; rest as usize];
        let filled = self.copy(memory.start(), taken.slot, memory.bytes())
            && self.layer.platform.memory().write(tail, &zeros).is_ok();
        if filled {
            return Some(taken);
        }
        self.buffers.return_slot(taken.slot, taken.owned);
        None
    }

    /// Copies `bytes` bytes between buffer and slot. False if the memory does not exist.
    fn copy(&mut self, from: PhysAddr, to: PhysAddr, bytes: u64) -> bool {
        let mut data = vec![0; bytes as usize];
        let memory = self.layer.platform.memory();
        let copied = memory
            .read(from, &mut data)
            .and_then(|()| memory.write(to, &data));
        self.buffers.stats.copied_bytes += bytes;
        copied.is_ok()
    }
}

impl<S, F, B, P, A, W> DmaApi for PersistentApi<'_, S, F, B, P, A, W>
where
    S: Space,
    F: FlushPolicy<S, B>,
    B: BufferOwner,
    P: Platform<Memory: ByteMemory>,
    A: Attachments,
    W: DmaHooks<P>,
{
    type Handle = PersistentHandle<B>;
    type Memory = P::Memory;

    fn memory(&self) -> &P::Memory {
        self.layer.memory()
    }

    fn map(
        &mut self,
        ring: DeviceRing,
        buffer: Buffer,
        memory: PhysRange,
    ) -> Result<Mapped<Self::Handle>, FailedMap> {
        let taken = self.buffers.take(&buffer, &memory, ring.direction);
        let taken = taken.and_then(|taken| self.fill(taken, &memory));
        let (Some(TakenSlot { owned, slot, part }), Some(at)) =
            (taken, self.layer.at.targets(ring))
        else {
            self.buffers.stats.mapped += 1;
            let mapped = self.layer.map(ring, buffer, memory)?;
            return Ok(Mapped {
                iova: mapped.iova,
                handle: PersistentHandle::Mapped(mapped.handle),
            });
        };
        match self.buffers.purpose {
            PersistentUse::Own => self.buffers.stats.reused += 1,
            PersistentUse::Copy => self.buffers.stats.copied += 1,
        }
        let posted = self.layer.dma.post(self.layer.platform, owned);
        let offset = part.start().get().wrapping_sub(slot.get());
        let iova = posted.iova().wrapping_add(offset);
        let range = IovaRange::new(iova, part.bytes()).unwrap_or(posted.range());
        let mapping = DeviceMapping {
            device: at.device(),
            range,
            direction: ring.direction,
        };
        self.layer.hooks.mapped(self.layer.platform, &mapping, part);
        Ok(Mapped {
            iova,
            handle: PersistentHandle::Pooled {
                posted,
                slot,
                buffer,
                memory,
                mapping,
            },
        })
    }

    fn unmap(
        &mut self,
        ring: DeviceRing,
        handle: Self::Handle,
    ) -> Result<Option<Buffer>, ApiError> {
        let (posted, slot, buffer, memory, mapping) = match handle {
            PersistentHandle::Mapped(handle) => return self.layer.unmap(ring, handle),
            PersistentHandle::Pooled {
                posted,
                slot,
                buffer,
                memory,
                mapping,
            } => (posted, slot, buffer, memory, mapping),
        };
        self.layer.hooks.unmapping(self.layer.platform, &mapping);
        let owned = self.layer.dma.reap(self.layer.platform, posted);
        let writes = ring.direction != Direction::ToDevice;
        if self.buffers.purpose == PersistentUse::Copy && writes {
            self.copy(slot, memory.start(), memory.bytes());
        }
        self.buffers.return_slot(slot, owned);
        // The device reaches the slot until the pool is closed.
        let stale = UnmapOutcome::Stale;
        self.layer
            .hooks
            .unmapped(self.layer.platform, &mapping, stale);
        Ok(Some(buffer))
    }

    fn end_burst(&mut self, ring: DeviceRing, back: impl FnMut(Buffer)) -> Result<(), ApiError> {
        self.layer.end_burst(ring, back)
    }

    fn sync_map(&mut self, ring: DeviceRing) {
        self.layer.sync_map(ring);
    }

    fn alloc_coherent(&mut self, ring: DeviceRing, pages: usize) -> Result<Coherent, ApiError> {
        self.layer.alloc_coherent(ring, pages)
    }

    fn free_coherent(&mut self, ring: DeviceRing, memory: Coherent) -> Result<(), Box<NotFreed>> {
        self.layer.free_coherent(ring, memory)
    }
}
