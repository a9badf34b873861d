//! Block device over a raw file (virtio 1.2, section 5.2).
//!
//! Data passes through a buffer of the device: file I/O may block, and no translation of a guest
//! address outlives a wait. Data of an acknowledged write is on stable storage after the next
//! acknowledged flush, or at once if the driver did not accept `VIRTIO_BLK_F_FLUSH`.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::sync::Arc;

use ringfence_vfio_user::fields::{copy_part, u32_at, u64_at};
use virtio_queue::Queue;

use super::chain::{Chain, MAX_SEGMENTS, Segments};
use super::quantum::{ChainOutcome, QuantumResult, serve_chains};
use super::{Device, DeviceState, DiskKind, DmaInjector, QueueBroken};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::limits::{BoundedLog, GuestLimits};
use crate::saved_state::{HandOverBlocker, StateError};

/// Bytes of a sector, independent of the block size.
pub const SECTOR_BYTES: u64 = 512;

const F_SEG_MAX: u64 = 1 << 2;
const F_RO: u64 = 1 << 5;
const F_FLUSH: u64 = 1 << 9;

const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;

const HEADER_BYTES: u32 = 16;
const ID_BYTES: u32 = 20;
/// Bytes that one transfer copies.
const BUFFER_BYTES: u32 = 256 * 1024;

/// Status that the device writes to the last byte of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum BlkStatus {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// A request exceeds the size limit; the driver sees an I/O error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request of {bytes} bytes exceeds the limit of {limit}")]
pub struct RequestTooLong {
    /// Bytes of the request.
    pub bytes: u64,
    /// Most bytes that a request may have.
    pub limit: u64,
}

/// A virtio block device.
#[derive(Debug)]
pub struct Blk {
    file: File,
    sectors: u64,
    read_only: bool,
    write_through: bool,
    buffer: Vec<u8>,
    injector: Option<DmaInjector>,
    queue_sizes: [u16; 1],
    request_bytes: u64,
    log: BoundedLog,
    counters: Arc<DeviceCounters>,
}

impl Blk {
    /// Creates a disk over `file`. Its capacity is the number of whole sectors that the file has
    /// now.
    ///
    /// # Errors
    /// The file is neither a regular file nor a block device, or is shorter than a sector, or its
    /// size cannot be determined.
    pub fn new(file: File, read_only: bool, counters: Arc<DeviceCounters>) -> io::Result<Self> {
        let kind = file.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let why = "the disk must be a regular file or a block device";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        // Seeking also finds the size of a block device.
        let bytes = io::Seek::seek(&mut &file, io::SeekFrom::End(0))?;
        if bytes < SECTOR_BYTES {
            let why =
                format!("the disk has {bytes} bytes; it needs at least one sector of 512 bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let limits = GuestLimits::default();
        Ok(Self {
            file,
            sectors: bytes / SECTOR_BYTES,
            read_only,
            write_through: true,
            buffer: Vec::new(),
            injector: None,
            queue_sizes: [limits.queue_size],
            request_bytes: limits.request_bytes,
            log: BoundedLog::default(),
            counters,
        })
    }

    /// Returns the file that holds the data.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns true if the driver must not write the disk.
    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns the capacity in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.sectors.saturating_mul(SECTOR_BYTES)
    }

    /// Recreates the disk of another process over `file`, with the capacity of `sectors` that the
    /// driver knows.
    ///
    /// # Errors
    /// [`StateError`] if the file is neither a regular file nor a block device, or is too short.
    pub(crate) fn restore(
        file: File,
        read_only: bool,
        sectors: u64,
        counters: Arc<DeviceCounters>,
    ) -> Result<Self, StateError> {
        let kind = file.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(StateError::NotA { what: "disk" });
        }
        let mut disk = Self::new(file, read_only, counters)?;
        if disk.sectors < sectors {
            return Err(StateError::BadValue {
                what: "sectors",
                value: sectors,
            });
        }
        disk.sectors = sectors;
        Ok(disk)
    }

