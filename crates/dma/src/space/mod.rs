//! Where I/O virtual addresses come from and what the hardware looks up (questions 1 and 2 of a
//! mode).
//!
//! The two questions stand behind one role because some systems answer them with one object: an
//! identity space has neither allocator nor changing table, and a ring's tail is allocator and
//! table at once (decision 0002).

mod identity;
mod io_pgtable;
mod paged;
mod rings;
mod unmap_result;

pub use identity::{Identity, StaticTable};
pub use io_pgtable::{CachedTable, IoPageTable, PlainTable, Reclaiming, TablePages};
pub use paged::{Paged, PagedCpu, Rounding};
pub use rings::{RingDriver, Rings, RingsCpu};
pub use unmap_result::{Expire, UnmapResult};

use alloc::vec::Vec;

use ringfence_iova::FreeProof;
use ringfence_types::{
    CachedLevels, DomainId, Flushed, Invalidation, InvalidationError, Iova, IovaRange, Permissions,
    PfnRange, PhysRange, RequesterId, RingId, Unmapped, WholeDomain,
};

use crate::flush::FlushContext;
use crate::layer::GRANULE;
use crate::{MapReason, Platform, StillMapped, UnmapReason};

/// Where a mapping may lie. Of the two limits on its height, the preferred one is tried first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressLimits {
    /// Highest page that saves the bus a dual-address cycle (32 bit), never above `mask`.
    pub preferred: ringfence_types::Pfn,
    /// Highest page that the device's DMA mask allows.
    pub mask: ringfence_types::Pfn,
    /// Which of the device's rings it goes to; spaces without rings have this one question less.
    pub ring: RingId,
}

/// A space that asks for a flush of its domain before it gives out again what was freed unflushed:
/// the bitmap's promise, on which [`PerWrap`](crate::flush::PerWrap) rests.
pub trait FlushesBeforeReuse: Space {}

/// A space whose addresses are free at once, unflushed and for good, as rIOMMU Fig. 11 has it: what
/// [`BurstAsPublished`](crate::flush::BurstAsPublished) is the other half of.
pub trait ReusesUnflushed: Space {}

/// Addresses found for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapResult {
    /// The device-visible bytes, from the first byte of the first piece to the last byte of the
    /// last one.
    pub range: IovaRange,
    /// Steps that the allocator's search took.
    pub steps: u32,
}

/// A range that left the table, and what its invalidation must cover. `T` are table pages that left
/// with it.
#[must_use = "the range may still be cached by the hardware"]
#[derive(Debug, PartialEq, Eq)]
pub struct ClearedRange<T = ()> {
    /// The reserved range, cleared.
    pub unmapped: Unmapped,
    /// Which cached entries must go.
    pub levels: CachedLevels,
    /// Table pages that may be freed after the same invalidation.
    pub tables: T,
}

/// What unmap leaves, taken care of at once whatever the flush policy is.
pub trait IotlbSync: Sized {
    /// Whether a map installs something that must be undone. Where it does not, a mapping is only
    /// an address.
    const HAS_TABLE: bool;

    /// Whether the space has kept the translation.
    #[inline]
    fn is_cached(&self) -> bool {
        false
    }

    /// Invalidates what is left and gives the addresses home.
    ///
    /// # Errors
    /// The cleared range comes back, for another attempt; dropped, its addresses are never reused.
    fn iotlb_sync<S: Space<UnmapResult = Self>, P: Platform>(
        self,
        home: &mut FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), (InvalidationError, ClearedRange)>;
}

impl IotlbSync for NothingMapped {
    const HAS_TABLE: bool = false;

    #[inline]
    fn iotlb_sync<S: Space<UnmapResult = Self>, P: Platform>(
        self,
        _home: &mut FlushContext<'_, S>,
        _platform: &mut P,
    ) -> Result<(), (InvalidationError, ClearedRange)> {
        Ok(())
    }
}

impl<T: TablePages> IotlbSync for ClearedRange<T> {
    const HAS_TABLE: bool = true;

    fn iotlb_sync<S: Space<UnmapResult = Self>, P: Platform>(
        self,
        home: &mut FlushContext<'_, S>,
        platform: &mut P,
    ) -> Result<(), (InvalidationError, ClearedRange)> {
        home.invalidate_and_release(self, platform)
    }
}

/// The translation is as it was before: the space translates nothing, or always the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NothingMapped;

/// Why a range was not unmapped; nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnmapRefusal {
    /// The table refused.
    Table(ringfence_pgtable::UnmapError),
    /// No allocated range starts there, or it has another size.
    NotAllocated,
}

impl UnmapRefusal {
    /// The reason that the driver is given, with its buffer.
    #[cold]
    pub(crate) fn with<B>(self, buffer: StillMapped<B>) -> UnmapReason<B> {
        match self {
            Self::Table(error) => UnmapReason::Table(error, buffer),
            Self::NotAllocated => UnmapReason::NotAllocated(buffer),
        }
    }
}

