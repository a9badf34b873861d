//! Limits on the resources that one guest can use in this process.
//!
//! A request beyond a limit fails as its protocol defines, and no other state changes. The daemon
//! logs the first refused requests of each device.
//!
//! The guest does not control the number of devices and the memory ranges that a client shares
//! ([`MAX_RANGES`](crate::MAX_RANGES)), so neither is limited here. A client has one message in
//! flight, of at most
//! [`MAX_MESSAGE_BYTES`](ringfence_vfio_user::MAX_MESSAGE_BYTES).

use std::error::Error;

use ringfence_softiommu::iotlb::IotlbLimits;

/// Limits of one guest, each with what happens to a request beyond it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestLimits {
    /// Mappings of the guest's IOMMU driver, in all domains together. Beyond: a MAP request fails
    /// with `VIRTIO_IOMMU_S_NOMEM`.
    pub mappings: usize,
    /// Domains. Beyond: an ATTACH request fails with `VIRTIO_IOMMU_S_NOMEM`.
    pub domains: usize,
    /// I/O page tables of a domain, 4 KiB each; a leaf table maps 2 MiB. Beyond: a MAP request
    /// fails with `VIRTIO_IOMMU_S_NOMEM`.
    pub tables: usize,
    /// Size of the virtqueues offered to the driver, in descriptors; a power of two. The driver may
    /// choose a smaller one.
    pub queue_size: u16,
    /// Bytes of one disk request. Beyond: the request fails with `VIRTIO_BLK_S_IOERR`.
    pub request_bytes: u64,
    /// Pages in the IOTLB of a vhost-user back-end; at least [`MIN_IOTLB_PAGES`]. Beyond: the IOTLB
    /// evicts the oldest.
    pub iotlb_pages: usize,
    /// IOTLB misses in flight at a vhost-user back-end. Beyond: the device waits for a reply.
    pub iotlb_misses: usize,
    /// Bytes of the file that records the IOMMU driver's requests. Beyond: requests are counted but
    /// not recorded.
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

/// Maximum number of logged requests of one device.
const MAX_LINES: u32 = 16;

/// Function that logs the error of one refused request.
type LogFn = dyn Fn(&(dyn Error + 'static)) + Send;

/// Logs the first 16 refused requests of a device, and discards all later ones, so that a guest
/// cannot fill the host's log.
pub struct BoundedLog {
    log_line: Box<LogFn>,
    lines_left: u32,
}

impl BoundedLog {
    /// Creates a log that calls `log_line` for each of the first 16 refused requests.
    pub fn new(log_line: impl Fn(&(dyn Error + 'static)) + Send + 'static) -> Self {
        Self {
            log_line: Box::new(log_line),
            lines_left: MAX_LINES,
        }
    }

    /// Logs the error of a refused request, unless the log is full.
    pub(crate) fn log(&mut self, refused: &(dyn Error + 'static)) {
        if self.lines_left > 0 {
            self.lines_left -= 1;
            (self.log_line)(refused);
        }
    }
}

impl Default for BoundedLog {
    /// Creates a log that discards everything.
    fn default() -> Self {
        Self::new(|_| ())
    }
}

impl std::fmt::Debug for BoundedLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BoundedLog({} lines left)", self.lines_left)
    }
}
