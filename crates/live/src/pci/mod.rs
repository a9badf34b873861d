//! PCI interface of a virtio device (virtio 1.2, section 4.1): configuration space and the layout
//! of its single BAR.

mod config;
pub(crate) mod layout;
mod master;

pub(crate) use config::{CONFIG_BYTES, ConfigSpace, Identity, WINDOW_DATA};
pub(crate) use master::{BusMasterGate, BusMasterGuard};
