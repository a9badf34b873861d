//! Slices of guest memory for an access that is completely translated.

use std::iter::FusedIterator;
use std::vec;

use vm_memory::bitmap::MS;
use vm_memory::guest_memory::GuestMemorySliceIterator;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap, GuestMemoryRegion,
    GuestMemoryResult, VolatileSlice,
};

type Slice<'a> = VolatileSlice<'a, MS<'a, GuestMemoryMmap>>;

/// A range within one page: guest-physical address and length in bytes.
pub(crate) type Part = (GuestAddress, usize);

/// The slices of `parts`, in their order.
pub(crate) struct PartSlices<'a> {
    guest: &'a GuestMemoryMmap,
    parts: vec::IntoIter<Part>,
}

impl<'a> PartSlices<'a> {
    pub(crate) fn new(guest: &'a GuestMemoryMmap, parts: Vec<Part>) -> Self {
        Self {
            guest,
            parts: parts.into_iter(),
        }
    }
}

impl<'a> Iterator for PartSlices<'a> {
    type Item = GuestMemoryResult<Slice<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        let (at, bytes) = self.parts.next()?;
        let region = self.guest.to_region_addr(at);
        let slice = region.ok_or(GuestMemoryError::InvalidGuestAddress(at));
        Some(slice.and_then(|(region, start)| region.get_slice(start, bytes)))
    }
}

impl FusedIterator for PartSlices<'_> {}

impl<'a> GuestMemorySliceIterator<'a, MS<'a, GuestMemoryMmap>> for PartSlices<'a> {}
