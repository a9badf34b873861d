//! What one guest can make this process keep, or do at a time.
//!
//! What a guest asks beyond is refused to it as its protocol says, and a few times it is said in
//! the log; nothing else is touched. Not among these, because no guest decides about them: the
//! devices there are, the ranges of memory that a client shares
//! ([`MAX_RANGES`](crate::MAX_RANGES)), one message of a client's at a time, of at most
//! [`MAX_MESSAGE_BYTES`](crate::wire::MAX_MESSAGE_BYTES).

use std::error::Error;

use ringfence_softiommu::iotlb::IotlbLimits;

/// The limits, all of them per guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestLimits {
    /// Mappings of the guest's IOMMU driver, of all domains together. Beyond: `NOMEM`.
    pub mappings: usize,
    /// Domains. Beyond: `NOMEM`.
    pub domains: usize,
    /// Tables of a domain, 4 KiB each; one maps 2 MiB. Beyond: `NOMEM`.
    pub tables: usize,
    /// Descriptors of a queue, a power of two: what the driver is offered.
    pub queue_size: u16,
    /// Bytes of one request to the disk. Beyond: an I/O error.
    pub request_bytes: u64,
    /// Pages that a vhost-user back-end keeps of what its front-end tells. Beyond: the oldest go.
    pub iotlb_pages: usize,
    /// Misses that it has under way. Beyond: the device waits.
    pub iotlb_misses: usize,
    /// Bytes of the file that records the IOMMU driver's requests. Beyond: they are only counted.
    pub record_bytes: u64,
}

/// The fewest pages that [`GuestLimits::iotlb_pages`] can be: with fewer, an access to as many
/// pages as one can have would never find all of them there.
pub const MIN_IOTLB_PAGES: usize = 1024;

impl Default for GuestLimits {
    /// 65536 mappings in 64 domains, each of 16 MiB of tables; queues of 256; requests of 16 MiB;
    /// 8192 pages of an IOTLB, 64 misses; a record of 1 GiB.
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
    /// Those of a vhost-user back-end's IOTLB.
    pub fn iotlb(&self) -> IotlbLimits {
        IotlbLimits {
            pages: self.iotlb_pages,
            misses: self.iotlb_misses,
            ..IotlbLimits::default()
        }
    }
}

/// Most words about one device: a guest must not fill its host's log.
const MAX_LINES: u32 = 16;

/// Hears what was refused.
type Tell = dyn Fn(&(dyn Error + 'static)) + Send;

/// Says what was refused to a guest, as often as a log bears it.
pub struct RateLimitedLog {
    sink: Box<Tell>,
    lines_left: u32,
}

impl RateLimitedLog {
    /// `tell` hears of the first ones.
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

impl Default for RateLimitedLog {
    /// Nobody hears of them.
    fn default() -> Self {
        Self::new(|_| ())
    }
}

impl std::fmt::Debug for RateLimitedLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RateLimitedLog({} left)", self.lines_left)
    }
}
