//! PCI interface of a virtio device (virtio 1.2, section 4.1): configuration space and the layout
//! of its single BAR.

mod bus_master;
mod config;
pub(crate) mod layout;

pub(crate) use bus_master::{BusMasterGate, BusMasterGuard};
pub(crate) use config::{CONFIG_BYTES, ConfigSpace, Identity, WINDOW_DATA};
