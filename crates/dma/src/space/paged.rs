//! An IOVA allocator with a page table: the space of every mode that translates by pages.

mod link;
mod teardown;

use alloc::vec::Vec;

use ringfence_iova::{AllocError, AllocRequest, IovaAllocator};
use ringfence_pgtable::MapRequest;
use ringfence_types::{
    CachedLevels, DomainId, Flushed, IovaRange, Permissions, Pfn, PfnRange, PhysRange, Unmapped,
    WholeDomain,
};

use super::{
    AddressLimits, AddressSpace, CachingSpace, ClearedRange, CopyingSpace, FlushesBeforeReuse,
    GRANULE, IoPageTable, MapResult, RingSpace, SgSpace, UnmapRefusal,
};
use crate::{MapReason, Platform, UnmapFailure};

/// The number of pages that a mapping reserves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Exactly the mapped pages.
    Exact,
    /// The next power of two, naturally aligned. Linux does this to make an invalidation by address
    /// mask exact (EIOVAR section 3). It reserves addresses only; the extra pages are not mapped.
    PowerOfTwo,
}

/// The allocator and the table of one domain.
#[derive(Debug)]
pub struct Paged<A, T> {
    allocator: A,
    table: T,
    rounding: Rounding,
}

/// The state of one CPU for a [`Paged`] space.
#[derive(Debug)]
pub struct PagedCpu<A, T> {
    allocator: A,
    table: T,
}

impl<A: IovaAllocator, T: IoPageTable> Paged<A, T> {
    /// Creates a space that allocates from `allocator` and maps in `table`.
    pub fn new(allocator: A, table: T, rounding: Rounding) -> Self {
        Self {
            allocator,
            table,
            rounding,
        }
    }

    /// Returns the allocator.
    pub fn allocator(&self) -> &A {
        &self.allocator
    }

    /// Returns the table.
    pub fn table(&self) -> &T {
        &self.table
    }

    /// Maps each of `pieces` separately, with its permissions, and passes its range to `each`. All
    /// pieces are visible to the device on return. Returns the number of steps of the allocator's
    /// searches.
    ///
    /// # Errors
    /// As for [`map`](AddressSpace::map). No piece stays mapped; the caller discards the ranges
    /// that `each` received.
    pub fn map_each<'p, P: Platform>(
        &self,
        cpu: &mut PagedCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        pieces: impl Iterator<Item = (&'p PhysRange, Permissions)>,
        limits: AddressLimits,
        mut each: impl FnMut(IovaRange),
    ) -> Result<u32, MapReason> {
        let mut made: Vec<(PfnRange, PfnRange)> = Vec::new();
        let mut steps = 0_u32;
        let mut result = Ok(());
        for (piece, permissions) in pieces {
            let pages = piece.pages(GRANULE);
            let found = match self.alloc(&mut cpu.allocator, pages, permissions, limits) {
                Ok(found) => found,
                Err(reason) => {
                    result = Err(reason);
                    break;
                }
            };
            let base = found.range.lo().iova();
            let request = MapRequest {
                iova: base,
                pa: piece.start().align_down(GRANULE.bytes()),
                pages,
                permissions,
            };
            let mapped = PfnRange::new(found.range.lo(), pages);
            let installed = self.table.map_nosync(&mut cpu.table, platform, request);
            if let Err(error) = installed {
                let undone = self.roll_back(cpu, platform, found.range, None);
                result = Err(
                    undone.map_or_else(MapReason::RollbackFailed, |()| MapReason::Table(error))
                );
                break;
            }
            let start = base.wrapping_add(piece.start().offset_in(GRANULE.bytes()));
            if let (Some(mapped), Some(range)) = (mapped, IovaRange::new(start, piece.bytes())) {
                made.push((found.range, mapped));
                each(range);
            }
            steps = steps.saturating_add(found.steps);
        }
        self.table.sync(&mut cpu.table, platform);
        if result.is_ok() {
            let mut revealed = made
                .iter()
                .map(|(_, at)| self.table.iotlb_sync_map(platform, *at));
            result = revealed.try_for_each(|done| done.map_err(MapReason::Flush));
        }
        match result {
            Ok(()) => Ok(steps),
            Err(mut reason) => {
                for (reserved, mapped) in made {
                    if let Err(failed) = self.roll_back(cpu, platform, reserved, Some(mapped)) {
                        reason.fail_rollback(failed);
                    }
                }
                Err(reason)
            }
        }
    }

