//! A cache of mappings in front of any allocator and any table (PVIOMMU paper, section 4.5).
//!
//! ```text
//! map    -> ReverseCache::acquire: an address
//!           or, on a miss: Paged::map -> ReverseCache::insert
//! unmap  -> ByIova::get: the key of the address -> ReverseCache::release
//!           and, if the cache keeps the mapping no longer: Paged::unmap
//! expire -> ReverseCache::tick -> Paged::unmap_many: one request for all mappings
//!           -> their invalidation, by the flush policy
//! ```
//! A hit, and an unmap whose mapping stays, change no table and invalidate nothing. Each piece of a
//! scatterlist has its own mapping, so that other lists can reuse it. The space kicks a host that
//! owns the table once for all pieces that miss. Long-lived shared memory
//! ([`CachingSpace::map_bypass_cache`]) and buffers without a key bypass the cache.

mod by_iova;

use alloc::vec::Vec;
use core::marker::PhantomData;

use ringfence_iova::IovaAllocator;
use ringfence_types::{
    CachedLevels, DomainId, Flushed, Invalidation, Iova, IovaRange, Lock, Nanos, PageSize,
    Permissions, Pfn, PfnRange, PhysRange, WholeDomain,
};

use super::{
    AddressLimits, AddressSpace, CachedOrCleared, CachingSpace, ClearedRange, CopyingSpace, Expire,
    IoPageTable, MapResult, Paged, PagedCpu, RingSpace, SgSpace, UnmapRefusal,
};
use crate::cache::{MappingKey, NotCached, NotInUse, Retained, ReverseCache};
use crate::{MapReason, Platform};
use by_iova::ByIova;

/// Handling of an unmap of an address without a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnknownUnmap {
    /// The space refuses the unmap, like any other space.
    Refused,
    /// The space ignores the unmap. The PVIOMMU paper's frontend treats a cache miss at unmap as
    /// already unmapped. The as-published cache needs this, because it can evict mappings in use.
    Ignored,
}

/// The cache of one device and its state.
#[derive(Debug)]
pub struct CacheState<C> {
    cache: C,
    keys: ByIova,
    /// Mapped buffers, cached or not.
    in_use: u64,
    /// True if the cache had no room for a mapping. The next check of the clock then evicts
    /// released mappings.
    full: bool,
    /// Mappings that the cache removed when a failed list released them, and expired mappings that
    /// the table refused to clear. The next check of the clock unmaps them.
    dropped: Vec<PfnRange>,
    /// End of the current cycle; `None` before the first mapping.
    ends: Option<Nanos>,
}

impl<C: ReverseCache> CacheState<C> {
    /// Looks up an address for a buffer with this key.
    #[inline]
    fn acquire(&mut self, key: MappingKey, limits: &AddressLimits) -> Option<Iova> {
        let iova = self.cache.acquire(key)?;
        let last = iova.wrapping_add((key.pages() << 12).wrapping_sub(1));
        if Pfn::containing(last) > limits.mask {
            // Another device of this domain, with a wider DMA mask, made this mapping. The cache
            // keeps it: it has no more released mappings than before.
            let _ = self.cache.release(key);
            return None;
        }
        self.in_use = self.in_use.saturating_add(1);
        Some(iova)
    }

    /// Adds a mapping made for `key` at the page of `iova`. If it is not cached, its
    /// user owns it.
    fn insert(&mut self, key: Option<MappingKey>, iova: Iova) {
        self.in_use = self.in_use.saturating_add(1);
        let Some(key) = key else { return };
        let page = iova.align_down(PageSize::Size4K.bytes());
        match self.cache.insert(key, page) {
            Ok(()) => self.keys.put(page, key),
            Err(NotCached::Full) => self.full = true,
            Err(NotCached::Present | NotCached::OutOfMemory | NotCached::Address(_)) => {}
        }
    }

    /// Removes a user of the mapping at `range`; `None` if the cache has no such mapping.
    #[inline]
    fn release(&mut self, range: &IovaRange) -> Option<Result<Retained, NotInUse>> {
        let key = self.keys.get(range.start())?;
        // Use the buffer's number of pages: a key of another length belongs to another mapping. The
        // cache holds no mapping whose length exceeds a key's.
        let pages = PfnRange::covering(range).pages();
        let Some(key) = MappingKey::new(key.first(), pages, key.direction()) else {
            return Some(Err(NotInUse(key)));
        };
        let released = self.cache.release(key);
        if let Ok(retained) = released {
            self.in_use = self.in_use.saturating_sub(1);
            if retained == Retained::Removed {
                self.keys.take(range.start());
            }
        }
        Some(released)
    }

