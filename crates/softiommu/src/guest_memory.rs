//! Guest memory as the crate vm-memory has it, behind a pin.
//!
//! `GuestMemory` is implemented for [`ReadGuard`] and for nothing that outlives one: a slice it
//! gives is good until the pin's burst takes the next pin, and unmap waits for that. Devices
//! written against `GuestMemory`, such as those over the crate virtio-queue, run on `&ReadGuard` as
//! they are; every address they use is then an I/O virtual one, of rings, descriptors and buffers
//! alike. Its errors have no room for a fault: ask [`ReadGuard::take_fault`].

use std::error::Error;
use std::fmt;
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

/// Why an object in guest memory was not accessed. None of its bytes were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AccessError {
    /// The device may not.
    Fault(Fault),
    /// It may, but there is no memory where it was mapped to.
    NoMemory {
        /// Where the first part of the object would be that is not there.
        range: PhysRange,
    },
}

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fault(fault) => fault.fmt(f),
            Self::NoMemory { range } => write!(f, "no memory at {range}"),
        }
    }
}

impl Error for AccessError {}

impl From<Fault> for AccessError {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

const PAGE: usize = PageSize::Size4K.bytes() as usize;

type Slice<'p, M> = VolatileSlice<'p, MS<'p, M>>;

impl<'p, M: GuestMemoryBackend> ReadGuard<'p, M> {
    /// The object at `iova`, of any alignment.
    #[inline]
    pub fn read<T: ByteValued>(&self, iova: Iova) -> Result<T, AccessError> {
        if let Some(slice) = self.cached_slice(iova, size_of::<T>(), Permissions::READ)
            && let Ok(object) = slice.get_ref::<T>(0)
        {
            return Ok(object.load());
        }
        self.read_parts(iova)
    }

    /// Puts `object` at `iova`, of any alignment.
    #[inline]
    pub fn write<T: ByteValued>(&self, iova: Iova, object: T) -> Result<(), AccessError> {
        if let Some(slice) = self.cached_slice(iova, size_of::<T>(), Permissions::WRITE)
            && let Ok(place) = slice.get_ref::<T>(0)
        {
            place.store(object);
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
            let (part, after) = rest.split_at_mut(slice.len().min(rest.len()));
            slice.copy_to(part);
            rest = after;
        }
        Ok(object)
    }

