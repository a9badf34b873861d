//! Layout of BAR 0. Each structure begins a page.

/// Index of the BAR that contains all structures.
pub(crate) const BAR: u8 = 0;
/// Bytes of the BAR.
pub(crate) const BAR_BYTES: u32 = 0x8000;
/// Common configuration (virtio 1.2, section 4.1.4.3).
pub(crate) const COMMON: u32 = 0x0000;
/// Bytes of the common configuration.
pub(crate) const COMMON_BYTES: u32 = 0x3c;
/// Interrupt status (virtio 1.2, section 4.1.4.5). A read clears it.
pub(crate) const ISR: u32 = 0x1000;
/// Device-specific configuration (virtio 1.2, section 4.1.4.6).
pub(crate) const DEVICE: u32 = 0x2000;
/// Bytes reserved for the device-specific configuration.
pub(crate) const DEVICE_BYTES: u32 = 0x1000;
/// Doorbells, one for each queue.
pub(crate) const NOTIFY: u32 = 0x3000;
/// Distance between two doorbells in bytes.
pub(crate) const NOTIFY_STRIDE: u32 = 4;
/// Bytes reserved for the doorbells.
pub(crate) const NOTIFY_BYTES: u32 = 0x1000;
/// MSI-X table, which the client emulates.
pub(crate) const MSIX_TABLE: u32 = 0x4000;
/// MSI-X pending bit array: always zero, because vectors are signalled at once.
pub(crate) const MSIX_PBA: u32 = 0x5000;
