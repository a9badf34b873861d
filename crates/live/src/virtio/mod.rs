//! Virtio devices over PCI (virtio 1.2).

pub mod blk;
pub mod chain;
mod common;
pub mod iommu;
pub mod rng;
mod transport;
mod turn;

use std::os::fd::BorrowedFd;

use virtio_queue::Queue;

use crate::dma::Dma;

pub use transport::VirtioPci;
pub use turn::{Turn, serve_chains};

/// `VIRTIO_F_INDIRECT_DESC`.
pub const F_INDIRECT_DESC: u64 = 1 << 28;
/// `VIRTIO_F_EVENT_IDX`.
pub const F_EVENT_IDX: u64 = 1 << 29;
/// `VIRTIO_F_VERSION_1`.
pub const F_VERSION_1: u64 = 1 << 32;
/// `VIRTIO_F_ACCESS_PLATFORM`: all addresses go through the IOMMU.
pub const F_ACCESS_PLATFORM: u64 = 1 << 33;

/// A queue cannot be used any further: its rings are out of reach or hold nonsense. The device asks to be reset.
#[derive(Debug)]
pub struct QueueBroken(pub virtio_queue::Error);

impl From<virtio_queue::Error> for QueueBroken {
    fn from(error: virtio_queue::Error) -> Self {
        Self(error)
    }
}

impl std::fmt::Display for QueueBroken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a queue cannot be used any further: {}", self.0)
    }
}

impl std::error::Error for QueueBroken {}

/// What a kind of device does, whatever it hangs on.
pub trait Device {
    /// Virtio's number of the device type.
    const TYPE: u16;
    /// PCI class, subclass, interface.
    const CLASS: [u8; 3];

    /// The features offered, without those of the transport and the rings.
    fn features(&self) -> u64;

    /// The queues' largest sizes, each a power of two.
    fn queue_sizes(&self) -> &[u16];

    /// Reads the device's configuration; beyond its end it is zero.
    fn read_config(&self, offset: usize, data: &mut [u8]);

    /// Writes it. Most devices have nothing that can be written.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    /// The driver has agreed on these features and begins.
    fn activate(&mut self, _features: u64) {}

    /// Back to the beginning.
    fn reset(&mut self) {}

    /// Something of the host's to wait for.
    fn waits_for(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// It has come, and is taken note of: the queue that is to be worked on.
    fn came(&mut self) -> usize {
        0
    }

    /// The driver has rung the doorbell of queue `index`, or something that the device waited for has come, or the last
    /// turn left something to do. One turn is bounded ([`serve_chains`]).
    ///
    /// # Errors
    /// [`QueueBroken`]: the device stops until it is reset.
    fn process<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<Turn, QueueBroken>;
}
