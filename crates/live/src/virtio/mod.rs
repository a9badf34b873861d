//! Virtio devices over PCI (virtio 1.2).

pub mod blk;
pub mod chain;
mod common;
pub mod delayed;
mod device_state;
mod dma_injector;
mod function_state;
pub mod iommu;
mod kept_data;
pub mod net;
pub mod pviommu;
mod quantum;
pub mod rng;
mod transport;

use std::time::Instant;

use virtio_queue::Queue;

use crate::dma::Dma;
use crate::saved_state::HandOverBlocker;

pub use device_state::{DeviceState, DiskKind};
pub use dma_injector::DmaInjector;
pub use function_state::{CommonState, QueueSlot, VirtioState};
pub use quantum::{ChainOutcome, QUANTUM_BYTES, QuantumResult, serve_chains};
pub use transport::{DmaAddresses, VirtioPci, is_doorbell};

pub use crate::event::PollSource;
pub use crate::server::QueueBroken;

/// `VIRTIO_F_INDIRECT_DESC`: a descriptor may refer to a table of descriptors.
pub const F_INDIRECT_DESC: u64 = 1 << 28;
/// `VIRTIO_F_EVENT_IDX`: `used_event` and `avail_event` suppress notifications.
pub const F_EVENT_IDX: u64 = 1 << 29;
/// `VIRTIO_F_VERSION_1`: the device complies with virtio 1.0 or later.
pub const F_VERSION_1: u64 = 1 << 32;
/// `VIRTIO_F_ACCESS_PLATFORM`: all addresses go through the IOMMU.
pub const F_ACCESS_PLATFORM: u64 = 1 << 33;

/// The device's work could not be stopped and may still access guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusMasterStuck;

/// The reset is not complete: a killed process that is stuck in the kernel may still access pages
/// that the reset unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResetPending;

/// Behaviour of a virtio device type, independent of the transport.
pub trait Device {
    /// Virtio device ID.
    const TYPE: u16;
    /// PCI base class, subclass and programming interface.
    const CLASS: [u8; 3];

    /// Returns the offered device features, without those of the transport and the rings.
    fn features(&self) -> u64;

    /// Returns the maximum size of each queue, a power of two.
    fn queue_sizes(&self) -> &[u16];

    /// Reads the device configuration at `offset`; bytes beyond its end are zero.
    fn read_config(&self, offset: usize, data: &mut [u8]);

    /// Writes the device configuration. The default ignores writes: most devices have no writable
    /// field.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    /// Starts the device with the features that the driver accepted (`DRIVER_OK`).
    fn activate(&mut self, _features: u64) {}

    /// Returns the state that another process needs to continue this device, except the registers.
    ///
    /// # Errors
    /// [`HandOverBlocker`] if the device cannot be handed over.
    fn save(&self) -> Result<DeviceState, HandOverBlocker> {
        Err(HandOverBlocker::Unsupported("this device"))
    }

    /// Continues a device that was [`activate`](Self::activate)d with `features` in another
    /// process.
    fn resume(&mut self, features: u64) {
        self.activate(features);
    }

    /// Returns the device to its initial state.
    ///
    /// # Errors
    /// [`ResetPending`]. The caller does not report the reset as complete and calls this again
    /// until it succeeds. Only the first call may wait for a process.
    fn reset(&mut self) -> Result<(), ResetPending> {
        Ok(())
    }

    /// Grants bus mastering. A device begins without it.
    fn set_bus_master(&mut self) {}

    /// Revokes bus mastering. Until it is granted again, the caller does not call
    /// [`process`](Self::process). When this returns `Ok`, no thread or process that works for the
    /// device can access guest memory. Idempotent.
    ///
    /// # Errors
    /// [`BusMasterStuck`] if part of the device can still access memory.
    fn clear_bus_master(&mut self) -> Result<(), BusMasterStuck> {
        Ok(())
    }

    /// Ends the device: no process will serve it any more.
    fn end(&mut self) {}

    /// Waits until `until` for the turn in progress, if a process executes it, and starts no other.
    /// Returns false if the turn is still in progress.
    fn pause(&mut self, _until: Instant) -> bool {
        true
    }

    /// Gives the device up after another process has taken it over. Returns true if no thread or
    /// process that works for the device can still access memory.
    fn release(&mut self) -> bool {
        true
    }

    /// Returns the descriptor to wait for, or `None` if the device needs nothing at present.
    fn waits_for(&self) -> Option<PollSource<'_>> {
        None
    }

    /// Called when the source of [`waits_for`](Self::waits_for) is ready or its peer has closed it.
    fn on_ready(&mut self) {}

    /// Returns true if the device has work that needs no wait. The caller then soon polls
    /// [`due`](Self::due).
    fn busy(&self) -> bool {
        false
    }

    /// Returns a queue to process without a doorbell, because of received data or of work on
    /// another queue. The caller polls it again after each queue, a bounded number of times.
    fn due(&mut self) -> Option<usize> {
        None
    }

    /// Processes queue `index`, after a doorbell, for [`due`](Self::due), or because the last turn
    /// left work. A turn is bounded ([`serve_chains`]).
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
