//! PCI functions: configuration space, bus mastering, and the layout of the single BAR of a virtio
//! device (virtio 1.2, section 4.1).

mod bus_master;
mod config;
pub(crate) mod layout;
mod plain_state;

pub(crate) use bus_master::{BusMasterGate, BusMasterGuard};
pub(crate) use config::{ConfigSpace, Identity, PlainIdentity, WINDOW_DATA};
pub use plain_state::PlainState;
