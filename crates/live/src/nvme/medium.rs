//! The blocks of a namespace in a raw file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ringfence_nvme_device::{BLOCK_BYTES, Medium, MediumError};

use crate::counters::DeviceCounters;
use crate::virtio::blk::Blk;

/// A file with the blocks.
#[derive(Debug)]
pub struct FileMedium {
    file: File,
    counters: Arc<DeviceCounters>,
}

impl FileMedium {
    /// Uses the file of `disk`.
    ///
    /// # Errors
    /// The host has no free descriptors.
    pub fn new(disk: &Blk, counters: Arc<DeviceCounters>) -> io::Result<Self> {
        Ok(Self {
            file: disk.file().try_clone()?,
            counters,
        })
    }
}

/// Returns the offset of a block in the file.
fn offset(block: u64) -> Result<u64, MediumError> {
    block.checked_mul(BLOCK_BYTES).ok_or(MediumError)
}

impl Medium for FileMedium {
    fn read(&mut self, block: u64, data: &mut [u8]) -> Result<(), MediumError> {
        let read = self.file.read_exact_at(data, offset(block)?);
        read.map_err(|_| MediumError)
    }

    fn write(&mut self, block: u64, data: &[u8]) -> Result<(), MediumError> {
        let written = self.file.write_all_at(data, offset(block)?);
        written.map_err(|_| MediumError)
    }

    fn flush(&mut self) -> Result<(), MediumError> {
        self.counters.flushes.add(1);
        self.file.sync_data().map_err(|_| MediumError)
    }
}
