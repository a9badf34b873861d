//! A DMA request of a device.

use core::fmt;

use ringfence_types::{Access, Iova, RequesterId};

/// A request of a device to access a range of bytes. It may be invalid, because devices are not
/// trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DmaRequest {
    /// Requester ID of the device.
    pub device: RequesterId,
    /// Address of the first byte.
    pub iova: Iova,
    /// Length in bytes.
    pub bytes: u64,
    /// Read or write.
    pub access: Access,
}

impl fmt::Display for DmaRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} bytes at {} by {}",
            self.access, self.bytes, self.iova, self.device
        )
    }
}