    /// Starts the clock at the first mapping.
    #[inline]
    fn start_clock(&mut self, now: Nanos, cycle_ns: u64) {
        self.ends.get_or_insert_with(|| cycle_end(now, cycle_ns));
    }

    /// Returns true if a cycle has ended or the cache is full.
    #[inline]
    fn is_due(&self, now: Nanos) -> bool {
        self.full || !self.dropped.is_empty() || self.ends.is_some_and(|end| now >= end)
    }

    /// Ends all cycles up to `now` and returns the expired pages, which the caller unmaps.
    fn expire_due(&mut self, now: Nanos, cycle_ns: u64) -> Vec<PfnRange> {
        let mut expired_ranges = core::mem::take(&mut self.dropped);
        let Self {
            cache, keys, ends, ..
        } = self;
        let mut expired =
            |key: MappingKey, iova: Iova| evicted(keys, key, iova, &mut expired_ranges);
        let mut end = ends.unwrap_or_else(|| cycle_end(now, cycle_ns));
        // After 255 cycles, no released mapping remains.
        let mut turns = 0_u16;
        while now >= end && turns <= u16::from(u8::MAX) {
            cache.tick(&mut expired);
            end = Nanos(end.0.saturating_add(cycle_ns));
            turns = turns.saturating_add(1);
        }
        *ends = Some(if now >= end {
            cycle_end(now, cycle_ns)
        } else {
            end
        });
        if core::mem::take(&mut self.full) {
            cache.evict(&mut expired);
        }
        expired_ranges
    }

    fn expire_all(&mut self) -> Vec<PfnRange> {
        let mut expired_ranges = core::mem::take(&mut self.dropped);
        let keys = &mut self.keys;
        self.cache
            .drain(|key, iova| evicted(keys, key, iova, &mut expired_ranges));
        expired_ranges
    }
}

/// Adds an expired mapping to `expired_ranges`. Ignores a mapping unknown to the frontend, which an
/// as-published tree may report.
fn evicted(keys: &mut ByIova, key: MappingKey, iova: Iova, expired_ranges: &mut Vec<PfnRange>) {
    if keys.take(iova).is_some() {
        expired_ranges.extend(PfnRange::new(Pfn::containing(iova), key.pages()));
    }
}

/// Returns the end of the cycle that contains `now`. Cycles end at multiples of their length on the
/// platform's clock.
fn cycle_end(now: Nanos, cycle_ns: u64) -> Nanos {
    let cycles = now.0.checked_div(cycle_ns).unwrap_or(0).saturating_add(1);
    Nanos(cycles.saturating_mul(cycle_ns))
}

/// An allocator and a table behind a reverse translation cache.
///
/// The device can access an unmapped buffer until its mapping leaves the cache. The cache's
/// [retention](crate::cache) bounds that time, and the [flush policy](crate::flush::PerCycle)
/// returns stale buffers. With a retention of none, an unmapped buffer is accessible only while
/// another live buffer has the same pages.
#[derive(Debug)]
pub struct CachedSpace<A, T, C, L> {
    paged: Paged<A, T>,
    cache_lock: L,
    cycle_ns: u64,
    unknown_unmap: UnknownUnmap,
    cache: PhantomData<fn() -> C>,
}

impl<A, T, C: ReverseCache, L: Lock<CacheState<C>>> CachedSpace<A, T, C, L> {
    /// Creates a space with `cache` in front of `paged`. A cycle lasts `cycle_ns` nanoseconds (T).
    /// `lock` creates the embedder's lock.
    pub fn new(
        paged: Paged<A, T>,
        cache: C,
        cycle_ns: u64,
        unknown_unmap: UnknownUnmap,
        lock: impl FnOnce(CacheState<C>) -> L,
    ) -> Self {
        let reverse = CacheState {
            cache,
            keys: ByIova::default(),
            in_use: 0,
            full: false,
            dropped: Vec::new(),
            ends: None,
        };
        Self {
            paged,
            cache_lock: lock(reverse),
            cycle_ns: cycle_ns.max(1),
            unknown_unmap,
            cache: PhantomData,
        }
    }

    /// The allocator and the table behind the cache.
    pub fn paged(&self) -> &Paged<A, T> {
        &self.paged
    }

    /// Passes the cache to `read`, under the lock.
    pub fn with_cache<R>(&self, read: impl FnOnce(&C) -> R) -> R {
        self.cache_lock.with(|reverse| read(&reverse.cache))
    }
}

/// Returns the key of a buffer's pages; `None` for a buffer that is too long.
#[inline]
fn key_of(piece: &PhysRange, permissions: Permissions) -> Option<MappingKey> {
    MappingKey::mapped(piece, permissions)
}

