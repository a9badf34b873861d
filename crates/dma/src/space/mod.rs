//! I/O address spaces: the IOVA allocator and the translation behind one domain (axes 1 and 2
//! of a mode).
//!
//! One trait covers both axes, because some systems make both choices with one object. An identity
//! space has neither an allocator nor a changing table. The tail of a ring is allocator and table
//! at once (decision 0002).

mod cached;
mod cached_or_cleared;
mod copied_or_cleared;
mod identity;
mod io_pgtable;
mod paged;
mod rings;
mod shadow;

pub use cached::{CacheState, CachedSpace, UnknownUnmap};
pub use cached_or_cleared::{CachedOrCleared, Expire};
pub use copied_or_cleared::CopiedOrCleared;
pub use identity::{Identity, StaticTable};
pub use io_pgtable::{IoPageTable, LeafCachedTable, PlainTable, Reclaiming, TablePages};
pub use paged::{Paged, PagedCpu, Rounding};
pub use rings::{RingDriver, Rings, RingsCpu};
pub use shadow::{
    FromDevice, HybridPolicy, HybridSpace, ShadowCpu, ShadowDepot, ShadowPolicy, ShadowPool,
    ShadowSpace, SharedPages, SplitTable, Thresholds, WhenExhausted,
};

pub use crate::error::UnmapRefusal;
pub use crate::token::{AddressLimits, ClearedRange, MapResult};

use alloc::vec::Vec;

use ringfence_iova::FreeProof;
use ringfence_types::{
    CachedLevels, DomainId, Flushed, Invalidation, Iova, IovaRange, PageSize, Permissions, Pfn,
    PfnRange, PhysRange, RequesterId, RingId, WholeDomain,
};

use crate::{MapReason, Platform};

/// The page size of every space.
pub(crate) const GRANULE: PageSize = PageSize::Size4K;

/// A space that requests a flush of its domain before it reuses addresses that were freed
/// unflushed. The bitmap guarantees this, and [`PerWrap`](crate::flush::PerWrap) requires it.
pub trait FlushesBeforeReuse: AddressSpace {}

/// A space that reuses addresses at once and never requests a flush. No space of this crate does:
/// the trait is a seam for the study of rIOMMU Fig. 11.
pub trait ReusesUnflushed: AddressSpace {}

/// The result of a space's unmap, which the layer can invalidate at once under every policy.
pub trait SpaceUnmap: Sized {
    /// True if a map installs entries that must be cleared. If false, a mapping is only an address.
    const HAS_TABLE: bool;
    /// The table pages that the unmap unlinked.
    type Tables: TablePages;

    /// Returns true if the space keeps the translation.
    #[inline]
    fn is_cached(&self) -> bool {
        false
    }

    /// Returns the cleared range. `None` if nothing was cleared.
    fn into_cleared(self) -> Option<ClearedRange<Self::Tables>>;
}

/// The result of an unmap after which the device does not reach the buffer, once what
/// [was cleared](SpaceUnmap::into_cleared) is invalidated.
pub trait EndsAtUnmap: SpaceUnmap {}

impl<T: TablePages> EndsAtUnmap for ClearedRange<T> {}

impl SpaceUnmap for NothingMapped {
    const HAS_TABLE: bool = false;
    type Tables = ();

    #[inline]
    fn into_cleared(self) -> Option<ClearedRange> {
        None
    }
}

impl<T: TablePages> SpaceUnmap for ClearedRange<T> {
    const HAS_TABLE: bool = true;
    type Tables = T;

    #[inline]
    fn into_cleared(self) -> Option<Self> {
        Some(self)
    }
}

/// The unmap of a space without entries: the space never translates, or has a static table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NothingMapped;

/// One I/O address space: an IOVA allocator and the translation of a domain.
pub trait AddressSpace {
    /// The state of one CPU.
    type PerCpu;
    /// The proof that [`release`](Self::release) requires before a range is reused.
    type FreeProof: FreeProof;
    /// The result of [`unmap`](Self::unmap) for the flush policy: [`ClearedRange`], or
    /// [`NothingMapped`] for spaces without entries. The type determines which policies support the
    /// space.
    type UnmapResult: SpaceUnmap;

    /// Creates the state of another CPU.
    fn per_cpu(&self) -> Self::PerCpu;

    /// Returns the domain whose id tags the translations.
    fn domain(&self) -> DomainId;

    /// Maps `pieces` at consecutive I/O virtual pages, each piece at its own offset in its first
    /// page.
    ///
    /// # Errors
    /// The state is unchanged, except for [`MapReason::RollbackFailed`]. [`MapReason::BeyondMask`]
    /// requests a bounce buffer. Only spaces without entries ([`SpaceUnmap::HAS_TABLE`] is false)
    /// return it; others can map any memory within the mask.
    fn map<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason>;

