//! Migration: export and restore of mappings (PVIOMMU paper, section 4.4).

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::Iova;

use super::handle::find;
use super::{Backend, GuestBacking, IoTables};
use crate::wire::{
    Devid, MigrationStream, OutOfOrder, PAGE_BYTES, Record, Status, StreamError, StreamWriter,
};

/// The part of a device that its mappings do not describe: its registers and its positions in
/// rings. The mappings of a device are of no use at a destination without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceState {
    /// The embedder transfers it, as for a simulated device.
    Transferred,
    /// Nothing can read it, as in directly assigned hardware. Section 4.4: such devices "do not
    /// support live migration because internal information of such devices cannot be migrated".
    Inaccessible,
}

/// Reason why the mappings cannot migrate. There is no stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExportError {
    /// The state of this device is [`DeviceState::Inaccessible`]. Unplug the device first.
    Inaccessible(Devid),
    /// A mapping cannot be encoded. This never happens: devices and mappings are in order, and no
    /// configuration allows mapping the last page of the address space.
    OutOfOrder(OutOfOrder),
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inaccessible(device) => write!(
                f,
                "the state of device {device} cannot be transferred: unplug it before the migration"
            ),
            Self::OutOfOrder(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for ExportError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Inaccessible(_) => None,
            Self::OutOfOrder(error) => Some(error),
        }
    }
}

/// Reason why a stream was rejected. Nothing is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RestoreError {
    /// The device has mappings already, or an earlier commit failed.
    NotEmpty(Devid),
    /// The stream is malformed.
    Stream(StreamError),
    /// The backend would have refused one of its mappings as a request.
    Refused {
        /// Number of the record, from 0.
        record: u64,
        /// Device of the record.
        device: Devid,
        /// First page of the record.
        first: Iova,
        /// Status that the guest would have received.
        status: Status,
    },
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotEmpty(device) => write!(f, "device {device} already has mappings"),
            Self::Stream(error) => error.fmt(f),
            Self::Refused {
                record,
                device,
                first,
                status,
            } => write!(
                f,
                "migration record {record}, device {device} from {first}: {status}"
            ),
        }
    }
}

impl core::error::Error for RestoreError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Stream(error) => Some(error),
            _ => None,
        }
    }
}

impl<B: GuestBacking, T: IoTables> Backend<B, T> {
    /// Encodes the guest's view of all mappings as a stream of records. The source must not handle
    /// another request after this.
    ///
    /// `state_of` returns the [`DeviceState`] of a device of the guest. A guest with a device of
    /// inaccessible state does not migrate, even if the device has no mappings.
    ///
    /// # Errors
    /// [`ExportError`]. The source continues to work.
    pub fn export(&self, state_of: impl Fn(Devid) -> DeviceState) -> Result<Vec<u8>, ExportError> {
        let mut devices = self.devices.iter().map(|device| device.id);
        if let Some(device) = devices.find(|id| state_of(*id) == DeviceState::Inaccessible) {
            return Err(ExportError::Inaccessible(device));
        }
        let mut writer = StreamWriter::new();
        for device in &self.devices {
            for (giova, gpa, direction) in device.mappings.iter() {
                writer
                    .page(device.id, giova, gpa, direction)
                    .map_err(ExportError::OutOfOrder)?;
            }
        }
        Ok(writer.finish())
    }

    /// Makes the mappings of `stream` in new tables over this host's frames. The backend must have
    /// no mappings yet.
    ///
    /// # Errors
    /// [`RestoreError`]; nothing is mapped.
    pub fn restore(&mut self, stream: &[u8]) -> Result<(), RestoreError> {
        let has_mappings = |device: &&super::device::BackendDevice| {
            device.mappings.live() != 0 || !device.is_sound()
        };
        if let Some(device) = self.devices.iter().find(has_mappings) {
            return Err(RestoreError::NotEmpty(device.id));
        }
        let stream = MigrationStream::decode(stream).map_err(RestoreError::Stream)?;
        // Validate the whole stream before mapping any of it.
        let refused = |number, record: &Record<'_>, status| RestoreError::Refused {
            record: number,
            device: record.device,
            first: record.first,
            status,
        };
        let mut pages_of: (Option<Devid>, u64) = (None, 0);
        for (record, number) in stream.records().zip(0..) {
            let before = match pages_of {
                (device, pages) if device == Some(record.device) => pages,
                _ => 0,
            };
            let pages = before.saturating_add(record.gpas.len() as u64);
            pages_of = (Some(record.device), pages);
            self.check(&record, pages)
                .map_err(|status| refused(number, &record, status))?;
        }
        for (record, number) in stream.records().zip(0..) {
            let Some(device) = find(&mut self.devices, record.device) else {
                continue;
            };
            let (direction, pairs) = (record.direction, record.pairs());
            if let Err(status) = device.map(&mut self.backing, &mut self.tables, direction, pairs) {
                // Each device remembers the pages that a failed commit leaves.
                let _ = self.reset();
                return Err(refused(number, &record, status));
            }
        }
        Ok(())
    }

    /// Validates a record like a request. `pages` is the number of its device's pages up to and
    /// including this record.
    fn check(&mut self, record: &Record<'_>, pages: u64) -> Result<(), Status> {
        find(&mut self.devices, record.device).ok_or(Status::NoDevice)?;
        let last = Iova::new(record.end().get().wrapping_sub(PAGE_BYTES));
        if !self.config.can_map(record.first) || !self.config.can_map(last) {
            return Err(Status::BadGiova);
        }
        for gpa in record.gpas {
            if !gpa.is_aligned(PAGE_BYTES) || !self.backing.contains(gpa) {
                return Err(Status::BadGpa);
            }
        }
        if pages > self.limits.mappings {
            return Err(Status::NoRoom);
        }
        Ok(())
    }
}
