//! What lies where in BAR 0. Each part has a page of its own.

/// The BAR that holds everything.
pub(crate) const BAR: u8 = 0;
/// Its bytes.
pub(crate) const BAR_BYTES: u32 = 0x8000;
/// Common configuration (virtio 1.2, section 4.1.4.3).
pub(crate) const COMMON: u32 = 0x0000;
/// Its bytes.
pub(crate) const COMMON_BYTES: u32 = 0x3c;
/// Interrupt status.
pub(crate) const ISR: u32 = 0x1000;
/// The device's own configuration.
pub(crate) const DEVICE: u32 = 0x2000;
/// Its bytes, used or not.
pub(crate) const DEVICE_BYTES: u32 = 0x1000;
/// Doorbells, one a queue.
pub(crate) const NOTIFY: u32 = 0x3000;
/// Bytes from one doorbell to the next.
pub(crate) const NOTIFY_STRIDE: u32 = 4;
/// Bytes of all doorbells.
pub(crate) const NOTIFY_BYTES: u32 = 0x1000;
/// The MSI-X table, which the client emulates.
pub(crate) const MSIX_TABLE: u32 = 0x4000;
/// The pending bits: never set, as vectors are signalled at once.
pub(crate) const MSIX_PBA: u32 = 0x5000;
