//! Limits on the resources that one guest can use in this process.
//!
//! A request beyond a limit fails as its protocol defines, and the daemon logs the first few; no
//! other state changes. Resources that the guest does not control have no entry here. These are the
//! number of devices and the memory ranges that a client shares
//! ([`MAX_RANGES`](crate::MAX_RANGES)). Each client has one message in flight, of at most
//! [`MAX_MESSAGE_BYTES`](ringfence_vfio_user::MAX_MESSAGE_BYTES).

use std::error::Error;

use ringfence_softiommu::iotlb::IotlbLimits;

/// Limits of one guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestLimits {
    /// Mappings of the guest's IOMMU driver, over all domains. Beyond: `NOMEM`.
    pub mappings: usize,
    /// Domains. Beyond: `NOMEM`.
    pub domains: usize,
    /// I/O page tables of a domain, 4 KiB each; a leaf table maps 2 MiB. Beyond: `NOMEM`.
    pub tables: usize,
    /// Queue size offered to the driver, in descriptors; a power of two.
    pub queue_size: u16,
    /// Bytes of one disk request. Beyond: an I/O error.
    pub request_bytes: u64,
    /// Pages that a vhost-user back-end's IOTLB holds. Beyond: it evicts the oldest.
    pub iotlb_pages: usize,
    /// IOTLB misses in flight at a vhost-user back-end. Beyond: the device waits.
    pub iotlb_misses: usize,
    /// Bytes of the file that records the IOMMU driver's requests. Beyond: requests are only
    /// counted.
    pub record_bytes: u64,
}

/// Smallest valid [`GuestLimits::iotlb_pages`]. With fewer pages, the IOTLB could not hold the
/// translations of one access of maximum size, and the access would miss forever.
pub const MIN_IOTLB_PAGES: usize = 1024;

impl Default for GuestLimits {
    /// 65536 mappings in 64 domains, each with 16 MiB of tables; queues of 256 descriptors;
    /// requests of 16 MiB; an IOTLB of 8192 pages with 64 misses in flight; a record of 1 GiB.
    fn default() -> Self {
        let iotlb = IotlbLimits::default();
        Self {
            mappings: 1 << 16,
            domains: 64,
            tables: 4096,
            queue_size: 256,
            request_bytes: 16 << 20,
            iotlb_pages: iotlb.pages,
            iotlb_misses: iotlb.misses,
            record_bytes: 1 << 30,
        }
    }
}

impl GuestLimits {
    /// Returns the limits of a vhost-user back-end's IOTLB.
    pub fn iotlb(&self) -> IotlbLimits {
        IotlbLimits {
            pages: self.iotlb_pages,
            misses: self.iotlb_misses,
            ..IotlbLimits::default()
        }
    }
}

/// Most log lines about one device, so that a guest cannot fill the host's log.
const MAX_LINES: u32 = 16;

/// Receives a refused request's error.
type Tell = dyn Fn(&(dyn Error + 'static)) + Send;

/// Logs the requests that a guest was refused, up to a fixed number of lines.
pub struct BoundedLog {
    sink: Box<Tell>,
    lines_left: u32,
}

impl BoundedLog {
    /// Creates a log that passes the first refused requests to `tell`.
    pub fn new(tell: impl Fn(&(dyn Error + 'static)) + Send + 'static) -> Self {
        Self {
            sink: Box::new(tell),
            lines_left: MAX_LINES,
        }
    }

    pub(crate) fn log(&mut self, refused: &(dyn Error + 'static)) {
        if self.lines_left > 0 {
            self.lines_left -= 1;
            (self.sink)(refused);
        }
    }
}

impl Default for BoundedLog {
    /// A log that discards everything.
    fn default() -> Self {
        Self::new(|_| ())
    }
}

impl std::fmt::Debug for BoundedLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BoundedLog({} left)", self.lines_left)
    }
}