    /// Sets the limits; `complaints` logs requests that exceed them.
    pub fn set_limits(&mut self, limits: &GuestLimits, log: BoundedLog) {
        self.queue_sizes = [limits.queue_size];
        self.request_bytes = limits.request_bytes;
        self.log = log;
    }

    /// Logs a request that exceeds the limit.
    pub(crate) fn log_too_long(&mut self, refused: RequestTooLong) {
        self.log.log(&refused);
    }

    /// Makes the device inject DMA accesses, to test the protection.
    pub fn inject_dma(&mut self, how: DmaInjector) {
        self.injector = Some(how);
    }

    /// Serves one request. Returns the number of bytes written to its writable part.
    fn serve<A: Dma>(&mut self, chain: &mut Chain, dma: &mut A) -> u32 {
        let Some(status_at) = chain.writable.take_last_byte() else {
            self.counters.malformed.add(1);
            return 0;
        };
        let (status, written) = if chain.malformed {
            (BlkStatus::IoError, 0)
        } else {
            self.run(chain, dma)
        };
        if dma.interrupted() {
            return 0;
        }
        if status != BlkStatus::Ok {
            self.counters.failed.add(1);
        }
        let stored = dma.with_retry(|memory| status_at.write(memory, &[status as u8]));
        if stored.is_err() {
            if !dma.interrupted() {
                self.counters.malformed.add(1);
            }
            return 0;
        }
        written.saturating_add(1)
    }

    fn run<A: Dma>(&mut self, chain: &mut Chain, dma: &mut A) -> (BlkStatus, u32) {
        let mut header = [0; HEADER_BYTES as usize];
        let read = chain.readable.take_front(HEADER_BYTES).is_some_and(|at| {
            dma.with_retry(|memory| at.read(memory, &mut header))
                .is_ok()
        });
        let (Some(kind), Some(sector), true) = (u32_at(&header, 0), u64_at(&header, 8), read)
        else {
            return (BlkStatus::IoError, 0);
        };
        let bytes = chain.readable.bytes().max(chain.writable.bytes());
        if bytes > self.request_bytes {
            let most = self.request_bytes;
            self.log_too_long(RequestTooLong { bytes, limit: most });
            return (BlkStatus::IoError, 0);
        }
        match kind {
            T_IN => self.read(sector, &mut chain.writable, dma),
            T_OUT if self.read_only => (BlkStatus::IoError, 0),
            T_OUT => (self.write(sector, &mut chain.readable, dma), 0),
            T_FLUSH => {
                self.counters.flushes.add(1);
                (status_of(self.file.sync_data()), 0)
            }
            T_GET_ID => identify(&mut chain.writable, dma),
            _ => (BlkStatus::Unsupported, 0),
        }
    }

    /// Returns the byte offset of `sector`. `None` unless `bytes` is a multiple of the sector size
    /// and the range lies on the disk.
    fn offset(&self, sector: u64, bytes: u64) -> Option<u64> {
        let end = sector.checked_add(bytes / SECTOR_BYTES)?;
        (bytes.is_multiple_of(SECTOR_BYTES) && end <= self.sectors)
            .then_some(sector.checked_mul(SECTOR_BYTES)?)
    }

    fn read<A: Dma>(&mut self, sector: u64, to: &mut Segments, dma: &mut A) -> (BlkStatus, u32) {
        let mut left = to.bytes();
        let Some(mut offset) = self.offset(sector, left) else {
            return (BlkStatus::IoError, 0);
        };
        let mut written = 0u32;
        while left > 0 {
            let part = piece(left);
            let Some(at) = to.take_front(part) else {
                return (BlkStatus::IoError, written);
            };
            let buffer = room(&mut self.buffer, part);
            if self.file.read_exact_at(buffer, offset).is_err()
                || dma.with_retry(|memory| at.write(memory, buffer)).is_err()
            {
                return (BlkStatus::IoError, written);
            }
            left -= u64::from(part);
            offset += u64::from(part);
            written = written.saturating_add(part);
        }
        self.counters.bytes_read.add(written.into());
        (BlkStatus::Ok, written)
    }