    /// Clears the translations of several mappings, given by their mapped pages. For spaces built
    /// on this one.
    ///
    /// # Errors
    /// As for [`unmap`](AddressSpace::unmap), for the first range that is rejected: it and the
    /// later ones are unchanged. `each` has received the earlier ones, in order.
    pub fn unmap_many<P: Platform>(
        &self,
        cpu: &mut PagedCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        mapped: &[PfnRange],
        mut each: impl FnMut(ClearedRange<T::Pages>),
    ) -> Result<(), UnmapRefusal> {
        let mut refused = Ok(());
        let whole = mapped.iter().take_while(|range| {
            refused = self.check_whole(cpu, platform, **range).map(drop);
            refused.is_ok()
        });
        let whole = mapped.get(..whole.count()).unwrap_or(mapped);
        let cleared = |(unmapped, levels, tables): (Unmapped, CachedLevels, T::Pages)| {
            let reserved = self.reserved(unmapped.range());
            let unmapped = match unmapped.widen(reserved) {
                Ok(widened) => widened,
                Err(as_mapped) => as_mapped,
            };
            each(ClearedRange {
                unmapped,
                levels,
                tables,
            });
        };
        self.table
            .unmap_many(&mut cpu.table, platform, whole, cleared)
            .map_err(UnmapRefusal::Table)?;
        refused
    }

    /// Returns the range that was reserved for `mapped`. Rejects a range that is known to be only a
    /// part of a mapping.
    #[inline]
    fn check_whole<P: Platform>(
        &self,
        cpu: &mut PagedCpu<A::PerCpu, T::PerCpu>,
        platform: &P,
        mapped: PfnRange,
    ) -> Result<PfnRange, UnmapRefusal> {
        let reserved = self.reserved(mapped);
        // The "find" of Table 1 of the rIOMMU paper: trees know the size of each range and detect a
        // mismatch.
        match self.allocator.find(&mut cpu.allocator, mapped.lo()) {
            Some(found) if found == reserved => {}
            Some(_) => return Err(UnmapRefusal::NotAllocated),
            // If the table is readable, its unmap detects pages that are not mapped.
            None if self.allocator.has_lookup()
                && self.table.is_mapped(platform, mapped.lo()).is_none() =>
            {
                return Err(UnmapRefusal::NotAllocated);
            }
            None => {}
        }
        // A longer mapping may have the same reservation: reject if the next page is mapped.
        if reserved != mapped {
            let behind = Pfn::new(mapped.hi().get().wrapping_add(1));
            if self.table.is_mapped(platform, behind) == Some(true) {
                return Err(UnmapRefusal::NotAllocated);
            }
        }
        Ok(reserved)
    }

    #[inline]
    fn request(&self, pages: u64, permissions: Permissions, limit: Pfn) -> Option<AllocRequest> {
        let exact = AllocRequest {
            permissions,
            ..AllocRequest::new(pages, limit)
        };
        Some(match self.rounding {
            Rounding::Exact => exact,
            Rounding::PowerOfTwo => {
                let pages = pages.checked_next_power_of_two()?;
                AllocRequest {
                    pages,
                    align_order: pages.trailing_zeros() as u8,
                    ..exact
                }
            }
        })
    }

