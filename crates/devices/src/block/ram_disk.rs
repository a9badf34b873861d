//! A disk in memory.

/// Bytes of a block.
pub const BLOCK_BYTES: u64 = 512;

/// The medium behind a controller.
#[derive(Debug, Clone)]
pub struct RamDisk {
    bytes: Vec<u8>,
}

/// Error: a request extends beyond the last block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes from block {block} extend beyond the disk")]
pub struct OutOfRange {
    /// Number of the first block.
    pub block: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl RamDisk {
    /// Creates a disk of `blocks` zeroed blocks.
    pub fn new(blocks: usize) -> Self {
        Self {
            bytes: vec![0; blocks.saturating_mul(BLOCK_BYTES as usize)],
        }
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> u64 {
        self.bytes.len() as u64 / BLOCK_BYTES
    }

    /// Returns the `bytes` bytes from `block` on.
    ///
    /// # Errors
    /// Some of the bytes are beyond the end of the disk.
    pub fn at(&mut self, block: u64, bytes: u64) -> Result<&mut [u8], OutOfRange> {
        let wrong = OutOfRange { block, bytes };
        let start = block.checked_mul(BLOCK_BYTES).ok_or(wrong)?;
        let end = start.checked_add(bytes).ok_or(wrong)?;
        let start = usize::try_from(start).map_err(|_| wrong)?;
        let end = usize::try_from(end).map_err(|_| wrong)?;
        self.bytes.get_mut(start..end).ok_or(wrong)
    }
}
