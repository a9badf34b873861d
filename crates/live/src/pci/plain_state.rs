//! State of a function without virtio's registers, and its encoding.

use std::os::fd::OwnedFd;

use super::config::CONFIG_BYTES;
use crate::saved_state::{Reader, SaveState, StateError, Writer, save_fields};

/// Most MSI-X vectors (PCI Local Bus Specification 3.0, section 6.8.2).
const MAX_VECTORS: usize = 2048;

/// PCI registers of a function without virtio's.
#[derive(Debug)]
pub struct PlainState {
    /// PCI configuration space.
    pub config: [u8; CONFIG_BYTES],
    /// Eventfds of the MSI-X vectors.
    pub vectors: Vec<Option<OwnedFd>>,
}

save_fields!(PlainState {
    config,
    vectors: list("vectors", MAX_VECTORS),
});