    /// Allocates below the preferred limit first, then below the device's mask.
    #[inline]
    fn alloc(
        &self,
        cpu: &mut A::PerCpu,
        pages: u64,
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<ringfence_iova::Allocation, MapReason> {
        let request = self
            .request(pages, permissions, limits.preferred)
            .ok_or(MapReason::TooLarge)?;
        match self.allocator.alloc(cpu, &request) {
            Err(AllocError::Exhausted { .. }) if limits.mask > limits.preferred => {
                let request = AllocRequest {
                    limit: limits.mask,
                    ..request
                };
                self.allocator
                    .alloc(cpu, &request)
                    .map_err(MapReason::Alloc)
            }
            other => other.map_err(MapReason::Alloc),
        }
    }

    /// Reserves `pages` pages of addresses for the life of the space.
    ///
    /// # Errors
    /// The allocator has no such range.
    pub(super) fn reserve(
        &self,
        cpu: &mut PagedCpu<A::PerCpu, T::PerCpu>,
        pages: u64,
        limits: AddressLimits,
    ) -> Result<PfnRange, MapReason> {
        let permissions = Permissions::READ_WRITE;
        let found = self.alloc(&mut cpu.allocator, pages, permissions, limits)?;
        Ok(found.range)
    }

    /// Installs translations at [reserved](Self::reserve) addresses, for the life of the space.
    /// They are visible to the device on return.
    ///
    /// # Errors
    /// The table refused the entries, or could not make them visible.
    pub(super) fn install<P: Platform>(
        &self,
        cpu: &mut PagedCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapReason> {
        let installed = self.table.map(&mut cpu.table, platform, request);
        installed.map_err(MapReason::Table)?;
        let range = PfnRange::new(Pfn::containing(request.iova), request.pages);
        let range = range.ok_or(MapReason::TooLarge)?;
        let visible = self.table.iotlb_sync_map(platform, range);
        visible.map_err(MapReason::Flush)
    }

    /// Undoes a partial map. The device may already have used the installed pieces, so the range is
    /// invalidated before it is freed. If the table rejects the unmap, or if the invalidation
    /// fails, the addresses are leaked, and the error reports that the device may still reach the
    /// pieces. This includes a piece whose map failed: a table in another machine may have
    /// installed it without an answer.
    #[cold]
    fn roll_back<P: Platform>(
        &self,
        cpu: &mut PagedCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        reserved: PfnRange,
        installed: Option<PfnRange>,
    ) -> Result<(), UnmapFailure> {
        let (unmapped, levels, tables) = match installed {
            Some(range) => self
                .table
                .unmap(&mut cpu.table, platform, range)
                .map_err(|error| UnmapFailure::Refused(UnmapRefusal::Table(error)))?,
            None => {
                let cleared = Unmapped::attest_cleared(self.table.domain(), reserved);
                (cleared, CachedLevels::Leaves, T::Pages::default())
            }
        };
        let Ok(unmapped) = unmapped.widen(reserved) else {
            return Ok(());
        };
        self.table.sync(&mut cpu.table, platform);
        let gone = ClearedRange {
            unmapped,
            levels,
            tables,
        };
        let request = self.invalidation(gone.unmapped.range(), gone.levels);
        match gone.invalidate(request, platform) {
            Ok(range) => {
                self.allocator.free(&mut cpu.allocator, range.into());
                Ok(())
            }
            Err((error, _)) => Err(UnmapFailure::NotFlushed(error)),
        }
    }
}

/// Returns the number of pages of all pieces, each of which begins on a new page.
#[inline]
pub(super) fn total_pages(pieces: &[PhysRange]) -> Result<u64, MapReason> {
    let mut pages = 0_u64;
    for piece in pieces {
        pages = pages
            .checked_add(piece.pages(GRANULE))
            .ok_or(MapReason::TooLarge)?;
    }
    if pages == 0 {
        return Err(MapReason::Empty);
    }
    Ok(pages)
}

impl<A: IovaAllocator<FreeProof = Unmapped>, T: IoPageTable> FlushesBeforeReuse for Paged<A, T> {}

impl<A: IovaAllocator, T: IoPageTable> SgSpace for Paged<A, T> {
    const MAPS_MANY: bool = true;

    fn map_many<'p, P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: impl Iterator<Item = (&'p PhysRange, Permissions)>,
        limits: AddressLimits,
        placed: &mut Vec<IovaRange>,
    ) -> Result<(), MapReason> {
        self.map_each(cpu, platform, pieces, limits, |range| placed.push(range))
            .map(drop)
    }
}

impl<A: IovaAllocator, T: IoPageTable> RingSpace for Paged<A, T> {}

impl<A: IovaAllocator, T: IoPageTable> CachingSpace for Paged<A, T> {}

