//! A driver with fewer maps (Cascardo; EIOVAR section 8): it maps a region of N buffers once,
//! passes its buffers to the device, and unmaps it after the last of them.
//!
//! ```text
//!   map of the first buffer   a map of the region
//!   map of the others         no call: an address in the region
//!   unmap of the others       no call
//!   unmap of the last         an unmap of the region
//! ```
//! The driver gets each buffer back at its own unmap. The device still reaches it until the last
//! buffer of the region is unmapped. Even over a strict layer, the exposure therefore lasts until N
//! buffers have completed. With a [first-in, first-out pool](crate::Pool), the driver uses other
//! regions first, so each region ends. If a driver reuses the last freed buffer first, a region
//! stays mapped while its ring is busy.

use std::collections::HashMap;

use ringfence_dma::Coherent;
use ringfence_types::{Iova, PhysAddr, PhysRange};

use super::{ApiError, DeviceRing, DmaApi, FailedMap, Mapped, NotFreed};
use crate::{Buffer, Pool, PoolError};

/// Counts of the buffers and of the regions that hold them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RegionStats {
    /// Buffers that the driver passed to the device.
    pub buffers: u64,
    /// Maps of the layer: regions, and buffers outside all regions.
    pub maps: u64,
    /// Unmaps of the layer.
    pub unmaps: u64,
}

#[derive(Debug)]
struct Region<H> {
    handle: H,
    iova: Iova,
    users: u64,
}

/// The regions of a driver's buffer memory. `H` is the layer's handle of a mapping.
#[derive(Debug)]
pub struct Regions<H> {
    memory: PhysRange,
    region_bytes: u64,
    /// Tokens by which the layer identifies regions, of the regions that are not mapped. A region
    /// has one for each ring.
    tokens: HashMap<u64, Vec<Buffer>>,
    mapped: HashMap<(DeviceRing, u64), Region<H>>,
    /// The last buffers of regions that the layer withholds, by the start of the region.
    withheld: HashMap<PhysAddr, Vec<Buffer>>,
    stats: RegionStats,
}

impl<H> Regions<H> {
    /// Divides `memory` into regions of `region_bytes` bytes, for a device with at most `rings`
    /// rings. A buffer that crosses the end of a region, or is outside `memory`, is mapped alone.
    ///
    /// # Errors
    /// `region_bytes` is 0.
    pub fn new(memory: PhysRange, region_bytes: u64, rings: usize) -> Result<Self, PoolError> {
        let mut tokens: HashMap<u64, Vec<Buffer>> = HashMap::new();
        // The last region may be shorter; its token covers a whole one.
        let bytes = memory.bytes().div_ceil(region_bytes.max(1));
        let bytes = bytes.saturating_mul(region_bytes);
        let whole_regions = PhysRange::new(memory.start(), bytes).unwrap_or(memory);
        for _ in 0..rings {
            let mut pool = Pool::new(whole_regions, region_bytes)?;
            while let Some(token) = pool.alloc() {
                let number = (token.start().get() - memory.start().get()) / region_bytes;
                tokens.entry(number).or_default().push(token);
            }
        }
        Ok(Self {
            memory,
            region_bytes,
            tokens,
            mapped: HashMap::new(),
            withheld: HashMap::new(),
            stats: RegionStats::default(),
        })
    }

    /// Returns the counts.
    pub fn stats(&self) -> RegionStats {
        self.stats
    }

    /// Returns the number of mapped regions.
    pub fn mapped(&self) -> usize {
        self.mapped.len()
    }

    /// Returns the number of the region that holds all of `memory`, and the region.
    fn region_of(&self, memory: &PhysRange) -> Option<(u64, PhysRange)> {
        let offset = memory
            .start()
            .get()
            .checked_sub(self.memory.start().get())?;
        let number = offset.checked_div(self.region_bytes)?;
        let start = self.memory.start().wrapping_add(number * self.region_bytes);
        let bytes = self
            .memory
            .bytes()
            .checked_sub(number * self.region_bytes)?;
        let region = PhysRange::new(start, bytes.min(self.region_bytes))?;
        region.contains(memory).then_some((number, region))
    }
}

/// The handle of a buffer that the device owns.
#[derive(Debug)]
pub enum RegionHandle<H> {
    /// A buffer in a mapped region.
    Part {
        /// Number of the region.
        region: u64,
        /// The driver's buffer.
        buffer: Buffer,
    },
    /// A buffer that is mapped alone.
    Alone(H),
}

/// The DMA API of a driver that maps regions, in front of any other.
pub struct RegionApi<'a, A: DmaApi> {
    /// The DMA API that maps the regions.
    pub inner: A,
    /// State of the regions between two calls.
    pub regions: &'a mut Regions<A::Handle>,
}

