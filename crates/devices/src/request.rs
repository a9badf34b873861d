//! One DMA as a device issues it.

use core::fmt;

use ringfence_types::{Access, Iova, RequesterId};

/// A request of a device for a number of bytes. It may be nonsense: devices are not trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DmaRequest {
    /// Who issues it (HW01).
    pub device: RequesterId,
    /// First byte.
    pub iova: Iova,
    /// How many bytes.
    pub bytes: u64,
    /// Whether memory is read or written.
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