    /// Clears the translations of the pages of `range`.
    ///
    /// # Errors
    /// The state is unchanged.
    fn unmap<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        range: IovaRange,
    ) -> Result<Self::UnmapResult, UnmapRefusal>;

    /// Makes all installed and cleared entries visible to a walker that does not snoop CPU caches.
    /// The layer calls it before an invalidation. The driver calls it, through
    /// [`Dma::sync_map`](crate::Dma::sync_map), before it passes new addresses to the device.
    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P);

    /// Returns true if no mapping is installed. Static translations do not count.
    fn is_empty<P: Platform>(&self, platform: &P) -> bool;

    /// Frees a range.
    fn release(&self, cpu: &mut Self::PerCpu, range: Self::FreeProof);

    /// Permits reuse of all addresses that were unmapped in the domain before `proof`.
    fn flushed(&self, cpu: &mut Self::PerCpu, proof: Flushed<WholeDomain>);

    /// Frees the addresses that the handle caches into the space.
    fn drain(&self, cpu: &mut Self::PerCpu);

    /// Returns the range that the allocator reserves for a mapping of the pages of `range`.
    fn reserved(&self, range: PfnRange) -> PfnRange {
        range
    }

    /// Returns the narrowest invalidation of `range` that the hardware supports.
    #[inline]
    fn invalidation(&self, range: PfnRange, levels: CachedLevels) -> Invalidation {
        Invalidation::Pages {
            domain: self.domain(),
            range,
            levels,
        }
    }

    /// Returns true if `device` may use the space.
    fn serves(&self, device: RequesterId) -> bool {
        let _ = device;
        true
    }
}

/// The layout of scatterlists. The default maps a list at consecutive pages.
pub trait SgSpace: AddressSpace {
    /// True if the pieces of a list are mapped at consecutive pages, so that one range covers the
    /// whole list.
    const CONTIGUOUS_SG: bool = true;

    /// Maps `pieces` at addresses that the space chooses for each; [`pieces`](Self::pieces) returns
    /// them. The returned range represents the whole list.
    ///
    /// # Errors
    /// As for [`map`](AddressSpace::map).
    #[inline]
    fn map_list<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        self.map(cpu, platform, pieces, permissions, limits)
    }

    /// True if the space implements [`map_many`](Self::map_many).
    const MAPS_MANY: bool = false;

    /// Maps each of `pieces` separately, with its permissions, and appends their ranges to
    /// `placed`, in order. The pieces share the write-back of entries and, if another machine keeps
    /// the table, its requests. All pieces are visible to the device on return.
    ///
    /// # Errors
    /// As for [`map`](AddressSpace::map). No piece stays mapped; the caller discards `placed`.
    fn map_many<'p, P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: impl Iterator<Item = (&'p PhysRange, Permissions)>,
        limits: AddressLimits,
        placed: &mut Vec<IovaRange>,
    ) -> Result<(), MapReason> {
        let _ = (cpu, platform, pieces, limits, placed);
        Err(MapReason::NotContiguous)
    }

    /// Returns the mapped range of each piece of a list whose range begins at `start`.
    fn pieces<'a>(
        &'a self,
        start: Iova,
        pieces: &'a [PhysRange],
    ) -> impl Iterator<Item = IovaRange> + 'a {
        let mut page = start.align_down(GRANULE.bytes());
        pieces.iter().filter_map(move |piece| {
            let start = page.wrapping_add(piece.start().offset_in(GRANULE.bytes()));
            page = page.wrapping_add(piece.pages(GRANULE) << GRANULE.shift());
            IovaRange::new(start, piece.bytes())
        })
    }
}

/// Rings of a device. A space without rings counts as one ring that is never full.
pub trait RingSpace: AddressSpace {
    /// True if a map can fail with [`MapReason::RingFull`], because the next slot is still in use.
    const CAN_BE_FULL: bool = false;

    /// True if [`release`](AddressSpace::release) accepts adjacent ranges, unmapped one by one, as
    /// one range.
    const COALESCES_FREE: bool = false;

    /// Returns the number of the device's rings. A space without rings counts as one ring.
    fn rings(&self) -> u32 {
        1
    }

    /// Returns the ring that a mapping belongs to.
    #[inline]
    fn ring_of(&self, range: &IovaRange) -> RingId {
        let _ = range;
        RingId::new(0)
    }
}

/// A cache of unmapped translations. The default keeps none.
pub trait CachingSpace: AddressSpace {
    /// True if the space may keep an unmapped translation for the next map of the same memory
    /// ([`CachedOrCleared::Cached`]). Several live mappings can then have the same address.
    const CACHES_UNMAPPED: bool = false;

