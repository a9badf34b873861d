//! NVMe: a submission queue, a completion queue, physical region pages (NVM Express base
//! specification 2.0, sections 3.3 and 4.1; NVM command set specification 1.0, section 3.2).

mod controller;
mod layout;
mod queue;

use ringfence_hw::DmaUsage;

pub use controller::NvmeController;
pub use layout::{COMMAND_BYTES, MAX_PAGES, NvmeCommand, NvmeCompletion, NvmeStatus, Opcode};
pub use queue::{NvmeAddresses, NvmeQueue};

/// Returns the DMA usage of a controller with `queues` queue pairs, each with at most `slots`
/// buffers in a direction. A queue pair needs two pairs of ring tables: one for buffers that the
/// device reads, one for those that it writes.
///
/// The specification allows 64K queues; the ring unit's 16-bit ring ids suffice for 16383.
pub const fn dma_usage(queues: u32, slots: u32) -> DmaUsage {
    DmaUsage::rings(queues.saturating_mul(2), slots)
}
