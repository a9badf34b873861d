//! An NVMe disk as a PCI function. The controller itself is
//! [`ringfence_nvme_device`]; here are its configuration space, its interrupts, its access to the
//! guest's memory and the file with its blocks.

mod function;
mod medium;
mod memory;

#[cfg(test)]
mod tests;

pub use function::NvmeFunction;
pub use medium::FileMedium;

use ringfence_nvme_device::{BLOCK_BYTES, Config};

use crate::limits::GuestLimits;
use crate::virtio::blk::Blk;

/// Returns the parameters of a controller for `disk`. A transfer has at most as many bytes as the
/// limit permits, but two pages are the least that the protocol can express.
pub fn config(disk: &Blk, limits: &GuestLimits) -> Config {
    let blocks = disk.bytes() / BLOCK_BYTES;
    let usual = Config::new(blocks);
    let pages = limits.request_bytes / ringfence_nvme_device::PAGE_BYTES;
    let shift = pages
        .checked_ilog2()
        .unwrap_or(0)
        .clamp(1, usual.transfer_shift.into());
    Config {
        read_only: disk.is_read_only(),
        queue_entries: limits.queue_size,
        transfer_shift: shift as u8,
        ..usual
    }
}