    /// Maps memory that driver and device share for long. The memory must not be reused before the
    /// device can no longer reach it, so a space that [keeps](Self::CACHES_UNMAPPED) unmapped
    /// translations does not keep this one.
    ///
    /// # Errors
    /// As for [`map`](AddressSpace::map).
    #[inline]
    fn map_bypass_cache<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        self.map(cpu, platform, pieces, permissions, limits)
    }

    /// Maps each of `pieces` separately and appends their ranges to `placed`, in order. Returns the
    /// number of steps of the allocator's searches. For spaces that [keep](Self::CACHES_UNMAPPED)
    /// unmapped translations: there an address identifies one piece of memory in all lists.
    ///
    /// # Errors
    /// As for [`map`](AddressSpace::map).
    fn map_per_segment<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
        placed: &mut Vec<IovaRange>,
    ) -> Result<u32, MapReason> {
        let _ = (cpu, platform, pieces, permissions, limits, placed);
        Err(MapReason::NotContiguous)
    }

    /// Clears the translations that the space [keeps](CachedOrCleared::Cached), as selected by
    /// `which`, and passes each to `cleared`.
    ///
    /// # Errors
    /// The table rejected some unmaps: returns the first rejection. The space keeps these
    /// translations, which a device may reach, and tries again at its next call. `cleared` has
    /// received all others.
    fn expire<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        which: Expire,
        cleared: impl FnMut(ClearedRange),
    ) -> Result<(), UnmapRefusal> {
        let _ = (cpu, platform, which, cleared);
        Ok(())
    }
}

/// The memory of the copies that a device uses in place of buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyPool {
    /// All memory of the pool, its bound. The device reaches a part of it at all times.
    pub memory: PhysRange,
    /// Bytes that the device reaches, which never decrease.
    pub mapped_bytes: u64,
}

/// Copies that the device uses in place of buffers. The default makes none.
pub trait CopyingSpace: AddressSpace {
    /// Returns the pool of copies; `None` if the space makes none.
    fn copies(&self) -> Option<CopyPool> {
        None
    }

    /// Returns the memory that the device reaches at `range`, the range of a mapping. `None` if it
    /// is the buffer itself.
    fn shadow(&self, range: IovaRange) -> Option<PhysRange> {
        let _ = range;
        None
    }

    /// Calls `each` with every part of the live mapping at `range` that the device reaches as a
    /// copy, if it reaches the rest of the buffer itself: the addresses and the memory of the copy.
    fn each_copied_part(&self, range: IovaRange, each: &mut dyn FnMut(IovaRange, PhysRange)) {
        let _ = (range, each);
    }

    /// Limits the bytes that the unmap of the mapping at `range` copies to its buffer: the first
    /// `bytes` bytes, over all pieces of a list.
    #[inline]
    fn set_received(&self, range: IovaRange, bytes: u64) {
        let _ = (range, bytes);
    }

    /// Copies what the device wrote in `part` of a mapping to the buffer.
    #[inline]
    fn sync_for_cpu<P: Platform>(&self, platform: &P, mapping: IovaRange, part: IovaRange) {
        let _ = (platform, mapping, part);
    }

    /// Copies `part` of a mapping from the buffer to the memory that the device reads.
    #[inline]
    fn sync_for_device<P: Platform>(&self, platform: &P, mapping: IovaRange, part: IovaRange) {
        let _ = (platform, mapping, part);
    }
}

/// A buffer of a [`LendingSpace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LentSlot {
    /// The bytes of the I/O virtual address space.
    pub range: IovaRange,
    /// The same bytes of memory.
    pub memory: PhysRange,
}

/// A space that lends memory of its pool to the driver, which uses it as buffers. The memory is
/// mapped for good: the device reaches it at all times, and nothing else shares its pages.
pub trait LendingSpace: AddressSpace {
    /// Lends `bytes` bytes for these permissions, from the first byte of a page.
    ///
    /// # Errors
    /// The state is unchanged. [`MapReason::Shadow`] says why the pool has no buffer.
    fn lend<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        bytes: u64,
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<LentSlot, MapReason>;

    /// Takes back the buffer at `range`. It stays mapped, for the same device and permissions.
    ///
    /// # Errors
    /// No lent buffer begins there. The state is unchanged.
    fn take_back(&self, cpu: &mut Self::PerCpu, range: IovaRange) -> Result<(), UnmapRefusal>;
}

/// Addresses that are reserved before pieces are mapped at them, one by one.
pub trait LinkSpace: AddressSpace {
    /// Reserves `pages` pages of addresses.
    ///
    /// # Errors
    /// The allocator has no such range.
    fn reserve_range(
        &self,
        cpu: &mut Self::PerCpu,
        pages: u64,
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<PfnRange, MapReason>;

    /// Maps the pages of `piece` from `page` on, within a reserved range. The device must not use
    /// them before [`sync_links`](Self::sync_links).
    ///
    /// # Errors
    /// The table refused the entries. The state is unchanged.
    fn link<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        page: Pfn,
        piece: PhysRange,
        permissions: Permissions,
    ) -> Result<(), MapReason>;

    /// Makes the pages of `linked` visible to the device.
    ///
    /// # Errors
    /// The device may not see them.
    fn sync_links<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        linked: PfnRange,
    ) -> Result<(), MapReason>;

    /// Clears the translations of `linked`, the mapped part of `reserved`. The result covers all
    /// reserved addresses.
    ///
    /// # Errors
    /// The state is unchanged.
    fn unlink<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        linked: Option<PfnRange>,
        reserved: PfnRange,
    ) -> Result<Self::UnmapResult, UnmapRefusal>;
}

/// A space that a layer can use.
pub trait Space: SgSpace + RingSpace + CachingSpace + CopyingSpace {}

impl<S: SgSpace + RingSpace + CachingSpace + CopyingSpace> Space for S {}
