//! Virtio devices over PCI (virtio 1.2).

pub mod blk;
pub mod chain;
mod common;
pub mod delayed;
pub mod iommu;
pub mod net;
pub mod pviommu;
mod quantum;
pub mod rng;
mod transport;

use std::os::fd::BorrowedFd;
use std::time::Instant;

use virtio_queue::Queue;

use crate::dma::Dma;
use crate::handover::{DeviceState, HandOverBlocker};

pub use quantum::{ChainOutcome, QUANTUM_BYTES, QuantumResult, serve_chains};
pub use transport::VirtioPci;

/// `VIRTIO_F_INDIRECT_DESC`.
pub const F_INDIRECT_DESC: u64 = 1 << 28;
/// `VIRTIO_F_EVENT_IDX`.
pub const F_EVENT_IDX: u64 = 1 << 29;
/// `VIRTIO_F_VERSION_1`.
pub const F_VERSION_1: u64 = 1 << 32;
/// `VIRTIO_F_ACCESS_PLATFORM`: all addresses go through the IOMMU.
pub const F_ACCESS_PLATFORM: u64 = 1 << 33;

/// A queue cannot be used any further: its rings are out of reach or hold nonsense. The device asks
/// to be reset.
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

/// What does a device's work could not be stopped, and may still reach memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusMasterStuck;

/// Something of the host's that a device waits for.
#[derive(Clone, Copy, Debug)]
pub struct PollSource<'a> {
    /// The descriptor.
    pub fd: BorrowedFd<'a>,
    /// Until something can be read from it.
    pub input: bool,
    /// Until something can be written to it.
    pub output: bool,
}

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

    /// What another process needs to be this device, beside the registers.
    ///
    /// # Errors
    /// It cannot be handed over.
    fn save(&self) -> Result<DeviceState, HandOverBlocker> {
        Err(HandOverBlocker::Keeps("a device of this kind"))
    }

    /// Another process's device had been [`activate`](Self::activate)d on these features; this one
    /// goes on.
    fn resume(&mut self, features: u64) {
        self.activate(features);
    }

    /// Back to the beginning.
    fn reset(&mut self) {}

    /// Its function may master the bus from now on. It begins without.
    fn set_bus_master(&mut self) {}

    /// Its function may not master the bus any more. While it may not, [`process`](Self::process)
    /// is not called, and when this returns `Ok` nobody else that works for the device reaches
    /// memory. To be repeated does no harm.
    ///
    /// # Errors
    /// [`BusMasterStuck`]: somebody does.
    fn clear_bus_master(&mut self) -> Result<(), BusMasterStuck> {
        Ok(())
    }

    /// It will serve no more, here or in another process.
    fn end(&mut self) {}

    /// Comes to the end of its turn if others work for it, by then; the next is not begun. False if
    /// it has not.
    fn pause(&mut self, _until: Instant) -> bool {
        true
    }

    /// Another process has the device from now on. When this returns true, nothing that works for
    /// it is left, or reaches anything.
    fn release(&mut self) -> bool {
        true
    }

    /// What to wait for, as long as the device has a use for it.
    fn waits_for(&self) -> Option<PollSource<'_>> {
        None
    }

    /// It has come, or the other side has gone.
    fn on_ready(&mut self) {}

    /// Whether it has something to do without waiting. Then it is soon asked what is
    /// [`due`](Self::due).
    fn busy(&self) -> bool {
        false
    }

    /// A queue that is to be worked on though nobody rang: because of what has come, or because of
    /// what was done on another queue. Asked again after each, a bounded number of times.
    fn due(&mut self) -> Option<usize> {
        None
    }

    /// Works on queue `index`: the driver has rung its doorbell, it was [`due`](Self::due), or the
    /// last turn left something to do. A turn is bounded ([`serve_chains`]).
    ///
    /// # Errors
    /// [`QueueBroken`]: the device stops until it is reset.
    fn process<A: Dma>(
        &mut self,
        index: usize,
        queue: &mut Queue,
        dma: &mut A,
    ) -> Result<QuantumResult, QueueBroken>;
}