/// One I/O address space.
pub trait Space {
    /// One processor's part of the space.
    type PerCpu;
    /// What a range must have gone through before it can be reused.
    type FreeProof: FreeProof;
    /// What unmap leaves to be flushed: [`ClearedRange`], or [`NothingMapped`] where nothing was
    /// installed and nothing is cleared. A flush policy says which of the two it can deal with.
    type UnmapResult: IotlbSync;

    /// Whether the pieces of a list lie at consecutive pages, so that one range is the whole list.
    const CONTIGUOUS_SG: bool = true;

    /// Whether [`release`](Self::release) takes ranges that were unmapped one by one, and follow
    /// each other, as one.
    const COALESCES_FREE: bool = false;

    /// Whether a map can be refused with [`MapReason::RingFull`]: for want of room that the next
    /// unmap makes.
    const CAN_BE_FULL: bool = false;

    /// Whether the space may keep what is unmapped for the next map of the same memory
    /// ([`UnmapResult::Cached`]). Then several live mappings can have the same address.
    const CACHES_UNMAPPED: bool = false;

    /// A handle for one more processor.
    fn per_cpu(&self) -> Self::PerCpu;

    /// The domain that tags its translations.
    fn domain(&self) -> DomainId;

    /// Makes `pieces` reachable at consecutive I/O virtual pages, each piece at its own offset in
    /// its first page.
    ///
    /// # Errors
    /// The state is unchanged, but for [`MapReason::RollbackFailed`]. [`MapReason::BeyondMask`]
    /// asks for a bounce buffer, and is for spaces that install nothing ([`IotlbSync::HAS_TABLE`]):
    /// others place any memory within the mask.
    fn map<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason>;

    /// The same for memory that driver and device share for long, and that nobody else may have
    /// before it is out of the device's reach: a space that [keeps](Self::CACHES_UNMAPPED) what is
    /// unmapped does not keep this.
    ///
    /// # Errors
    /// As for [`map`](Self::map).
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

    /// Makes `pieces` reachable wherever the space puts each of them: [`pieces`](Self::pieces)
    /// tells. The range that comes back stands for the whole list.
    ///
    /// # Errors
    /// As for [`map`](Self::map).
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

    /// Makes each of `pieces` reachable by itself, as if it were mapped alone, and notes where at
    /// the end of `placed`, in order. Returns the steps of the allocator's searches. For spaces
    /// that [keep](Self::CACHES_UNMAPPED) what is unmapped: there an address stands for one piece
    /// of memory, whatever list it is in.
    ///
    /// # Errors
    /// As for [`map`](Self::map).
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

    /// The device-visible bytes of each piece of a list whose range begins at `start`.
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

    /// Makes everything installed and cleared so far visible to a walker that does not snoop the
    /// caches. Before an invalidation, and before a device is told of addresses that
    /// [`map`](Self::map) has left to it.
    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P);

    /// Whether no device reaches anything through the space but what a map would not change: no
    /// mapping is installed.
    fn is_empty<P: Platform>(&self, platform: &P) -> bool;

    /// Takes a range back.
    fn release(&self, cpu: &mut Self::PerCpu, range: Self::FreeProof);

    /// Everything unmapped in the domain before `proof` may be reused.
    fn flushed(&self, cpu: &mut Self::PerCpu, proof: Flushed<WholeDomain>);

    /// Gives what the handle caches back to the space.
    fn drain(&self, cpu: &mut Self::PerCpu);

    /// Clears the translations that the space has [kept](UnmapResult::Cached), as far as `which`
    /// says, and gives each to `gone`.
    ///
    /// # Errors
    /// The table refused; what it refused is given up.
    fn expire<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        which: Expire,
        gone: impl FnMut(ClearedRange),
    ) -> Result<(), UnmapRefusal> {
        let _ = (cpu, platform, which, gone);
        Ok(())
    }

    /// The range reserved for a mapping of the pages of `range`.
    fn reserved(&self, range: PfnRange) -> PfnRange {
        range
    }

    /// The invalidation that purges `range` and as little else as the hardware can.
    #[inline]
    fn invalidation(&self, range: PfnRange, levels: CachedLevels) -> Invalidation {
        Invalidation::Pages {
            domain: self.domain(),
            range,
            levels,
        }
    }

    /// Whether `device` may use the space.
    fn serves(&self, device: RequesterId) -> bool {
        let _ = device;
        true
    }

    /// Rings of the device; a space without rings counts as one.
    fn rings(&self) -> u32 {
        1
    }

    /// The ring that a mapping belongs to.
    #[inline]
    fn ring_of(&self, range: &IovaRange) -> RingId {
        let _ = range;
        RingId::new(0)
    }
}
