//! Guest memory with a cache of the last region found.
//!
//! A request looks up a region eight times: the driver's index, the ring's slot, two descriptors,
//! the request, the status, the used element, the device's index. These addresses are nearly always
//! in one region, and the lookups are most of a queue's cost.

use core::cell::Cell;
use core::iter::FusedIterator;

use vm_memory::bitmap::{BS, MS};
use vm_memory::guest_memory::GuestMemorySliceIterator;
use vm_memory::{
    Address, GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion,
    GuestMemoryResult, MemoryRegionAddress, Permissions, VolatileSlice,
};

/// A borrowed guest memory, whose regions therefore do not change.
pub(super) struct RegionCache<'m, M: GuestMemoryBackend + ?Sized> {
    memory: &'m M,
    /// Region of the last lookup.
    region: Cell<Option<&'m M::R>>,
}

impl<'m, M: GuestMemoryBackend + ?Sized> RegionCache<'m, M> {
    pub(super) const fn new(memory: &'m M) -> Self {
        Self {
            memory,
            region: Cell::new(None),
        }
    }

    #[inline]
    fn find(&self, at: GuestAddress) -> Option<(&'m M::R, MemoryRegionAddress)> {
        match self.region.get() {
            Some(region) => match region.to_region_addr(at) {
                Some(start) => Some((region, start)),
                None => self.find_anywhere(at),
            },
            None => self.find_anywhere(at),
        }
    }

    #[inline(never)]
    fn find_anywhere(&self, at: GuestAddress) -> Option<(&'m M::R, MemoryRegionAddress)> {
        let found = self.memory.to_region_addr(at)?;
        self.region.set(Some(found.0));
        Some(found)
    }
}

impl<M: GuestMemoryBackend + ?Sized> GuestMemory for RegionCache<'_, M> {
    type PhysicalMemory = M;
    type Bitmap = <M::R as GuestMemoryRegion>::B;

    fn check_range(&self, addr: GuestAddress, count: usize, _: Permissions) -> bool {
        GuestMemoryBackend::check_range(self.memory, addr, count)
    }

    #[inline]
    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        _: Permissions,
    ) -> GuestMemoryResult<impl GuestMemorySliceIterator<'a, BS<'a, Self::Bitmap>>> {
        Ok(Slices {
            memory: self,
            at: addr,
            left: count,
        })
    }

    fn physical_memory(&self) -> Option<&M> {
        Some(self.memory)
    }
}

/// The slices of a range, in order, like vm-memory's own iterator.
struct Slices<'a, 'm, M: GuestMemoryBackend + ?Sized> {
    memory: &'a RegionCache<'m, M>,
    at: GuestAddress,
    /// Remaining bytes; 0 after an error.
    left: usize,
}

impl<'a, M: GuestMemoryBackend + ?Sized> Iterator for Slices<'a, '_, M> {
    type Item = GuestMemoryResult<VolatileSlice<'a, MS<'a, M>>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let Some((region, start)) = self.memory.find(self.at) else {
            self.left = 0;
            return Some(Err(GuestMemoryError::InvalidGuestAddress(self.at)));
        };
        let room = region.len().saturating_sub(start.0);
        let part_bytes = self.left.min(usize::try_from(room).unwrap_or(usize::MAX));
        let slice = region.get_slice(start, part_bytes);
        self.left = if slice.is_ok() {
            self.left - part_bytes
        } else {
            0
        };
        // A region ends at 2^64 - 1 at the latest, so this wraps at most to 0, when no bytes
        // remain.
        self.at = GuestAddress(self.at.raw_value().wrapping_add(part_bytes as u64));
        Some(slice)
    }
}

impl<M: GuestMemoryBackend + ?Sized> FusedIterator for Slices<'_, '_, M> {}

impl<'a, M: GuestMemoryBackend + ?Sized> GuestMemorySliceIterator<'a, MS<'a, M>>
    for Slices<'a, '_, M>
{
    /// Has the semantics of the trait's default method, which peeks. Its moves through memory would
    /// dominate the cost.
    #[inline]
    fn stop_on_error(
        mut self,
    ) -> GuestMemoryResult<impl Iterator<Item = VolatileSlice<'a, MS<'a, M>>>> {
        let first = self.next().transpose()?;
        Ok(Found { first, rest: self })
    }
}

/// The slices up to the first error.
struct Found<'a, 'm, M: GuestMemoryBackend + ?Sized> {
    first: Option<VolatileSlice<'a, MS<'a, M>>>,
    rest: Slices<'a, 'm, M>,
}

impl<'a, M: GuestMemoryBackend + ?Sized> Iterator for Found<'a, '_, M> {
    type Item = VolatileSlice<'a, MS<'a, M>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        match self.first.take() {
            None if self.rest.left != 0 => {
                let (slice, at, left) = self.rest.more();
                (self.rest.at, self.rest.left) = (at, left);
                slice
            }
            first => first,
        }
    }
}

impl<'a, M: GuestMemoryBackend + ?Sized> Slices<'a, '_, M> {
    /// Returns the next slice, if any, and the state after it. By value and out of line, because
    /// nearly every access has only one slice.
    #[inline(never)]
    fn more(&self) -> (Option<VolatileSlice<'a, MS<'a, M>>>, GuestAddress, usize) {
        let mut next = Slices { ..*self };
        let slice = next.next().and_then(Result::ok);
        (slice, next.at, next.left)
    }
}
