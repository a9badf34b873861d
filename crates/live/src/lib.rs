//! Virtio devices for an unmodified guest, each behind a virtio-iommu, served to QEMU over
//! vfio-user.
//!
//! From the outside in: `ringfence-vfio-user` is the protocol, and [`Session`] is one client's
//! connection.
//! `virtio` and `pci` implement the PCI function that the client drives. [`dma`] is a device's
//! access to the guest's memory. None of these uses a socket: [`server`] does.
#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod access;
pub mod assigned;
pub mod confine;
pub mod counter_table;
pub mod counters;
pub mod daemon;
mod delay_timer;
pub mod dma;
pub mod dma_fault_injection;
mod event;
mod grants;
pub mod handover;
pub mod host;
pub mod iommu;
mod irq;
pub mod limits;
pub mod link;
mod memory;
pub mod nvme;
mod pci;
mod privileges;
pub mod pviommu;
pub mod qemu;
mod record;
pub mod riommu;
pub mod sandbox;
mod saved_state;
mod seccomp;
pub mod server;
mod session;
mod stale_socket;
pub mod vhost_user;
pub mod virtio;

pub use memory::{GuestRam, Locked, MAX_RANGES, MemoryError, MemoryRules, RangeSource};
pub use session::{
    CONFIG_REGION, ERROR_IRQ, Function, FunctionError, IRQ_KINDS, MSIX_IRQ, Outcome, REGIONS,
    Refusal, Region, Session,
};