/// Returns the device-visible range of `piece`, whose first page is mapped at `iova`.
#[inline]
fn bytes_at(iova: Iova, piece: &PhysRange) -> Option<IovaRange> {
    let offset = piece.start().offset_in(PageSize::Size4K.bytes());
    IovaRange::new(iova.wrapping_add(offset), piece.bytes())
}

impl<A, T, C, L> CachedSpace<A, T, C, L>
where
    A: IovaAllocator,
    T: IoPageTable<Pages = ()>,
    C: ReverseCache,
    L: Lock<CacheState<C>>,
{
    /// Unmaps a mapping that the cache removed with its last user. If the table refuses, the user
    /// keeps the mapping.
    fn unmap_removed<P: Platform>(
        &self,
        cpu: &mut PagedCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        range: IovaRange,
    ) -> Result<CachedOrCleared, UnmapRefusal> {
        let cleared = self.paged.unmap(cpu, platform, range);
        if cleared.is_err() {
            self.cache_lock
                .with(|reverse| reverse.insert(None, range.start()));
        }
        cleared.map(CachedOrCleared::Cleared)
    }
}

impl<A, T, C, L> AddressSpace for CachedSpace<A, T, C, L>
where
    A: IovaAllocator,
    T: IoPageTable<Pages = ()>,
    C: ReverseCache,
    L: Lock<CacheState<C>>,
{
    type PerCpu = PagedCpu<A::PerCpu, T::PerCpu>;
    type FreeProof = A::FreeProof;
    type UnmapResult = CachedOrCleared;

    fn per_cpu(&self) -> Self::PerCpu {
        self.paged.per_cpu()
    }

    #[inline]
    fn domain(&self) -> DomainId {
        self.paged.domain()
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        let key = match pieces {
            [piece] => key_of(piece, permissions).map(|key| (key, piece)),
            _ => None,
        };
        let Some((key, piece)) = key else {
            return self.map_bypass_cache(cpu, platform, pieces, permissions, limits);
        };
        let found = self
            .cache_lock
            .with(|reverse| reverse.acquire(key, &limits));
        if let Some(range) = found.and_then(|iova| bytes_at(iova, piece)) {
            return Ok(MapResult { range, steps: 0 });
        }
        let placed = self.paged.map(cpu, platform, pieces, permissions, limits)?;
        let now = platform.now();
        self.cache_lock.with(|reverse| {
            reverse.start_clock(now, self.cycle_ns);
            reverse.insert(Some(key), placed.range.start());
        });
        Ok(placed)
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        range: IovaRange,
    ) -> Result<CachedOrCleared, UnmapRefusal> {
        match self.cache_lock.with(|reverse| reverse.release(&range)) {
            Some(Ok(Retained::Cached)) => return Ok(CachedOrCleared::Cached),
            Some(Ok(Retained::Removed)) => return self.unmap_removed(cpu, platform, range),
            _ if self.unknown_unmap == UnknownUnmap::Ignored => return Ok(CachedOrCleared::Cached),
            Some(Err(NotInUse(_))) => return Err(UnmapRefusal::NotAllocated),
            None => {}
        }
        let cleared = self.paged.unmap(cpu, platform, range)?;
        self.cache_lock
            .with(|reverse| reverse.in_use = reverse.in_use.saturating_sub(1));
        Ok(CachedOrCleared::Cleared(cleared))
    }

    #[inline]
    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P) {
        self.paged.sync(cpu, platform);
    }

    /// True if no mapping is in use. The flush at the start of a detach removes the released
    /// mappings.
    fn is_empty<P: Platform>(&self, _platform: &P) -> bool {
        self.cache_lock.with(|reverse| reverse.in_use == 0)
    }

    #[inline]
    fn release(&self, cpu: &mut Self::PerCpu, range: Self::FreeProof) {
        self.paged.release(cpu, range);
    }

    fn flushed(&self, cpu: &mut Self::PerCpu, proof: Flushed<WholeDomain>) {
        self.paged.flushed(cpu, proof);
    }

    fn drain(&self, cpu: &mut Self::PerCpu) {
        self.paged.drain(cpu);
    }

    #[inline]
    fn reserved(&self, range: PfnRange) -> PfnRange {
        self.paged.reserved(range)
    }

    #[inline]
    fn invalidation(&self, range: PfnRange, levels: CachedLevels) -> Invalidation {
        self.paged.invalidation(range, levels)
    }
}

impl<A, T, C, L> SgSpace for CachedSpace<A, T, C, L>
where
    A: IovaAllocator,
    T: IoPageTable<Pages = ()>,
    C: ReverseCache,
    L: Lock<CacheState<C>>,
{
    const CONTIGUOUS_SG: bool = false;
}

