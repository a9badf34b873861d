//! Guest memory as the crate vm-memory has it, behind a pin.
//!
//! `GuestMemory` is implemented for [`Pin`] and for nothing that outlives one: a slice it gives is good until the pin's burst takes the
//! next pin, and unmap waits for that. Devices written against `GuestMemory`, such as those over the crate virtio-queue, run on
//! `&Pin` as they are; every address they use is then an I/O virtual one, of rings, descriptors and buffers alike. Its errors have no
//! room for a fault: ask [`Pin::take_fault`].

use std::error::Error;
use std::fmt;
use std::iter::FusedIterator;

use ringfence_types::{Access, Fault, FaultReason, Iova, IovaRange, Permissions, PhysRange};
use vm_memory::bitmap::{BS, MS};
use vm_memory::guest_memory::{GuestMemoryBackendSliceIterator, GuestMemorySliceIterator};
use vm_memory::{
    ByteValued, GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion,
    GuestMemoryResult, Permissions as Wanted, VolatileMemory, VolatileSlice,
};

use crate::pieces::Pieces;
use crate::reader::Pin;
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

type Slice<'p, M> = VolatileSlice<'p, MS<'p, M>>;

impl<'p, M: GuestMemoryBackend> Pin<'p, M> {
    /// The object at `iova`, of any alignment.
    #[inline]
    pub fn read<T: ByteValued>(&self, iova: Iova) -> Result<T, AccessError> {
        let range = self.range_of::<T>(iova, Access::Read)?;
        let first = self.first_page(range, Permissions::READ)?;
        if first.bytes() == range.bytes()
            && let Some(slice) = self.slice(first)
            && let Ok(object) = slice.get_ref::<T>(0)
        {
            return Ok(object.load());
        }
        let mut object = T::zeroed();
        let mut rest = object.as_mut_slice();
        for slice in self.slices_of(range, Permissions::READ)? {
            let (part, after) = rest.split_at_mut(slice.len().min(rest.len()));
            slice.copy_to(part);
            rest = after;
        }
        Ok(object)
    }

    /// Puts `object` at `iova`, of any alignment.
    #[inline]
    pub fn write<T: ByteValued>(&self, iova: Iova, object: T) -> Result<(), AccessError> {
        let range = self.range_of::<T>(iova, Access::Write)?;
        let first = self.first_page(range, Permissions::WRITE)?;
        if first.bytes() == range.bytes()
            && let Some(slice) = self.slice(first)
            && let Ok(place) = slice.get_ref::<T>(0)
        {
            place.store(object);
            return Ok(());
        }
        let mut rest = object.as_slice();
        for slice in self.slices_of(range, Permissions::WRITE)? {
            let (part, after) = rest.split_at(slice.len().min(rest.len()));
            slice.copy_from(part);
            rest = after;
        }
        Ok(())
    }

    #[inline]
    fn range_of<T>(&self, iova: Iova, access: Access) -> Result<IovaRange, Fault> {
        IovaRange::new(iova, size_of::<T>() as u64).ok_or(Fault {
            device: self.device(),
            iova,
            access,
            reason: FaultReason::BadLength,
        })
    }

    /// The memory at `range`, if it lies in one region.
    #[inline]
    fn slice(&self, range: PhysRange) -> Option<Slice<'p, M>> {
        let (region, at) = self
            .memory()
            .to_region_addr(GuestAddress(range.start().get()))?;
        let bytes = usize::try_from(range.bytes()).ok()?;
        region.get_slice(at, bytes).ok()
    }

    /// The memory behind `range`, all of it.
    #[cold]
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

impl<M: GuestMemoryBackend> GuestMemory for Pin<'_, M> {
    type PhysicalMemory = M;
    type Bitmap = <M::R as GuestMemoryRegion>::B;

    fn check_range(&self, addr: GuestAddress, count: usize, access: Wanted) -> bool {
        match self.asked(addr, count, access) {
            Ok(None) => true,
            Ok(Some((range, wanted))) => match self.translate_for(range, wanted) {
                Ok(pieces) => pieces.into_iter().all(|piece| {
                    let at = GuestAddress(piece.start().get());
                    usize::try_from(piece.bytes()).is_ok_and(|bytes| {
                        GuestMemoryBackend::check_range(self.memory(), at, bytes)
                    })
                }),
                Err(_) => false,
            },
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
        let Some((range, wanted)) = self.asked(addr, count, access)? else {
            return Ok(Slices::of(self.memory(), None));
        };
        match self.translate_for(range, wanted) {
            Ok(pieces) => Ok(Slices::of(self.memory(), Some(pieces))),
            Err(fault) => {
                self.keep(fault);
                Err(GuestMemoryError::InvalidGuestAddress(GuestAddress(
                    fault.iova.get(),
                )))
            }
        }
    }
}

impl<M: GuestMemoryBackend> Pin<'_, M> {
    /// What vm-memory asks for; `None` where that is no bytes. To ask for no access is an error: an address that may not be
    /// accessed leads nowhere.
    #[inline]
    fn asked(
        &self,
        addr: GuestAddress,
        count: usize,
        access: Wanted,
    ) -> GuestMemoryResult<Option<(IovaRange, Permissions)>> {
        if count == 0 {
            return Ok(None);
        }
        let refused = GuestMemoryError::InvalidGuestAddress;
        let wanted = Permissions::from_bits(access as u64).ok_or(refused(addr))?;
        let iova = Iova::new(addr.0);
        match IovaRange::new(iova, count as u64) {
            Some(range) => Ok(Some((range, wanted))),
            None => {
                self.keep(Fault {
                    device: self.device(),
                    iova,
                    access: one_of(wanted),
                    reason: FaultReason::BadLength,
                });
                Err(refused(addr))
            }
        }
    }
}

/// The slices behind a range, in order. All of it has been translated before there is one.
struct Slices<'a, M: GuestMemoryBackend> {
    memory: &'a M,
    /// The present piece,
    piece: Option<GuestMemoryBackendSliceIterator<'a, M>>,
    /// and those after it. None once there was an error.
    pieces: Option<<Pieces as IntoIterator>::IntoIter>,
}

impl<'a, M: GuestMemoryBackend> Slices<'a, M> {
    #[inline]
    fn of(memory: &'a M, pieces: Option<Pieces>) -> Self {
        Self {
            memory,
            piece: None,
            pieces: pieces.map(Pieces::into_iter),
        }
    }
}

impl<'a, M: GuestMemoryBackend> Iterator for Slices<'a, M> {
    type Item = GuestMemoryResult<Slice<'a, M>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(slice) = self.piece.as_mut().and_then(Iterator::next) {
                if slice.is_err() {
                    (self.piece, self.pieces) = (None, None);
                }
                return Some(slice);
            }
            let piece = self.pieces.as_mut()?.next()?;
            let bytes = usize::try_from(piece.bytes()).unwrap_or(usize::MAX);
            let at = GuestAddress(piece.start().get());
            self.piece = Some(GuestMemoryBackend::get_slices(self.memory, at, bytes));
        }
    }
}

impl<M: GuestMemoryBackend> FusedIterator for Slices<'_, M> {}

impl<'a, M: GuestMemoryBackend> GuestMemorySliceIterator<'a, MS<'a, M>> for Slices<'a, M> {}