    #[inline(never)]
    fn write_parts<T: ByteValued>(&self, iova: Iova, object: &T) -> Result<(), AccessError> {
        let range = self.range_of::<T>(iova, Access::Write)?;
        let mut rest = object.as_slice();
        for slice in self.slices_of(range, Permissions::WRITE)? {
            let (part, after) = rest.split_at(slice.len().min(rest.len()));
            slice.copy_from(part);
            rest = after;
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

    /// The memory behind `bytes` bytes at `iova` in the usual case: one page, one region, a link
    /// that is at hand.
    #[inline]
    fn cached_slice(&self, iova: Iova, bytes: usize, wanted: Permissions) -> Option<Slice<'p, M>> {
        let range = IovaRange::new(iova, bytes as u64)?;
        let at = self.translate_cached(&range, wanted)?.start().get();
        let (region, at) = self.memory().to_region_addr(GuestAddress(at))?;
        region.get_slice(at, bytes).ok()
    }

    /// The memory behind `range`, all of it.
    fn slices_of(
        &self,
        range: IovaRange,
        wanted: Permissions,
    ) -> Result<Vec<Slice<'p, M>>, AccessError> {
        let mut slices = Vec::new();
        for piece in self.translate_for(range, wanted)? {
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
            Ok(wanted) => Slices {
                pin: self,
                at: Iova::new(addr.0),
                left: count,
                wanted,
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
        let wanted = self.wanted_access(addr, count, access)?;
        Ok(Slices {
            pin: self,
            at: Iova::new(addr.0),
            left: count,
            wanted,
        })
    }
}

impl<M: GuestMemoryBackend> ReadGuard<'_, M> {
    /// What an access through vm-memory needs, if it is one that a device can make. To ask for no
    /// access is an error, unless it is for no bytes: an address that may not be accessed leads
    /// nowhere.
    #[inline]
    fn wanted_access(
        &self,
        addr: GuestAddress,
        count: usize,
        access: Wanted,
    ) -> GuestMemoryResult<Permissions> {
        let iova = Iova::new(addr.0);
        let wanted = match Permissions::from_bits(access as u64) {
            Some(wanted) => wanted,
            None if count == 0 => Permissions::READ,
            None => return Err(GuestMemoryError::InvalidGuestAddress(addr)),
        };
        let within = count <= PAGE - iova.offset_in(PAGE as u64) as usize;
        match within || count == 0 || self.whole(iova, count, wanted) {
            true => Ok(wanted),
            false => Err(GuestMemoryError::InvalidGuestAddress(addr)),
        }
    }

    /// Whether a range of several pages may be accessed. If not, the fault is kept.
    #[inline(never)]
    fn whole(&self, iova: Iova, bytes: usize, wanted: Permissions) -> bool {
        let fault = match IovaRange::new(iova, bytes as u64) {
            Some(range) => match self.walk(range, wanted) {
                Ok(_) => return true,
                Err(fault) => fault,
            },
            None => Fault {
                device: self.device(),
                iova,
                access: one_of(wanted),
                reason: FaultReason::BadLength,
            },
        };
        self.keep_fault(fault);
        false
    }

    /// The place of the byte at `iova`. If there is none, the fault is kept.
    #[inline]
    fn region_of(&self, iova: Iova, wanted: Permissions) -> Option<(&M::R, MemoryRegionAddress)> {
        let byte = IovaRange::inclusive(iova, iova)?;
        let at = match self.translate_cached(&byte, wanted) {
            Some(at) => at,
            None => self.place_of(byte, wanted)?,
        };
        self.memory().to_region_addr(GuestAddress(at.start().get()))
    }

    #[inline(never)]
    fn place_of(&self, byte: IovaRange, wanted: Permissions) -> Option<PhysRange> {
        match self.walk(byte, wanted) {
            Ok(pieces) => Some(pieces.first()),
            Err(fault) => {
                self.keep_fault(fault);
                None
            }
        }
    }
}

/// The slices behind a range, in order.
///
/// A range of several pages has been found whole before there is an iterator, and its entries are
/// looked at again as it goes: what is given is what the page's entry says then. So where a page is
/// unmapped in the middle of an access, the access ends there. To carry about a list, nearly always
/// of one element, would cost several times the translation.
struct Slices<'a, 'p, M> {
    pin: &'a ReadGuard<'p, M>,
    at: Iova,
    /// Bytes; none once there was an error, too.
    left: usize,
    wanted: Permissions,
}

impl<'a, M: GuestMemoryBackend> Iterator for Slices<'a, '_, M> {
    type Item = GuestMemoryResult<Slice<'a, M>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let Self {
            pin,
            at,
            left,
            wanted,
        } = *self;
        if left == 0 {
            return None;
        }
        let slice = pin.region_of(at, wanted).and_then(|(region, start)| {
            let here = left
                .min(PAGE - at.offset_in(PAGE as u64) as usize)
                .min(region.len().saturating_sub(start.0) as usize);
            region.get_slice(start, here).ok()
        });
        match slice {
            Some(slice) => {
                self.left = left.saturating_sub(slice.len());
                // Where that wraps, nothing is left.
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
    /// As the trait has it. Its own version peeks, and what it builds for that is larger than all
    /// else together.
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
    /// The next slice, if there is one, and how many bytes are left behind it.
    ///
    /// Neither inlined nor by `&mut self`: most accesses end with their first slice, and the
    /// iterator can stay in registers.
    #[inline(never)]
    fn more(&self) -> (Option<Slice<'a, M>>, usize) {
        let mut next = Slices { ..*self };
        let slice = next.next().and_then(Result::ok);
        (slice, next.left)
    }
}
