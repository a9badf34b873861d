//! Guest memory in an endpoint's view, for one access, with a record of the device's DMAs.

use std::iter::FusedIterator;

use ringfence_softiommu::ReadGuard;
use ringfence_types::{Iova, Permissions, RequesterId};
use vm_memory::bitmap::{BS, MS};
use vm_memory::guest_memory::GuestMemorySliceIterator;
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestMemoryResult, Permissions as Wanted, VolatileSlice,
};

use crate::record::DmaRecord;

type Slice<'a> = VolatileSlice<'a, MS<'a, GuestMemoryMmap>>;

/// Memory that a device can access while its read guard lives. If DMAs are recorded, each range of
/// slices that the device takes is one DMA. A range that faults before its first byte is none.
///
/// The record has the range before the guard ends, so its line precedes that of the unmap.
pub struct RecordedView<'a> {
    guard: ReadGuard<'a, GuestMemoryMmap>,
    dmas: Option<&'a DmaRecord>,
    device: RequesterId,
}

impl<'a> RecordedView<'a> {
    pub(super) fn new(
        guard: ReadGuard<'a, GuestMemoryMmap>,
        dmas: &'a DmaRecord,
        device: RequesterId,
    ) -> Self {
        Self {
            guard,
            dmas: dmas.is_on().then_some(dmas),
            device,
        }
    }

    pub(super) fn guard(&self) -> &ReadGuard<'a, GuestMemoryMmap> {
        &self.guard
    }
}

impl std::fmt::Debug for RecordedView<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RecordedView({})", self.device)
    }
}

impl GuestMemory for RecordedView<'_> {
    type PhysicalMemory = GuestMemoryMmap;
    type Bitmap = <<GuestMemoryMmap as GuestMemoryBackend>::R as GuestMemoryRegion>::B;

    /// Accesses nothing, so the record has no line.
    fn check_range(&self, addr: GuestAddress, count: usize, access: Wanted) -> bool {
        self.guard.check_range(addr, count, access)
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Wanted,
    ) -> GuestMemoryResult<impl GuestMemorySliceIterator<'a, BS<'a, Self::Bitmap>>> {
        let slices = self.guard.get_slices(addr, count, access)?;
        let taken = self.dmas.zip(kind(access)).map(|(dmas, kind)| Taken {
            dmas,
            device: self.device,
            kind,
            start: Iova::new(addr.0),
            bytes: 0,
        });
        Ok(Slices { slices, taken })
    }
}

fn kind(access: Wanted) -> Option<Permissions> {
    match access {
        Wanted::Read => Some(Permissions::READ),
        Wanted::Write => Some(Permissions::WRITE),
        Wanted::ReadWrite => Some(Permissions::READ_WRITE),
        Wanted::No => None,
    }
}

/// Part of a range whose slices the device has taken. Recorded on drop.
struct Taken<'a> {
    dmas: &'a DmaRecord,
    device: RequesterId,
    kind: Permissions,
    start: Iova,
    bytes: u64,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            let Self { kind, start, .. } = *self;
            self.dmas.access(self.device, kind, start, self.bytes);
        }
    }
}

struct Slices<'a, I> {
    slices: I,
    taken: Option<Taken<'a>>,
}

impl<'a, I: Iterator<Item = GuestMemoryResult<Slice<'a>>>> Iterator for Slices<'a, I> {
    type Item = GuestMemoryResult<Slice<'a>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let slice = self.slices.next()?;
        if let (Ok(slice), Some(taken)) = (&slice, &mut self.taken) {
            taken.bytes += slice.len() as u64;
        }
        Some(slice)
    }
}

impl<'a, I: FusedIterator<Item = GuestMemoryResult<Slice<'a>>>> FusedIterator for Slices<'a, I> {}

impl<'a, I> GuestMemorySliceIterator<'a, MS<'a, GuestMemoryMmap>> for Slices<'a, I> where
    I: GuestMemorySliceIterator<'a, MS<'a, GuestMemoryMmap>>
{
}
