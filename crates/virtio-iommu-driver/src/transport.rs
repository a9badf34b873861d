//! The port to a virtio device: status, features, configuration, queues, notifications.

mod local;
mod mmio;
mod pci;

pub use local::LocalDevice;
pub use mmio::VirtioMmio;
pub use pci::{CapabilityError, Location, PciCapabilities, VirtioPci};

use ringfence_types::PhysAddr;

/// Device status bit (virtio 1.3, section 2.1): the driver has found the device.
pub(crate) const ACKNOWLEDGE: u8 = 1;
/// Device status bit: there is a driver for the device.
pub(crate) const DRIVER: u8 = 2;
/// Device status bit: the driver is ready.
pub(crate) const DRIVER_OK: u8 = 4;
/// Device status bit: feature negotiation is complete.
pub(crate) const FEATURES_OK: u8 = 8;
/// Device status bit: the device experienced an error that only a reset ends.
pub(crate) const DEVICE_NEEDS_RESET: u8 = 64;
/// Device status bit: the driver has given up on the device.
pub(crate) const FAILED: u8 = 128;
/// Status of a device that does not answer.
pub(crate) const ABSENT: u8 = u8::MAX;

/// Addresses of the parts of a split virtqueue (virtio 1.3, section 2.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueueParts {
    /// Number of descriptors, a power of two.
    pub size: u16,
    /// The descriptor table.
    pub descriptors: PhysAddr,
    /// The available ring, which the driver writes.
    pub available: PhysAddr,
    /// The used ring, which the device writes.
    pub used: PhysAddr,
}

/// A virtio device without its queues' contents.
///
/// # Contract
/// A notification is not visible to the device before earlier stores to memory are.
pub trait Transport {
    /// Returns true if a virtio-iommu device with a version that the driver knows answers.
    fn is_present(&self) -> bool;

    /// Returns the device status.
    fn status(&self) -> u8;

    /// Writes the device status; 0 resets the device.
    fn write_status(&mut self, status: u8);

    /// Returns the feature bits that the device offers.
    fn offered_features(&mut self) -> u64;

    /// Writes the feature bits that the driver uses.
    fn accept_features(&mut self, features: u64);

    /// Returns the most descriptors of `queue`; 0 if there is no such queue.
    fn queue_size(&mut self, queue: u16) -> u16;

    /// Gives the device the parts of a queue, and lets it use them.
    fn enable_queue(&mut self, queue: u16, parts: &QueueParts);

    /// Tells the device that `queue` has new buffers.
    fn notify(&mut self, queue: u16);

    /// Returns a number that changes whenever the device changes its configuration.
    fn config_generation(&self) -> u32;

    /// Reads the 32-bit word of the device's configuration at `offset`.
    fn read_config(&self, offset: u64) -> u32;

    /// Reads the byte of the device's configuration at `offset`.
    fn read_config_byte(&self, offset: u64) -> u8;

    /// Writes the byte of the device's configuration at `offset`.
    fn write_config_byte(&mut self, offset: u64, value: u8);
}
