//! Shadow buffers: the device reaches copies that stay mapped, and never the buffers themselves
//! (Markuze, Morrison and Tsafrir, ASPLOS 2016).
//!
//! A map takes a slot of the pool and copies the buffer into it if the device reads it. An unmap
//! copies the bytes that the device wrote into the buffer, each byte once, and frees the slot.
//! Neither changes a translation, so an unmap invalidates nothing. The device reaches exactly the
//! bytes that the driver gives it: a slot holds no other bytes, and what the device writes beside
//! the buffer, or after the unmap, never reaches the driver.
//!
//! Departures from the paper:
//!
//! - A CPU that frees a slot keeps it. In the paper, the slot returns to the CPU that allocated it.
//! - Slots have 1 to 4096 pages in powers of two. The paper has slots of 4 KiB and of 64 KiB.
//! - The bytes of earlier buffers in a slot are zeroed before the device gets its address (A34).
//!
//! | file | one concept |
//! |---|---|
//! | `page.rs` | the state of one page of a pool |
//! | `pool.rs` | the memory of a pool and its slots |
//! | `fill.rs` | the records and the copies of a map |
//! | `finish.rs` | the end of a mapping, and its copy to the buffer |
//! | `slots.rs` | free slots: of a CPU, of the pool, and new ones |
//! | `lend.rs` | slots that a driver uses as buffers, without a copy |
//! | `sync.rs` | the copies of a sync |
//! | `mod.rs` | the space: an allocator and a table with a pool |
//! | `hybrid/` | the space that maps the whole pages of large buffers |

mod fill;
mod finish;
mod hybrid;
mod lend;
mod page;
mod pool;
mod slots;
mod sync;

pub use hybrid::{HybridPolicy, HybridSpace, SharedPages, SplitTable, Thresholds};
pub use pool::{ShadowDepot, ShadowPool};

use core::sync::atomic::{AtomicU64, Ordering};

use ringfence_iova::IovaAllocator;
use ringfence_types::{
    Access, CachedLevels, DomainId, Flushed, Invalidation, IovaRange, Lock, Permissions, PfnRange,
    PhysRange, WholeDomain,
};

use super::paged::total_pages;
use super::{
    AddressLimits, AddressSpace, CachingSpace, CopiedOrCleared, CopyPool, CopyingSpace,
    IoPageTable, MapResult, Paged, PagedCpu, RingSpace, SgSpace, UnmapRefusal,
};
use crate::error::ShadowError;
use crate::{MapReason, Platform};
use page::{ORDERS, SlotKind};
use pool::FreeSlots;

/// The contents of the copy of a buffer that the device only writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromDevice {
    /// A copy of the buffer: bytes that the device does not write keep their values.
    Kept,
    /// Not specified. For devices that fill their buffers, and for drivers that unmap with the
    /// number of bytes that the device wrote
    /// ([`unmap_received`](crate::Dma::unmap_received)). Other bytes of the buffer may get values
    /// that the same device wrote earlier.
    Unspecified,
}

/// The treatment of a map that finds no free slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenExhausted {
    /// The map fails with [`MapReason::Shadow`]. This is back-pressure: try again after an unmap.
    Refuse,
    /// The buffer itself is mapped, page by page, and its unmap invalidates it. The device then
    /// also reaches the other bytes of the buffer's first and last page: the space is no longer
    /// byte-granular.
    MapPages,
}

/// The choices of a [`ShadowSpace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct ShadowPolicy {
    pub from_device: FromDevice,
    pub when_exhausted: WhenExhausted,
}

impl ShadowPolicy {
    /// Returns true if a copy with these permissions begins as a copy of the buffer.
    #[inline]
    fn fills(self, permissions: Permissions) -> bool {
        match self.from_device {
            FromDevice::Kept => true,
            FromDevice::Unspecified => permissions.allows(Access::Read),
        }
    }
}

/// An allocator and a table with a pool of shadow buffers.
///
/// # Bounds
/// The pool never exceeds its [`memory`](ShadowPool::memory). Its state takes 32 bytes a page. A
/// CPU keeps at most 128 pages, or two slots, of each size and direction in its own free lists.
///
/// # Limits
/// - Coherent memory is mapped, not copied. It has whole pages.
/// - A mapping that a driver rebuilds with [`Mapping::claim`](crate::Mapping::claim) must not be
///   unmapped by two CPUs at the same time: its slot would have two owners.
#[derive(Debug)]
pub struct ShadowSpace<A, T, L> {
    paged: Paged<A, T>,
    pool: ShadowPool<L>,
    policy: ShadowPolicy,
    /// Number of pages mapped without a shadow. A claimed unmap may cover a part of a mapping.
    direct_pages: AtomicU64,
}