    fn write<A: Dma>(&mut self, sector: u64, from: &mut Segments, dma: &mut A) -> BlkStatus {
        let mut left = from.bytes();
        let Some(mut offset) = self.offset(sector, left) else {
            return BlkStatus::IoError;
        };
        self.counters.bytes_written.add(left);
        while left > 0 {
            let part = piece(left);
            let Some(at) = from.take_front(part) else {
                return BlkStatus::IoError;
            };
            let buffer = room(&mut self.buffer, part);
            if dma.with_retry(|memory| at.read(memory, buffer)).is_err()
                || self.file.write_all_at(buffer, offset).is_err()
            {
                return BlkStatus::IoError;
            }
            left -= u64::from(part);
            offset += u64::from(part);
        }
        if self.write_through {
            return status_of(self.file.sync_data());
        }
        BlkStatus::Ok
    }
}

fn identify<A: Dma>(to: &mut Segments, dma: &mut A) -> (BlkStatus, u32) {
    let mut id = [0; ID_BYTES as usize];
    copy_part(b"ringfence", 0, &mut id);
    match to.take_front(ID_BYTES) {
        Some(at) if dma.with_retry(|memory| at.write(memory, &id)).is_ok() => {
            (BlkStatus::Ok, ID_BYTES)
        }
        _ => (BlkStatus::IoError, 0),
    }
}

fn piece(left: u64) -> u32 {
    u32::try_from(left).unwrap_or(u32::MAX).min(BUFFER_BYTES)
}

/// Returns the first `part` bytes of `buffer` and grows it if necessary.
fn room(buffer: &mut Vec<u8>, part: u32) -> &mut [u8] {
    let bytes = part as usize;
    if buffer.len() < bytes {
        buffer.resize(bytes, 0);
    }
    &mut buffer[..bytes]
}

fn status_of(result: io::Result<()>) -> BlkStatus {
    if result.is_ok() {
        BlkStatus::Ok
    } else {
        BlkStatus::IoError
    }
}

impl Device for Blk {
    const TYPE: u16 = 2;
    const CLASS: [u8; 3] = [0x01, 0x80, 0x00];

    fn features(&self) -> u64 {
        F_SEG_MAX | F_FLUSH | if self.read_only { F_RO } else { 0 }
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let mut config = self.sectors.to_le_bytes().to_vec();
        // `size_max` is 0 because it is not offered; `seg_max` leaves room for header and status.
        config.extend(0u32.to_le_bytes());
        let segments = u32::try_from(MAX_SEGMENTS.saturating_sub(2)).unwrap_or(1);
        config.extend(segments.to_le_bytes());
        copy_part(&config, offset, data);
    }

    fn activate(&mut self, features: u64) {
        self.write_through = features & F_FLUSH == 0;
    }

    fn save(&self) -> Result<DeviceState, HandOverBlocker> {
        if self.injector.is_some() {
            return Err(HandOverBlocker::Unsupported("a disk with injected DMA"));
        }
        Ok(DeviceState::Blk {
            file: self.file.try_clone()?.into(),
            read_only: self.read_only,
            sectors: self.sectors,
            kind: DiskKind::Plain,
        })
    }

    fn process<A: Dma>(
        &mut self,
        _index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken> {
        if let Some(injector) = &mut self.injector {
            injector.keep_reading(dma);
        }
        let counters = Arc::clone(&self.counters);
        let served = serve_chains(queue, dma, &counters, |chain, dma| {
            if let Some(injector) = &mut self.injector {
                injector.on_request(chain, dma);
            }
            ChainOutcome::Used(self.serve(chain, dma))
        });
        let mut turn = served?;
        // The next turn comes after the interrupt of this one.
        turn.more |= self
            .injector
            .as_ref()
            .is_some_and(DmaInjector::has_kept_data);
        Ok(turn)
    }
}
