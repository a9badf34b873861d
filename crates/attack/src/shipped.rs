//! The layer's bounce pool and a network driver, in front of a mode under attack.
//!
//! A layer without translation provides ring memory and bounce slots. The bench then maps this
//! memory through the mode, so the device reaches it only by the mode's addresses.

use std::rc::Rc;

use ringfence_devices::Buffer;
use ringfence_devices::api::{
    ApiError, DeviceRing, DmaApi, FailedMap, MapFailure, Mapped, NotFreed,
};
use ringfence_dma::flush::Never;
use ringfence_dma::space::Identity;
use ringfence_dma::{Attachment, BouncePool, Coherent, Cpu, Dma, Mapping, Platform};
use ringfence_lab::LabError;
use ringfence_memory::{Arena, Frames};
use ringfence_types::{
    Direction, Invalidation, InvalidationError, Invalidator, Iova, Nanos, PhysAddr, PhysRange,
    RequesterId, Ticket,
};

use crate::bench::{Bench, MapId, memory};

/// Frames of ring memory.
const RINGS: (u64, u64) = (0x40_0000, 1 << 20);
/// Memory of the bounce pool.
const POOL: (u64, u64) = (0x60_0000, 128 << 10);
/// First address that is beyond the mask of the bounced device.
pub(crate) const BEYOND_MASK: u64 = 0x80_0000;

/// An IOMMU without a cache.
struct NoUnit;

impl Invalidator for NoUnit {
    fn submit(&mut self, _: Invalidation) -> Result<Ticket, InvalidationError> {
        Ok(Ticket::new(0))
    }

    fn poll(&mut self, _: Ticket) -> Result<bool, InvalidationError> {
        Ok(true)
    }
}

struct NoTranslation {
    memory: Rc<Arena>,
    frames: Frames<Rc<Arena>>,
    unit: NoUnit,
}

impl Platform for NoTranslation {
    type Memory = Arena;
    type Frames = Frames<Rc<Arena>>;
    type Invalidator = NoUnit;

    fn memory(&self) -> &Arena {
        &self.memory
    }

    fn frames(&self) -> &Self::Frames {
        &self.frames
    }

    fn invalidator(&mut self) -> &mut NoUnit {
        &mut self.unit
    }

    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

/// The shipped layer over the bench's memory, without translation.
pub(crate) struct Untranslated {
    dma: Dma<Identity, Never, u64>,
    cpu: Cpu<Identity, Never, u64>,
    at: Attachment,
    platform: NoTranslation,
}

impl Untranslated {
    pub(crate) fn new(bench: &mut Bench) -> Result<Self, LabError> {
        let shared = bench.machine().memory();
        let pool = BouncePool::new(memory(POOL.0, POOL.1)?);
        let pool = pool.ok_or(LabError::Internal("a bounce pool"))?;
        let mut dma = Dma::new(Never).with_bounce(pool);
        let mask = Iova::new(BEYOND_MASK - 1);
        let at = dma.attach(RequesterId::new(0x1000), mask, |domain| {
            Ok::<_, LabError>(Identity::new(domain))
        });
        Ok(Self {
            cpu: dma.cpu(),
            dma,
            at: at.map_err(|_| LabError::Internal("an attach without translation"))?,
            platform: NoTranslation {
                frames: Frames::new(Rc::clone(&shared), memory(RINGS.0, RINGS.1)?),
                memory: shared,
                unit: NoUnit,
            },
        })
    }

    /// Copies a buffer beyond the mask to a bounce slot. Returns the copy with the mapping.
    pub(crate) fn bounce(
        &mut self,
        buffer: PhysRange,
        direction: Direction,
    ) -> Result<(Mapping<u64>, PhysRange), LabError> {
        let (dma, cpu) = (&self.dma, &mut self.cpu);
        let mapped = dma.map_single(cpu, &mut self.platform, &self.at, 0, buffer, direction);
        let (mapping, _) = mapped.map_err(|_| LabError::Internal("a bounce that fails"))?;
        let slot = mapping.bounce().map(|slot| slot.copy());
        let slot = slot.ok_or(LabError::Internal("a buffer that is not bounced"))?;
        Ok((mapping, slot))
    }

    /// Frees the slot of a buffer.
    pub(crate) fn free(&mut self, mapping: Mapping<u64>) -> Result<(), LabError> {
        let (dma, cpu) = (&self.dma, &mut self.cpu);
        let unmapped = dma.unmap_single(cpu, &mut self.platform, &self.at, mapping);
        unmapped
            .map(drop)
            .map_err(|_| LabError::Internal("a bounced unmap that fails"))
    }
}

/// The DMA API of a driver on a bench. The mode maps the buffers and the ring memory.
pub(crate) struct BenchApi {
    pub(crate) bench: Bench,
    rings: Untranslated,
    /// Ring memory, and its mapping in the mode.
    ring_maps: Vec<(PhysAddr, u64, MapId)>,
    /// Mapped and withheld buffers.
    buffers: Vec<(MapId, Buffer)>,
    memory: Rc<Arena>,
}

impl BenchApi {
    pub(crate) fn new(mut bench: Bench) -> Result<Self, LabError> {
        Ok(Self {
            rings: Untranslated::new(&mut bench)?,
            memory: bench.machine().memory(),
            bench,
            ring_maps: Vec::new(),
            buffers: Vec::new(),
        })
    }