/// The state of one CPU for a [`ShadowSpace`].
#[derive(Debug)]
pub struct ShadowCpu<A, T> {
    paged: PagedCpu<A, T>,
    free: FreeSlots,
}

impl<A, T, L: Lock<ShadowDepot>> ShadowSpace<A, T, L> {
    /// Creates a space with `pool` in front of `paged`. The pool takes its addresses from the
    /// allocator at the first map.
    pub fn new(paged: Paged<A, T>, pool: ShadowPool<L>, policy: ShadowPolicy) -> Self {
        Self {
            paged,
            pool,
            policy,
            direct_pages: AtomicU64::new(0),
        }
    }

    /// Returns the allocator and the table.
    pub fn paged(&self) -> &Paged<A, T> {
        &self.paged
    }

    /// Returns the pool.
    pub fn pool(&self) -> &ShadowPool<L> {
        &self.pool
    }

    /// Returns the number of pages mapped without a shadow.
    pub fn direct_pages(&self) -> u64 {
        self.direct_pages.load(Ordering::Relaxed)
    }
}

impl<A, T, L> ShadowSpace<A, T, L>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
{
    /// Maps `pieces` themselves.
    #[inline]
    fn map_direct<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        let mapped = self
            .paged
            .map(&mut cpu.paged, platform, pieces, permissions, limits)?;
        let pages = PfnRange::covering(&mapped.range).pages();
        self.direct_pages.fetch_add(pages, Ordering::Relaxed);
        Ok(mapped)
    }

    /// Maps a buffer that has no shadow, as the policy requires.
    #[cold]
    fn map_without_shadow<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
        error: ShadowError,
    ) -> Result<MapResult, MapReason> {
        match self.policy.when_exhausted {
            WhenExhausted::Refuse => Err(MapReason::Shadow(error)),
            WhenExhausted::MapPages => self.map_direct(cpu, platform, pieces, permissions, limits),
        }
    }

    /// Returns true if the device's mask reaches the whole pool.
    #[inline]
    fn reaches_pool(&self, limits: AddressLimits) -> bool {
        self.pool.lies_within(limits.mask)
    }

    /// Unmaps a mapping without a shadow, which is rare if all buffers are copied.
    #[cold]
    fn unmap_without_slot<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        range: IovaRange,
    ) -> Result<CopiedOrCleared<T::Pages>, UnmapRefusal> {
        self.unmap_direct(cpu, platform, range)
    }

    /// Unmaps a mapping without a shadow.
    #[inline]
    fn unmap_direct<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        range: IovaRange,
    ) -> Result<CopiedOrCleared<T::Pages>, UnmapRefusal> {
        let cleared = self.paged.unmap(&mut cpu.paged, platform, range)?;
        let pages = PfnRange::covering(&range).pages();
        self.direct_pages.fetch_sub(pages, Ordering::Relaxed);
        Ok(CopiedOrCleared::Cleared(cleared))
    }
}

impl<A, T, L> AddressSpace for ShadowSpace<A, T, L>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
{
    type PerCpu = ShadowCpu<A::PerCpu, T::PerCpu>;
    type FreeProof = A::FreeProof;
    type UnmapResult = CopiedOrCleared<T::Pages>;

    fn per_cpu(&self) -> Self::PerCpu {
        ShadowCpu {
            paged: self.paged.per_cpu(),
            free: FreeSlots::new(),
        }
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
        let pages = total_pages(pieces)?;
        let (slot, kind) = match self.take_for(cpu, platform, pages, permissions, limits)? {
            Ok(found) => found,
            Err(error) => {
                return self.map_without_shadow(cpu, platform, pieces, permissions, limits, error);
            }
        };
        let copies = self.policy.fills(permissions);
        match self
            .pool
            .fill(platform.memory(), slot, kind, pieces, copies)
        {
            Ok(range) => Ok(MapResult {
                range: range.ok_or(MapReason::TooLarge)?,
                steps: 0,
            }),
            Err(error) => {
                self.put_back(cpu, slot, kind);
                Err(MapReason::Shadow(ShadowError::Memory(error)))
            }
        }
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        range: IovaRange,
    ) -> Result<Self::UnmapResult, UnmapRefusal> {
        let Some(slot) = self.pool.slot_at(range.start()) else {
            return self.unmap_without_slot(cpu, platform, range);
        };
        let (kind, first) = self.pool.check_whole(slot, range)?;
        self.pool.finish(platform.memory(), slot, kind, first);
        self.put_back(cpu, slot.index, kind);
        Ok(CopiedOrCleared::Copied)
    }

