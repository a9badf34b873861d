//! Assigned devices: the hardware model translates their accesses, with tables in memory (decision
//! 0023).
//!
//! ```text
//! map:    driver -> second stage: host frame for the page -> entry of the device's I/O page table
//! access: device -> IOTLB, or a walk of that table -> frame -> guest page behind the frame
//! ```
//! The guest's IOMMU owns the table: the backend of the para-virtual one or the sink of the
//! virtio-iommu. Without an IOMMU, the host has mapped all guest memory at boot. The hardware
//! depends on none of them: they share only the tables and the invalidations.

mod dma;
mod hardware;
mod mapped;
mod tables;
mod view;

pub use dma::AssignedDma;
pub use view::HardwareView;

pub(crate) use hardware::Hardware;
pub(crate) use mapped::{AssignedTable, MapFailure};
pub(crate) use tables::AssignedTables;
