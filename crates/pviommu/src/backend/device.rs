//! One device of the guest, and changing its mappings as a whole or not at all.

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
    /// Pages that were unmapped and may still be reached, as the tables did not settle. They stay
    /// pinned.
    uncommitted: Vec<Gpa>,
    /// A table refused to give up or to take back what it had: nothing more is asked of it.
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

    /// Whether an earlier failure has left something that may be reached against the view.
    pub(super) fn is_sound(&self) -> bool {
        !self.broken && self.uncommitted.is_empty()
    }

    /// Settles what an earlier request left due.
    ///
    /// # Errors
    /// It is still due.
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

    /// Maps `pages`, which were found free and sound.
    ///
    /// # Errors
    /// The mappings are as before.
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

    /// A frame, a note and an entry; nothing if one of them fails.
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
            // A grant may have been made and revoked: pinned until that has settled.
            self.uncommitted.push(gpa);
            return Err(status_of(error));
        }
        Ok(())
    }

    /// Unmaps `giovas`, which were found mapped.
    ///
    /// # Errors
    /// The mappings are as before.
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
        // Nothing reaches the frames any more: they may go.
        for giova in giovas {
            if let Some((gpa, _)) = self.mappings.remove(giova) {
                backing.unpin(gpa);
            }
        }
        Ok(())
    }

    /// Puts entries back that were cleared, for the view still has them.
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
            // A pin to learn the frame; the mapping's own pin keeps it.
            let back = backing.pin(gpa).is_ok_and(|frame| {
                backing.unpin(gpa);
                tables.map(self.slot, giova, frame, direction).is_ok()
            });
            self.broken |= !back;
        }
    }

    /// Takes down what a failed request, a reset or a refused stream leaves. The frames stay pinned
    /// until the tables have settled.
    #[cold]
    pub(super) fn unmap_all<B: GuestBacking, T: IoTables>(
        &mut self,
        backing: &mut B,
        tables: &mut T,
        giovas: impl Iterator<Item = Iova>,
    ) {
        for giova in giovas {
            if tables.unmap(self.slot, giova).is_err() {
                // Mapping, note and pin stay together.
                self.broken = true;
            } else if let Some((gpa, _)) = self.mappings.remove(giova) {
                self.uncommitted.push(gpa);
            }
        }
        // Left due if it fails: `recover` tries again before anything else is done for the device.
        if tables.commit(self.slot).is_ok() {
            for gpa in self.uncommitted.drain(..) {
                backing.unpin(gpa);
            }
        }
    }

    /// Takes everything down, and gives a device that was broken another chance.
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