    #[inline]
    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P) {
        self.paged.sync(&mut cpu.paged, platform);
    }

    /// True if no slot is in use and nothing else is mapped. The device reaches the free slots
    /// until it is detached.
    fn is_empty<P: Platform>(&self, _platform: &P) -> bool {
        self.direct_pages() == 0 && !self.pool.is_in_use()
    }

    #[inline]
    fn release(&self, cpu: &mut Self::PerCpu, range: Self::FreeProof) {
        self.paged.release(&mut cpu.paged, range);
    }

    fn flushed(&self, cpu: &mut Self::PerCpu, proof: Flushed<WholeDomain>) {
        self.paged.flushed(&mut cpu.paged, proof);
    }

    /// Frees the addresses and the slots that the handle caches.
    fn drain(&self, cpu: &mut Self::PerCpu) {
        for permissions in [
            Permissions::READ,
            Permissions::WRITE,
            Permissions::READ_WRITE,
        ] {
            for order in 0..ORDERS as u8 {
                let kind = SlotKind { order, permissions };
                if let Some(own) = cpu.free.of(kind).filter(|own| !own.is_empty()) {
                    self.spill(own, kind, 0);
                }
            }
        }
        self.paged.drain(&mut cpu.paged);
    }

    fn reserved(&self, range: PfnRange) -> PfnRange {
        match self.pool.slot_at(range.lo().iova()) {
            Some(_) => range,
            None => self.paged.reserved(range),
        }
    }

    #[inline]
    fn invalidation(&self, range: PfnRange, levels: CachedLevels) -> Invalidation {
        self.paged.invalidation(range, levels)
    }
}

impl<A: IovaAllocator, T: IoPageTable, L: Lock<ShadowDepot>> SgSpace for ShadowSpace<A, T, L> {}

impl<A: IovaAllocator, T: IoPageTable, L: Lock<ShadowDepot>> RingSpace for ShadowSpace<A, T, L> {}

impl<A, T, L> CachingSpace for ShadowSpace<A, T, L>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
{
    /// Maps memory that the CPU and the device share, which a copy cannot replace.
    fn map_bypass_cache<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        self.map_direct(cpu, platform, pieces, permissions, limits)
    }
}

impl<A, T, L> CopyingSpace for ShadowSpace<A, T, L>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
{
    fn copies(&self) -> Option<CopyPool> {
        Some(CopyPool {
            memory: self.pool.memory(),
            mapped_bytes: self.pool.mapped_bytes(),
        })
    }

    fn shadow(&self, range: IovaRange) -> Option<PhysRange> {
        self.pool.shadow(range)
    }

    #[inline]
    fn set_received(&self, range: IovaRange, bytes: u64) {
        if let Some(slot) = self.pool.slot_at(range.start()) {
            slot.page.set_received(bytes);
        }
    }

    fn sync_for_cpu<P: Platform>(&self, platform: &P, mapping: IovaRange, part: IovaRange) {
        let Some((slot, kind)) = self.shadowed(mapping) else {
            return;
        };
        if !kind.permissions.allows(Access::Write) {
            return;
        }
        self.pool.each_piece(slot, |index, page, piece| {
            let wanted = self.pool.overlap(index, &piece, part);
            let memory = platform.memory();
            self.pool.give_to_cpu(memory, index, page, &piece, wanted);
        });
    }

    fn sync_for_device<P: Platform>(&self, platform: &P, mapping: IovaRange, part: IovaRange) {
        let Some((slot, kind)) = self.shadowed(mapping) else {
            return;
        };
        let copies = self.policy.fills(kind.permissions);
        self.pool.each_piece(slot, |index, page, piece| {
            let wanted = self.pool.overlap(index, &piece, part);
            let memory = platform.memory();
            self.pool
                .give_to_device(memory, index, page, &piece, wanted, copies);
        });
    }
}

impl<A, T, L: Lock<ShadowDepot>> ShadowSpace<A, T, L> {
    /// Returns the slot of the mapping at `range`, and its kind. `None` if it has no shadow.
    fn shadowed(&self, range: IovaRange) -> Option<(u32, SlotKind)> {
        let slot = self.pool.slot_at(range.start())?;
        Some((slot.index, self.pool.check_whole(slot, range).ok()?.0))
    }
}
