//! A device that is *assigned*: its accesses go through the model of the hardware, by tables in
//! memory (decision 0023).
//!
//! ```text
//! driver -> map -> a frame of the host for the page (second stage) -> an entry of the device's I/O page table
//! device -> access -> IOTLB, or a walk of that table -> frame -> the page behind it -> the guest's memory
//! ```
//! Who keeps the table is the IOMMU that the guest has: the para-virtual one's backend, the
//! virtio-iommu's sink, or nobody, where the host has mapped all of the guest before it ran. The
//! hardware knows none of them: they meet in the tables, and in the invalidations that it is sent.

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