impl<A: DmaApi> RegionApi<'_, A> {
    fn map_alone(
        &mut self,
        ring: DeviceRing,
        buffer: Buffer,
        memory: PhysRange,
    ) -> Result<Mapped<RegionHandle<A::Handle>>, FailedMap> {
        let mapped = self.inner.map(ring, buffer, memory)?;
        self.regions.stats.maps += 1;
        self.regions.stats.buffers += 1;
        Ok(Mapped {
            iova: mapped.iova,
            handle: RegionHandle::Alone(mapped.handle),
        })
    }
}

impl<A: DmaApi> DmaApi for RegionApi<'_, A> {
    type Handle = RegionHandle<A::Handle>;
    type Memory = A::Memory;

    fn memory(&self) -> &A::Memory {
        self.inner.memory()
    }

    fn map(
        &mut self,
        ring: DeviceRing,
        buffer: Buffer,
        memory: PhysRange,
    ) -> Result<Mapped<Self::Handle>, FailedMap> {
        let Some((number, region_range)) = self.regions.region_of(&memory) else {
            return self.map_alone(ring, buffer, memory);
        };
        let key = (ring, number);
        if !self.regions.mapped.contains_key(&key) {
            let token = self.regions.tokens.get_mut(&number).and_then(Vec::pop);
            let Some(token) = token else {
                return self.map_alone(ring, buffer, memory);
            };
            match self.inner.map(ring, token, region_range) {
                Ok(Mapped { iova, handle }) => {
                    let region = Region {
                        handle,
                        iova,
                        users: 0,
                    };
                    self.regions.mapped.insert(key, region);
                    self.regions.stats.maps += 1;
                }
                Err(FailedMap {
                    buffer: token,
                    failure,
                }) => {
                    self.regions.tokens.entry(number).or_default().push(token);
                    return Err(FailedMap { buffer, failure });
                }
            }
        }
        let Some(region) = self.regions.mapped.get_mut(&key) else {
            return self.map_alone(ring, buffer, memory);
        };
        region.users += 1;
        self.regions.stats.buffers += 1;
        let offset = memory
            .start()
            .get()
            .wrapping_sub(region_range.start().get());
        Ok(Mapped {
            iova: region.iova.wrapping_add(offset),
            handle: RegionHandle::Part {
                region: number,
                buffer,
            },
        })
    }

    fn unmap(
        &mut self,
        ring: DeviceRing,
        handle: Self::Handle,
    ) -> Result<Option<Buffer>, ApiError> {
        let (number, buffer) = match handle {
            RegionHandle::Alone(handle) => {
                self.regions.stats.unmaps += 1;
                return self.inner.unmap(ring, handle);
            }
            RegionHandle::Part { region, buffer } => (region, buffer),
        };
        let key = (ring, number);
        let Some(region) = self.regions.mapped.get_mut(&key) else {
            return Ok(Some(buffer));
        };
        region.users = region.users.saturating_sub(1);
        if region.users > 0 {
            return Ok(Some(buffer));
        }
        let Some(Region { handle, .. }) = self.regions.mapped.remove(&key) else {
            return Ok(Some(buffer));
        };
        self.regions.stats.unmaps += 1;
        match self.inner.unmap(ring, handle)? {
            Some(token) => {
                self.regions.tokens.entry(number).or_default().push(token);
                Ok(Some(buffer))
            }
            // The layer withholds the region, and so its last buffer.
            None => {
                let start = self.regions.memory.start();
                let start = start.wrapping_add(number * self.regions.region_bytes);
                self.regions.withheld.entry(start).or_default().push(buffer);
                Ok(None)
            }
        }
    }

    fn end_burst(
        &mut self,
        ring: DeviceRing,
        mut back: impl FnMut(Buffer),
    ) -> Result<(), ApiError> {
        let regions = &mut *self.regions;
        self.inner.end_burst(ring, |token| {
            let last = regions.withheld.get_mut(&token.start()).and_then(Vec::pop);
            match last {
                Some(buffer) => {
                    let offset = token
                        .start()
                        .get()
                        .wrapping_sub(regions.memory.start().get());
                    let number = offset.checked_div(regions.region_bytes).unwrap_or(0);
                    regions.tokens.entry(number).or_default().push(token);
                    back(buffer);
                }
                // A buffer that was mapped alone.
                None => back(token),
            }
        })
    }

    fn sync_map(&mut self, ring: DeviceRing) {
        self.inner.sync_map(ring);
    }

    fn alloc_coherent(&mut self, ring: DeviceRing, pages: usize) -> Result<Coherent, ApiError> {
        self.inner.alloc_coherent(ring, pages)
    }

    fn free_coherent(&mut self, ring: DeviceRing, memory: Coherent) -> Result<(), Box<NotFreed>> {
        self.inner.free_coherent(ring, memory)
    }
}
