//! Guest memory as one endpoint sees it through the IOMMU.
//!
//! The IOMMU is held for the whole of an access, lookup and copy: an UNMAP waits for it, and what begins after the answer to the UNMAP
//! finds the mapping gone.

use std::cell::Cell;
use std::sync::MutexGuard;

use ringfence_types::{Access, Iova, IovaRange};
use ringfence_virtio_iommu::{Denied, Device, EndpointId, Translation};
use vm_memory::guest_memory::{Error, GuestMemorySliceIterator};
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryMmap, Permissions, VolatileSlice,
};

use super::Iommu;
use crate::dma::Dma;

/// An endpoint's way to memory.
#[derive(Debug)]
pub struct Translated {
    iommu: Iommu,
    endpoint: EndpointId,
    memory: GuestMemoryMmap,
}

impl Translated {
    pub(super) fn new(iommu: Iommu, endpoint: EndpointId) -> Self {
        Self {
            iommu,
            endpoint,
            memory: GuestMemoryMmap::default(),
        }
    }
}

impl Dma for Translated {
    type View<'a> = View<'a>;

    fn with<R>(&mut self, access: impl FnOnce(&View<'_>) -> R) -> R {
        let view = View {
            device: self.iommu.device(),
            endpoint: self.endpoint,
            memory: &self.memory,
            denied: Cell::new(None),
        };
        let result = access(&view);
        let View {
            mut device, denied, ..
        } = view;
        if let Some(denied) = denied.take() {
            self.iommu.report(&mut device, denied);
        }
        result
    }

    fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        self.memory = memory.clone();
    }
}

/// Memory for the time of one access.
#[derive(Debug)]
pub struct View<'v> {
    device: MutexGuard<'v, Device<()>>,
    endpoint: EndpointId,
    memory: &'v GuestMemoryMmap,
    /// The first access that was stopped.
    denied: Cell<Option<Denied>>,
}

type Slice<'a> = VolatileSlice<'a, ()>;

impl View<'_> {
    /// All pieces of an access, in order; none if any part of it is not allowed.
    fn pieces(
        &self,
        start: GuestAddress,
        bytes: usize,
        permissions: Permissions,
    ) -> Result<Vec<Slice<'_>>, Error> {
        let mut pieces = Vec::new();
        let Ok(bytes) = u64::try_from(bytes) else {
            return Err(Error::InvalidGuestAddress(start));
        };
        if bytes == 0 {
            return Ok(pieces);
        }
        let invalid = Error::InvalidGuestAddress(start);
        let Some(mut rest) = IovaRange::new(Iova::new(start.0), bytes) else {
            return Err(invalid);
        };
        let accesses: &[Access] = match permissions {
            Permissions::No => &[],
            Permissions::Read => &[Access::Read],
            Permissions::Write => &[Access::Write],
            Permissions::ReadWrite => &[Access::Read, Access::Write],
        };
        loop {
            let mut physical = None;
            for access in accesses {
                match self.device.translate(self.endpoint, rest, *access) {
                    Ok(Translation::Memory { physical: to, .. }) => physical = Some(to),
                    // The client emulates interrupts; a device's own write there goes nowhere.
                    Ok(Translation::Doorbell { .. }) => return Err(invalid),
                    Err(denied) => {
                        self.denied.set(self.denied.take().or(Some(denied)));
                        return Err(invalid);
                    }
                }
            }
            let Some(physical) = physical else {
                return Err(invalid);
            };
            let length = usize::try_from(physical.bytes()).map_err(|_| invalid_at(&physical))?;
            let at = GuestAddress(physical.start().get());
            for slice in GuestMemoryBackend::get_slices(self.memory, at, length) {
                pieces.push(slice?);
            }
            let next = rest.start().checked_add(physical.bytes());
            match next.and_then(|next| IovaRange::inclusive(next, rest.last())) {
                Some(more) => rest = more,
                None => return Ok(pieces),
            }
        }
    }
}

fn invalid_at(range: &ringfence_types::PhysRange) -> Error {
    Error::InvalidGuestAddress(GuestAddress(range.start().get()))
}

impl GuestMemory for View<'_> {
    type PhysicalMemory = GuestMemoryMmap;
    type Bitmap = ();

    fn check_range(&self, start: GuestAddress, bytes: usize, permissions: Permissions) -> bool {
        self.pieces(start, bytes, permissions).is_ok()
    }

    fn get_slices<'a>(
        &'a self,
        start: GuestAddress,
        bytes: usize,
        permissions: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, ()>, Error> {
        let pieces = self.pieces(start, bytes, permissions)?;
        Ok(Pieces(pieces.into_iter()))
    }
}

struct Pieces<'a>(std::vec::IntoIter<Slice<'a>>);

impl<'a> Iterator for Pieces<'a> {
    type Item = Result<Slice<'a>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.0.next().map(Ok)
    }
}

impl std::iter::FusedIterator for Pieces<'_> {}

impl<'a> GuestMemorySliceIterator<'a, ()> for Pieces<'a> {}
