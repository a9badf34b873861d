//! vm-memory's guest memory, accessed through a guard.
//!
//! `GuestMemory` is implemented for [`ReadGuard`] only. A slice stays valid until its read section
//! takes the next guard, and unmap waits for that. Devices written against `GuestMemory`, such as
//! those that use the crate virtio-queue, run unmodified on `&ReadGuard`. All their addresses are
//! then I/O virtual addresses, in rings, descriptors and buffers. The errors of `GuestMemory`
//! cannot carry a fault: call [`ReadGuard::take_fault`].

use std::iter::FusedIterator;

use ringfence_types::{
    Access, Fault, FaultReason, Iova, IovaRange, PageSize, Permissions, PhysRange,
};
use vm_memory::bitmap::{BS, MS};
use vm_memory::guest_memory::GuestMemorySliceIterator;
use vm_memory::{
    ByteValued, GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion,
    GuestMemoryResult, MemoryRegionAddress, Permissions as Wanted, VolatileMemory, VolatileSlice,
};

use crate::reader::ReadGuard;
use crate::walk::one_of;

/// Error of an access to an object in guest memory. No byte of the object was accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The device has no permission.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The device has permission, but no memory exists at the mapped physical address.
    #[error("guest memory does not contain {range}")]
    NoMemory {
        /// Physical range that contains the first missing part of the object.
        range: PhysRange,
    },
}

const PAGE: usize = PageSize::Size4K.bytes() as usize;

type Slice<'p, M> = VolatileSlice<'p, MS<'p, M>>;

impl<'p, M: GuestMemoryBackend> ReadGuard<'p, M> {
    /// Reads the object at `iova`, of any alignment.
    ///
    /// # Errors
    /// [`AccessError`]: the device may not read the object, or part of it is not in memory.
    #[inline]
    pub fn read<T: ByteValued>(&self, iova: Iova) -> Result<T, AccessError> {
        if let Some(slice) = self.cached_slice(iova, size_of::<T>(), Permissions::READ)
            && let Ok(object) = slice.get_ref::<T>(0)
        {
            return Ok(object.load());
        }
        self.read_parts(iova)
    }

    /// Writes `object` at `iova`, of any alignment.
    ///
    /// # Errors
    /// [`AccessError`]: the device may not write the object, or part of it is not in memory.
    /// Nothing is written.
    #[inline]
    pub fn write<T: ByteValued>(&self, iova: Iova, object: T) -> Result<(), AccessError> {
        if let Some(slice) = self.cached_slice(iova, size_of::<T>(), Permissions::WRITE)
            && let Ok(cell) = slice.get_ref::<T>(0)
        {
            cell.store(object);
            return Ok(());
        }
        self.write_parts(iova, &object)
    }

    #[inline(never)]
    fn read_parts<T: ByteValued>(&self, iova: Iova) -> Result<T, AccessError> {
        let range = self.range_of::<T>(iova, Access::Read)?;
        let mut object = T::zeroed();
        let mut rest = object.as_mut_slice();
        for slice in self.slices_of(range, Permissions::READ)? {
            let (part, tail) = rest.split_at_mut(slice.len().min(rest.len()));
            slice.copy_to(part);
            rest = tail;
        }
        Ok(object)
    }

    #[inline(never)]
    fn write_parts<T: ByteValued>(&self, iova: Iova, object: &T) -> Result<(), AccessError> {
        let range = self.range_of::<T>(iova, Access::Write)?;
        let mut rest = object.as_slice();
        for slice in self.slices_of(range, Permissions::WRITE)? {
            let (part, tail) = rest.split_at(slice.len().min(rest.len()));
            slice.copy_from(part);
            rest = tail;
        }
        Ok(())
    }

    fn range_of<T>(&self, iova: Iova, access: Access) -> Result<IovaRange, Fault> {
        IovaRange::new(iova, size_of::<T>() as u64).ok_or(Fault {
            device: self.device(),
            iova,
            access,
            reason: FaultReason::BadLength,
        })
    }

    /// Fast path: returns the memory of `bytes` bytes at `iova` if they lie in one page and one
    /// region, and the link is cached.
    #[inline]
    fn cached_slice(
        &self,
        iova: Iova,
        bytes: usize,
        required: Permissions,
    ) -> Option<Slice<'p, M>> {
        let range = IovaRange::new(iova, bytes as u64)?;
        let at = self.translate_cached(&range, required)?.start().get();
        let (region, at) = self.memory().to_region_addr(GuestAddress(at))?;
        region.get_slice(at, bytes).ok()
    }

    /// Returns the memory of all of `range`.
    fn slices_of(
        &self,
        range: IovaRange,
        required: Permissions,
    ) -> Result<Vec<Slice<'p, M>>, AccessError> {
        let mut slices = Vec::new();
        for piece in self.translate_for(range, required)? {
            let bytes = usize::try_from(piece.bytes()).unwrap_or(usize::MAX);
            for slice in self
                .memory()
                .get_slices(GuestAddress(piece.start().get()), bytes)
            {
                slices.push(slice.map_err(|_| AccessError::NoMemory { range: piece })?);
            }
        }
        Ok(slices)
    }
}

impl<M: GuestMemoryBackend> GuestMemory for ReadGuard<'_, M> {
    type PhysicalMemory = M;
    type Bitmap = <M::R as GuestMemoryRegion>::B;

    fn check_range(&self, addr: GuestAddress, count: usize, access: Wanted) -> bool {
        match self.wanted_access(addr, count, access) {
            Ok(required) => Slices {
                pin: self,
                at: Iova::new(addr.0),
                left: count,
                required,
            }
            .all(|slice| slice.is_ok()),
            Err(_) => false,
        }
    }

    #[inline]
    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Wanted,
    ) -> GuestMemoryResult<impl GuestMemorySliceIterator<'a, BS<'a, Self::Bitmap>>> {
        let required = self.wanted_access(addr, count, access)?;
        Ok(Slices {
            pin: self,
            at: Iova::new(addr.0),
            left: count,
            required,
        })
    }
}

