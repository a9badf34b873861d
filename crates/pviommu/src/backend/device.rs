//! One device of the guest. A change of its mappings succeeds as a whole or not at all.

use alloc::vec::Vec;

use ringfence_types::{Direction, Iova};

use super::device_mappings::{DeviceMappings, NoLeaf};
use super::{DeviceSlot, GuestBacking, IoError, IoTables, PinError};
use crate::wire::{Devid, Gpa, Status};

#[derive(Debug)]
pub(super) struct BackendDevice {
    pub(super) id: Devid,
    pub(super) slot: DeviceSlot,
    pub(super) mappings: DeviceMappings,
    /// Unmapped pages that the device may still access, because a commit of the tables failed. They
    /// stay pinned.
    uncommitted: Vec<Gpa>,
    /// True if a table failed to unmap a page or to restore one. The backend then refuses requests.
    broken: bool,
}

impl BackendDevice {
    pub(super) fn new(id: Devid, slot: DeviceSlot, leaves_max: u64) -> Self {
        Self {
            id,
            slot,
            mappings: DeviceMappings::new(leaves_max),
            uncommitted: Vec::new(),
            broken: false,
        }
    }

    /// Returns true if no earlier failure left pages that the device may access against the view.
    pub(super) fn is_sound(&self) -> bool {
        !self.broken && self.uncommitted.is_empty()
    }

    /// Commits what an earlier request left uncommitted.
    ///
    /// # Errors
    /// The commit failed again.
    #[inline]
    pub(super) fn recover<B: GuestBacking, T: IoTables>(
        &mut self,
        backing: &mut B,
        tables: &mut T,
    ) -> Result<(), Status> {
        if self.is_sound() {
            return Ok(());
        }
        self.retry_commit(backing, tables)
    }

    #[cold]
    fn retry_commit<B: GuestBacking, T: IoTables>(
        &mut self,
        backing: &mut B,
        tables: &mut T,
    ) -> Result<(), Status> {
        if self.broken || tables.commit(self.slot).is_err() {
            return Err(Status::Failed);
        }
        for gpa in self.uncommitted.drain(..) {
            backing.unpin(gpa);
        }
        Ok(())
    }

    /// Maps `pages`, which the caller has validated and found unmapped.
    ///
    /// # Errors
    /// The mappings are unchanged.
    pub(super) fn map<B: GuestBacking, T: IoTables>(
        &mut self,
        backing: &mut B,
        tables: &mut T,
        direction: Direction,
        pages: impl Iterator<Item = (Iova, Gpa)> + Clone,
    ) -> Result<(), Status> {
        let mut done = 0;
        let mut outcome = Ok(());
        for (giova, gpa) in pages.clone() {
            outcome = self.map_page(backing, tables, direction, giova, gpa);
            if outcome.is_err() {
                break;
            }
            done += 1;
        }
        if outcome.is_ok() {
            outcome = tables.commit(self.slot).map_err(status_of);
        }
        if outcome.is_err() {
            self.unmap_all(backing, tables, pages.take(done).map(|(giova, _)| giova));
        }
        outcome
    }

    /// Pins the frame, records the mapping and writes the entry. Undoes all of it on failure.
    #[inline]
    fn map_page<B: GuestBacking, T: IoTables>(
        &mut self,
        backing: &mut B,
        tables: &mut T,
        direction: Direction,
        giova: Iova,
        gpa: Gpa,
    ) -> Result<(), Status> {
        let frame = backing.pin(gpa).map_err(|error| match error {
            PinError::NotMemory => Status::BadGpa,
            PinError::NoRoom => Status::NoRoom,
            PinError::Corrupt => Status::Failed,
        })?;
        if let Err(NoLeaf) = self.mappings.insert(giova, gpa, direction) {
            backing.unpin(gpa);
            return Err(Status::NoRoom);
        }
        if let Err(error) = tables.map(self.slot, giova, frame, direction) {
            self.mappings.remove(giova);
            // The tables may have granted and revoked the page: keep it pinned until a commit
            // succeeds.
            self.uncommitted.push(gpa);
            return Err(status_of(error));
        }
        Ok(())
    }

    /// Unmaps `giovas`, which the caller has found mapped.
    ///
    /// # Errors
    /// The mappings are unchanged.
    pub(super) fn unmap<B: GuestBacking, T: IoTables>(
        &mut self,
        backing: &mut B,
        tables: &mut T,
        giovas: impl Iterator<Item = Iova> + Clone,
    ) -> Result<(), Status> {
        let mut done = 0;
        let mut outcome = Ok(());
        for giova in giovas.clone() {
            outcome = tables.unmap(self.slot, giova);
            if outcome.is_err() {
                break;
            }
            done += 1;
        }
        if outcome.is_ok() {
            outcome = tables.commit(self.slot);
        }
        if outcome.is_err() {
            self.restore(backing, tables, giovas.take(done));
            return Err(Status::Failed);
        }
        // The device can no longer access the frames, so unpin them.
        for giova in giovas {
            if let Some((gpa, _)) = self.mappings.remove(giova) {
                backing.unpin(gpa);
            }
        }
        Ok(())
    }

    /// Maps cleared entries again, because the view still contains them.
    #[cold]
    fn restore<B: GuestBacking, T: IoTables>(
        &mut self,
        backing: &mut B,
        tables: &mut T,
        giovas: impl Iterator<Item = Iova>,
    ) {
        for giova in giovas {
            let Some((gpa, direction)) = self.mappings.get(giova) else {
                continue;
            };
            // Pin the page only to learn its frame. The mapping holds another pin.
            let restored = backing.pin(gpa).is_ok_and(|frame| {
                backing.unpin(gpa);
                tables.map(self.slot, giova, frame, direction).is_ok()
            });
            self.broken |= !restored;
        }
    }

    /// Unmaps the pages of a failed request, a reset or a rejected stream. The frames stay pinned
    /// until the tables commit.
    #[cold]
    pub(super) fn unmap_all<B: GuestBacking, T: IoTables>(
        &mut self,
        backing: &mut B,
        tables: &mut T,
        giovas: impl Iterator<Item = Iova>,
    ) {
        for giova in giovas {
            if tables.unmap(self.slot, giova).is_err() {
                // Keep the entry, the record and the pin.
                self.broken = true;
            } else if let Some((gpa, _)) = self.mappings.remove(giova) {
                self.uncommitted.push(gpa);
            }
        }
        // If the commit fails, `recover` retries it before the next request of the device.
        if tables.commit(self.slot).is_ok() {
            for gpa in self.uncommitted.drain(..) {
                backing.unpin(gpa);
            }
        }
    }

    /// Unmaps everything and clears the broken state of the device.
    pub(super) fn reset<B: GuestBacking, T: IoTables>(&mut self, backing: &mut B, tables: &mut T) {
        self.broken = false;
        let mapped: Vec<Iova> = self.mappings.iter().map(|(giova, ..)| giova).collect();
        self.unmap_all(backing, tables, mapped.into_iter());
    }
}

const fn status_of(error: IoError) -> Status {
    match error {
        IoError::NoRoom => Status::NoRoom,
        IoError::Failed => Status::Failed,
    }
}