impl<A, T, C, L> RingSpace for CachedSpace<A, T, C, L>
where
    A: IovaAllocator,
    T: IoPageTable<Pages = ()>,
    C: ReverseCache,
    L: Lock<CacheState<C>>,
{
}

impl<A, T, C, L> CopyingSpace for CachedSpace<A, T, C, L>
where
    A: IovaAllocator,
    T: IoPageTable<Pages = ()>,
    C: ReverseCache,
    L: Lock<CacheState<C>>,
{
}

impl<A, T, C, L> CachingSpace for CachedSpace<A, T, C, L>
where
    A: IovaAllocator,
    T: IoPageTable<Pages = ()>,
    C: ReverseCache,
    L: Lock<CacheState<C>>,
{
    const CACHES_UNMAPPED: bool = true;

    fn map_bypass_cache<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        let placed = self.paged.map(cpu, platform, pieces, permissions, limits)?;
        let start = placed.range.start();
        self.cache_lock.with(|reverse| reverse.insert(None, start));
        Ok(placed)
    }

    fn map_per_segment<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
        placed: &mut Vec<IovaRange>,
    ) -> Result<u32, MapReason> {
        let before = placed.len();
        // Pieces that missed, with their indices in `placed`.
        let mut missed: Vec<(usize, &PhysRange)> = Vec::new();
        self.cache_lock.with(|reverse| {
            for piece in pieces {
                let key = key_of(piece, permissions);
                let found = key.and_then(|key| reverse.acquire(key, &limits));
                match found.and_then(|iova| bytes_at(iova, piece)) {
                    Some(range) => placed.push(range),
                    None => {
                        missed.push((placed.len(), piece));
                        // Placeholder until it is mapped.
                        placed.extend(bytes_at(Iova::ZERO, piece));
                    }
                }
            }
        });
        if missed.is_empty() {
            return Ok(0);
        }
        let mut indices = missed.iter();
        let mapped = self.paged.map_each(
            cpu,
            platform,
            missed.iter().map(|(_, piece)| (*piece, permissions)),
            limits,
            |range| {
                let slot = indices.next().and_then(|(index, _)| placed.get_mut(*index));
                if let Some(slot) = slot {
                    *slot = range;
                }
            },
        );
        let now = platform.now();
        self.cache_lock.with(|reverse| {
            if mapped.is_ok() {
                reverse.start_clock(now, self.cycle_ns);
                for (index, piece) in &missed {
                    if let Some(range) = placed.get(*index) {
                        reverse.insert(key_of(piece, permissions), range.start());
                    }
                }
                return;
            }
            // Release the mappings that were found.
            let mut missed = missed.iter().map(|(index, _)| *index).peekable();
            for (index, range) in placed.iter().enumerate().skip(before) {
                if missed.next_if_eq(&index).is_none()
                    && let Some(Ok(Retained::Removed)) = reverse.release(range)
                {
                    reverse.dropped.push(PfnRange::covering(range));
                }
            }
        });
        if mapped.is_err() {
            placed.truncate(before);
        }
        mapped
    }

    fn expire<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        which: Expire,
        mut cleared: impl FnMut(ClearedRange),
    ) -> Result<(), UnmapRefusal> {
        let now = platform.now();
        let ranges = self.cache_lock.with(|reverse| match which {
            Expire::Due if !reverse.is_due(now) => Vec::new(),
            Expire::Due => reverse.expire_due(now, self.cycle_ns),
            Expire::All => reverse.expire_all(),
        });
        let mut result = Ok(());
        let mut refused_ranges: Vec<PfnRange> = Vec::new();
        let mut rest = ranges.as_slice();
        // One range that the table refuses must not keep the later ones mapped. After a refusal
        // each of them is a call of its own: a table that refuses all costs linear time.
        let mut batch = rest.len();
        while !rest.is_empty() {
            let part = rest.get(..batch).unwrap_or(rest);
            let mut count = 0_usize;
            let unmapped = self.paged.unmap_many(cpu, platform, part, |range| {
                count = count.saturating_add(1);
                cleared(range);
            });
            let done = match unmapped {
                Ok(()) => part.len(),
                Err(refusal) => {
                    result = result.and(Err(refusal));
                    refused_ranges.extend(part.get(count));
                    batch = 1;
                    count.saturating_add(1)
                }
            };
            rest = rest.get(done..).unwrap_or_default();
        }
        if !refused_ranges.is_empty() {
            self.cache_lock
                .with(|reverse| reverse.dropped.append(&mut refused_ranges));
        }
        result
    }
}