    /// Writes two words of ring memory by DMA. `at` is the address that the driver gave the device
    /// without translation. Returns true if the hardware let both through.
    pub(crate) fn device_writes(&mut self, at: Iova, words: [u64; 2]) -> Result<bool, LabError> {
        let holds = |(start, bytes, _): &&(PhysAddr, u64, MapId)| {
            (start.get()..start.get() + bytes).contains(&at.get())
        };
        let found = self.ring_maps.iter().find(holds);
        let &(start, _, id) = found.ok_or(LabError::Internal("no ring memory"))?;
        let iova = self.bench.range(id)?.start();
        let mut reached = true;
        for (word, offset) in words.into_iter().zip([0, 8]) {
            let iova = iova.wrapping_add(at.get() - start.get() + offset);
            let Some(written) = self.bench.device_write(0, iova, word)? else {
                reached = false;
                continue;
            };
            // Ring memory is coherent and has no copy: the driver sees the write.
            let own = PhysAddr::new(at.get() + offset);
            if written.ranges.first().map(PhysRange::start) != Some(own) {
                self.bench.store(own, word)?;
            }
        }
        Ok(reached)
    }

    /// Returns a buffer that the layer has given back.
    fn take_back(&mut self) -> Option<Buffer> {
        let bench = &self.bench;
        let back = |(id, _): &(MapId, Buffer)| bench.is_back(*id).unwrap_or(false);
        let index = self.buffers.iter().position(back)?;
        Some(self.buffers.swap_remove(index).1)
    }
}

impl DmaApi for BenchApi {
    type Handle = MapId;
    type Memory = Arena;

    fn memory(&self) -> &Arena {
        &self.memory
    }

    fn map(
        &mut self,
        ring: DeviceRing,
        buffer: Buffer,
        memory: PhysRange,
    ) -> Result<Mapped<MapId>, FailedMap> {
        let id = self.bench.try_map(0, memory, ring.direction);
        let iova = |id| Some((id, self.bench.range(id).ok()?.start()));
        match id.ok().flatten().and_then(iova) {
            Some((id, iova)) => {
                self.buffers.push((id, buffer));
                Ok(Mapped { iova, handle: id })
            }
            None => Err(FailedMap {
                buffer,
                failure: MapFailure::Busy,
            }),
        }
    }

    fn unmap(&mut self, ring: DeviceRing, handle: MapId) -> Result<Option<Buffer>, ApiError> {
        let unmapped = self.bench.unmap(handle);
        unmapped.map_err(|_| ApiError::NoSuchRing(ring))?;
        Ok(self.take_back())
    }

    fn end_burst(
        &mut self,
        ring: DeviceRing,
        mut back: impl FnMut(Buffer),
    ) -> Result<(), ApiError> {
        let ended = self.bench.end_burst(0, ring.direction);
        ended.map_err(|_| ApiError::NoSuchRing(ring))?;
        while let Some(buffer) = self.take_back() {
            back(buffer);
        }
        Ok(())
    }

    fn sync_map(&mut self, _: DeviceRing) {}

    fn alloc_coherent(&mut self, ring: DeviceRing, pages: usize) -> Result<Coherent, ApiError> {
        let own = &mut self.rings;
        let made = own
            .dma
            .alloc_coherent(&mut own.cpu, &mut own.platform, &own.at, pages);
        let made = made.map_err(ApiError::Map)?;
        let (start, bytes) = (made.range().start().get(), made.range().bytes());
        let range = memory(start, bytes).map_err(|_| ApiError::NoSuchRing(ring))?;
        let id = self.bench.map(0, range, Direction::Bidirectional);
        let id = id.map_err(|_| ApiError::NoSuchRing(ring))?;
        self.ring_maps.push((range.start(), bytes, id));
        Ok(made)
    }

    fn free_coherent(&mut self, ring: DeviceRing, memory: Coherent) -> Result<(), Box<NotFreed>> {
        let own = &mut self.rings;
        let range = memory.range();
        let freed = own
            .dma
            .free_coherent(&mut own.cpu, &mut own.platform, &own.at, memory);
        let _ = ring;
        freed.map_err(|(_, memory)| {
            let error = ApiError::FreeCoherent {
                device: own.at.device(),
                range,
            };
            Box::new(NotFreed { memory, error })
        })
    }
}