impl<A: IovaAllocator, T: IoPageTable> CopyingSpace for Paged<A, T> {}

impl<A: IovaAllocator, T: IoPageTable> AddressSpace for Paged<A, T> {
    type PerCpu = PagedCpu<A::PerCpu, T::PerCpu>;
    type FreeProof = A::FreeProof;
    type UnmapResult = ClearedRange<T::Pages>;

    fn per_cpu(&self) -> Self::PerCpu {
        PagedCpu {
            allocator: self.allocator.per_cpu(),
            table: self.table.per_cpu(),
        }
    }

    #[inline]
    fn domain(&self) -> DomainId {
        self.table.domain()
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
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
            return Err(MapReason::Empty);
        };
        let found = self.alloc(&mut cpu.allocator, pages, permissions, limits)?;
        let base = found.range.lo().iova();
        let mut done = 0_u64;
        for piece in pieces {
            let count = piece.pages(GRANULE);
            let request = MapRequest {
                iova: base.wrapping_add(done << GRANULE.shift()),
                pa: piece.start().align_down(GRANULE.bytes()),
                pages: count,
                permissions,
            };
            let installed = if count == pages {
                self.table.map(&mut cpu.table, platform, request)
            } else {
                self.table.map_nosync(&mut cpu.table, platform, request)
            };
            if let Err(error) = installed {
                let installed = PfnRange::new(found.range.lo(), done);
                return Err(
                    match self.roll_back(cpu, platform, found.range, installed) {
                        Ok(()) => MapReason::Table(error),
                        Err(failed) => MapReason::RollbackFailed(failed),
                    },
                );
            }
            done += count;
        }
        if pieces.len() > 1 {
            self.table.sync(&mut cpu.table, platform);
        }
        if let Err(error) = self.table.iotlb_sync_map(platform, found.range) {
            let installed = PfnRange::new(found.range.lo(), pages);
            return Err(
                match self.roll_back(cpu, platform, found.range, installed) {
                    Ok(()) => MapReason::Flush(error),
                    Err(failed) => MapReason::RollbackFailed(failed),
                },
            );
        }
        let start = base.wrapping_add(first.start().offset_in(GRANULE.bytes()));
        let end = base.wrapping_add(
            ((pages - 1) << GRANULE.shift()) | last.last().offset_in(GRANULE.bytes()),
        );
        let range = IovaRange::inclusive(start, end).ok_or(MapReason::TooLarge)?;
        Ok(MapResult {
            range,
            steps: found.steps,
        })
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        range: IovaRange,
    ) -> Result<Self::UnmapResult, UnmapRefusal> {
        let mapped = PfnRange::covering(&range);
        let reserved = self.check_whole(cpu, platform, mapped)?;
        let (unmapped, levels, tables) = self
            .table
            .unmap(&mut cpu.table, platform, mapped)
            .map_err(UnmapRefusal::Table)?;
        let unmapped = match unmapped.widen(reserved) {
            Ok(widened) => widened,
            Err(as_mapped) => as_mapped,
        };
        Ok(ClearedRange {
            unmapped,
            levels,
            tables,
        })
    }

    #[inline]
    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P) {
        self.table.sync(&mut cpu.table, platform);
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        self.table.is_empty(platform)
    }

    #[inline]
    fn release(&self, cpu: &mut Self::PerCpu, range: Self::FreeProof) {
        self.allocator.free(&mut cpu.allocator, range);
    }

    fn flushed(&self, cpu: &mut Self::PerCpu, proof: Flushed<WholeDomain>) {
        self.allocator.flushed(&mut cpu.allocator, proof);
    }

    fn drain(&self, cpu: &mut Self::PerCpu) {
        self.allocator.drain(&mut cpu.allocator);
    }

    #[inline]
    fn reserved(&self, mapped: PfnRange) -> PfnRange {
        match self.rounding {
            Rounding::Exact => mapped,
            Rounding::PowerOfTwo => mapped
                .pages()
                .checked_next_power_of_two()
                .and_then(|pages| PfnRange::new(mapped.lo(), pages))
                .unwrap_or(mapped),
        }
    }
}
