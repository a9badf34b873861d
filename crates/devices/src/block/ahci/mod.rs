//! AHCI: one queue of 32 slots that the drive processes in arbitrary order (AHCI 1.3.1, sections
//! 4.2 and 5; Serial ATA, native command queueing). rIOMMU section 4 leaves such devices to the
//! baseline IOMMU, because no ring predicts their order.

use ringfence_hw::{DmaUsage, UnmapOrder};

mod driver;
mod layout;
mod port;

pub use driver::{AhciAddresses, AhciDriver};
pub use layout::{
    CommandHeader, Fis, HEADER_BYTES, MAX_PAGES, PhysicalRegion, REGION_BYTES, SLOTS, TABLE_BYTES,
};
pub use port::{AhciPort, AhciRegisters};

/// DMA usage of a port: its driver unmaps in the order in which the drive completes slots.
pub const DMA_USAGE: DmaUsage = DmaUsage {
    order: UnmapOrder::Arbitrary,
    tables: 4,
    slots: SLOTS * MAX_PAGES as u32,
};
