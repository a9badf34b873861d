//! Leaving a host, and arriving on one (section 4.4).

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::Iova;

use super::handle::find;
use super::{Backend, GuestBacking, IoTables};
use crate::wire::{
    Devid, MigrationStream, OutOfOrder, PAGE_BYTES, Record, Status, StreamError, StreamWriter,
};

/// Why a stream was refused. Nothing is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RestoreError {
    /// There are mappings already, or a device is not settled.
    NotEmpty(Devid),
    /// The bytes are no stream.
    Stream(StreamError),
    /// A mapping of it would have been refused as a request.
    Refused {
        /// Number of the record, from 0.
        record: u64,
        /// Whose mapping.
        device: Devid,
        /// The first page of the record.
        first: Iova,
        /// As the guest would have been answered.
        status: Status,
    },
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotEmpty(device) => write!(f, "device {device} has mappings already"),
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
    /// The guest's view of all mappings, as a stream of records. No request may be handled between
    /// this and the guest's stop at the source.
    ///
    /// # Errors
    /// None: devices and views are in order, and no configuration maps the last page of all.
    pub fn export(&self) -> Result<Vec<u8>, OutOfOrder> {
        let mut writer = StreamWriter::new();
        for device in &self.devices {
            for (giova, gpa, direction) in device.mappings.iter() {
                writer.page(device.id, giova, gpa, direction)?;
            }
        }
        Ok(writer.finish())
    }

    /// Makes the mappings of `stream`, in new tables over this host's frames. There are none yet.
    ///
    /// # Errors
    /// [`RestoreError`]; nothing is mapped, whatever the stream was.
    pub fn restore(&mut self, stream: &[u8]) -> Result<(), RestoreError> {
        let taken = |device: &&super::device::BackendDevice| {
            device.mappings.live() != 0 || !device.is_sound()
        };
        if let Some(device) = self.devices.iter().find(taken) {
            return Err(RestoreError::NotEmpty(device.id));
        }
        let stream = MigrationStream::decode(stream).map_err(RestoreError::Stream)?;
        // All of it is looked at before any of it is done.
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
                // What stays due after this is remembered by its device.
                let _ = self.reset();
                return Err(refused(number, &record, status));
            }
        }
        Ok(())
    }

    /// Whether a record's mappings would be taken as requests, `pages` being those of its device
    /// with it.
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
