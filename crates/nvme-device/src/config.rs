//! Parameters of a controller.

/// Most I/O queue pairs of a controller. Each has its own interrupt vector; vector 0 belongs to
/// the admin queue.
pub const MAX_IO_QUEUES: u16 = 31;

/// Largest supported `MDTS`: transfers of 1 MiB. The list of their pages fits two pages.
const MAX_MDTS: u8 = 8;

/// Parameters of a controller and of its namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Blocks of the namespace.
    pub blocks: u64,
    /// True if the host must not write the namespace.
    pub read_only: bool,
    /// I/O queue pairs, at least 1 and at most [`MAX_IO_QUEUES`].
    pub io_queues: u16,
    /// Most entries of an I/O queue, at least 2.
    pub queue_entries: u16,
    /// Binary logarithm of the largest transfer in pages (`MDTS`), 1 to 8.
    pub transfer_shift: u8,
}

impl Config {
    /// Returns the parameters of a writable namespace with `blocks` blocks.
    pub const fn new(blocks: u64) -> Self {
        Self {
            blocks,
            read_only: false,
            io_queues: 16,
            queue_entries: 256,
            transfer_shift: MAX_MDTS,
        }
    }

    /// Returns the same parameters within their bounds.
    pub(crate) fn bounded(&self) -> Self {
        Self {
            io_queues: self.io_queues.clamp(1, MAX_IO_QUEUES),
            queue_entries: self.queue_entries.max(2),
            transfer_shift: self.transfer_shift.clamp(1, MAX_MDTS),
            ..*self
        }
    }

    /// Returns the number of interrupt vectors.
    pub const fn vectors(&self) -> u16 {
        self.io_queues.saturating_add(1)
    }

    /// Returns the largest transfer in bytes.
    pub(crate) const fn transfer_bytes(&self) -> u64 {
        crate::PAGE_BYTES << self.transfer_shift
    }
}