impl<M: GuestMemoryBackend> ReadGuard<'_, M> {
    /// Returns the permissions that an access through vm-memory needs, if a device may make the
    /// access. A request for no access is an error unless it covers no bytes.
    #[inline]
    fn wanted_access(
        &self,
        addr: GuestAddress,
        count: usize,
        access: Wanted,
    ) -> GuestMemoryResult<Permissions> {
        let iova = Iova::new(addr.0);
        let required = match Permissions::from_bits(access as u64) {
            Some(required) => required,
            None if count == 0 => Permissions::READ,
            None => return Err(GuestMemoryError::InvalidGuestAddress(addr)),
        };
        let within = count <= PAGE - iova.offset_in(PAGE as u64) as usize;
        match within || count == 0 || self.whole(iova, count, required) {
            true => Ok(required),
            false => Err(GuestMemoryError::InvalidGuestAddress(addr)),
        }
    }

    /// Returns true if a range of several pages may be accessed. Otherwise stores the fault.
    #[inline(never)]
    fn whole(&self, iova: Iova, bytes: usize, required: Permissions) -> bool {
        let fault = match IovaRange::new(iova, bytes as u64) {
            Some(range) => match self.walk(range, required) {
                Ok(_) => return true,
                Err(fault) => fault,
            },
            None => Fault {
                device: self.device(),
                iova,
                access: one_of(required),
                reason: FaultReason::BadLength,
            },
        };
        self.keep_fault(fault);
        false
    }

    /// Returns the region and offset of the byte at `iova`. Stores the fault if there is no
    /// translation.
    #[inline]
    fn region_of(&self, iova: Iova, required: Permissions) -> Option<(&M::R, MemoryRegionAddress)> {
        let byte = IovaRange::inclusive(iova, iova)?;
        let at = match self.translate_cached(&byte, required) {
            Some(at) => at,
            None => self.translate_uncached(byte, required)?,
        };
        self.memory().to_region_addr(GuestAddress(at.start().get()))
    }

    #[inline(never)]
    fn translate_uncached(&self, byte: IovaRange, required: Permissions) -> Option<PhysRange> {
        match self.walk(byte, required) {
            Ok(pieces) => Some(pieces.first()),
            Err(fault) => {
                self.keep_fault(fault);
                None
            }
        }
    }
}

/// Iterator over the memory slices of a range, in order.
///
/// A range of several pages is checked as a whole before the iterator is created. The iterator
/// translates each page again when it reaches it. If another thread unmaps a page during the
/// access, the access ends there. A list of slices instead would cost several times the
/// translation, although it nearly always has one element.
struct Slices<'a, 'p, M> {
    pin: &'a ReadGuard<'p, M>,
    at: Iova,
    /// Bytes left; 0 after an error.
    left: usize,
    required: Permissions,
}

impl<'a, M: GuestMemoryBackend> Iterator for Slices<'a, '_, M> {
    type Item = GuestMemoryResult<Slice<'a, M>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let Self {
            pin,
            at,
            left,
            required,
        } = *self;
        if left == 0 {
            return None;
        }
        let slice = pin.region_of(at, required).and_then(|(region, start)| {
            let here = left
                .min(PAGE - at.offset_in(PAGE as u64) as usize)
                .min(region.len().saturating_sub(start.0) as usize);
            region.get_slice(start, here).ok()
        });
        match slice {
            Some(slice) => {
                self.left = left.saturating_sub(slice.len());
                // This wraps only if no bytes are left.
                self.at = at.wrapping_add(slice.len() as u64);
                Some(Ok(slice))
            }
            None => {
                self.left = 0;
                let at = GuestAddress(at.get());
                Some(Err(GuestMemoryError::InvalidGuestAddress(at)))
            }
        }
    }
}

impl<M: GuestMemoryBackend> FusedIterator for Slices<'_, '_, M> {}

impl<'a, M: GuestMemoryBackend> GuestMemorySliceIterator<'a, MS<'a, M>> for Slices<'a, '_, M> {
    /// Equivalent to the trait's default. The default builds a peekable iterator, which is larger
    /// than everything else together.
    #[inline]
    fn stop_on_error(mut self) -> GuestMemoryResult<impl Iterator<Item = Slice<'a, M>>> {
        let first = self.next().transpose()?;
        Ok(Found { first, rest: self })
    }
}

/// The slices up to the first error.
struct Found<'a, 'p, M: GuestMemoryBackend> {
    first: Option<Slice<'a, M>>,
    rest: Slices<'a, 'p, M>,
}

impl<'a, M: GuestMemoryBackend> Iterator for Found<'a, '_, M> {
    type Item = Slice<'a, M>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        match self.first.take() {
            None if self.rest.left != 0 => {
                let (slice, left) = self.rest.more();
                self.rest.at = self.rest.at.wrapping_add((self.rest.left - left) as u64);
                self.rest.left = left;
                slice
            }
            first => first,
        }
    }
}

impl<'a, M: GuestMemoryBackend> Slices<'a, '_, M> {
    /// Returns the next slice, if any, and the number of bytes left after it.
    ///
    /// Not inlined and not `&mut self`: most accesses end with their first slice, so the iterator
    /// can stay in registers.
    #[inline(never)]
    fn more(&self) -> (Option<Slice<'a, M>>, usize) {
        let mut next = Slices { ..*self };
        let slice = next.next().and_then(Result::ok);
        (slice, next.left)
    }
}
