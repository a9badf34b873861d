//! Endpoints: their reserved regions and their attachment.

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::IovaRange;

use crate::{DomainId, EndpointId, LimitReached, Sink, SinkError};

/// Type of a reserved region (virtio 1.3, section 5.13.6.8.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReservedRegionKind {
    /// The driver cannot map it. Accesses are blocked unless the endpoint bypasses the IOMMU.
    Reserved,
    /// Doorbell of message signaled interrupts: writes of an attached endpoint that is not blocked
    /// are interrupts, without a mapping.
    Msi,
}

/// Addresses that the driver cannot map for an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReservedRegion {
    /// IOVA range of the region.
    pub range: IovaRange,
    /// Type of the region.
    pub kind: ReservedRegionKind,
}

/// An endpoint of the device.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) id: EndpointId,
    /// Sorted by address, without overlap; at most one is an MSI region.
    pub(crate) reserved: Vec<ReservedRegion>,
    pub(crate) state: AttachState,
}

/// Attachment of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttachState {
    /// Attached to no domain. `bypasses` is true if the endpoint bypasses the IOMMU; false if the
    /// device blocks it, because bypass is off or the sink refused it.
    Unattached {
        bypasses: bool,
    },
    Attached(DomainId),
}

impl Endpoint {
    pub(crate) const fn domain(&self) -> Option<DomainId> {
        match self.state {
            AttachState::Attached(domain) => Some(domain),
            AttachState::Unattached { .. } => None,
        }
    }

    /// Detaches the endpoint. It then bypasses the IOMMU if `bypass` is set and the sink supports
    /// it.
    pub(crate) fn detach<S: Sink>(&mut self, bypass: bool, sink: &mut S) {
        let bypasses = bypass && sink.bypass(self.id).is_ok();
        if !bypasses {
            sink.block(self.id);
        }
        self.state = AttachState::Unattached { bypasses };
    }
}

/// Sorts and validates `regions`. `limit` is the maximum number of regions that a PROBE can
/// describe.
pub(crate) fn validated_regions(
    regions: &[ReservedRegion],
    limit: usize,
) -> Result<Vec<ReservedRegion>, ReservedRegionsError> {
    if regions.len() > limit {
        return Err(ReservedRegionsError::TooMany {
            count: regions.len(),
            limit,
        });
    }
    let mut sorted = Vec::new();
    sorted
        .try_reserve_exact(regions.len())
        .map_err(|_| ReservedRegionsError::OutOfMemory)?;
    sorted.extend_from_slice(regions);
    sorted.sort_unstable_by_key(|region| region.range.start());
    for pair in sorted.windows(2) {
        if let [low, high] = pair
            && low.range.overlaps(&high.range)
        {
            return Err(ReservedRegionsError::Overlap(low.range, high.range));
        }
    }
    let mut doorbells = sorted
        .iter()
        .filter(|region| region.kind == ReservedRegionKind::Msi);
    if let (Some(first), Some(second)) = (doorbells.next(), doorbells.next()) {
        return Err(ReservedRegionsError::TwoMsi(first.range, second.range));
    }
    Ok(sorted)
}

/// Reason why an endpoint cannot have these reserved regions (virtio 1.3, section 5.13.6.8.1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReservedRegionsError {
    /// A PROBE cannot describe this many regions.
    TooMany {
        /// Number of regions.
        count: usize,
        /// Maximum number of regions.
        limit: usize,
    },
    /// Two regions overlap.
    Overlap(IovaRange, IovaRange),
    /// Two regions are MSI regions.
    TwoMsi(IovaRange, IovaRange),
    /// Out of host memory.
    OutOfMemory,
}

impl fmt::Display for ReservedRegionsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany { count, limit } => {
                write!(
                    f,
                    "{count} reserved regions, but a PROBE describes at most {limit}"
                )
            }
            Self::Overlap(first, second) => {
                write!(f, "reserved regions {first} and {second} overlap")
            }
            Self::TwoMsi(first, second) => write!(f, "{first} and {second} are both MSI regions"),
            Self::OutOfMemory => f.write_str("out of memory"),
        }
    }
}

impl core::error::Error for ReservedRegionsError {}

/// Reason why an endpoint was not added or removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EndpointError {
    /// An endpoint with this id exists already.
    Exists(EndpointId),
    /// No endpoint has this id.
    NoEndpoint(EndpointId),
    /// A limit was reached.
    LimitReached(LimitReached),
    /// The reserved regions are invalid.
    Reserved(ReservedRegionsError),
    /// `Sink::begin` failed, and nothing changed; or `Sink::commit` failed, and the change is made
    /// but endpoints may still reach what they should not.
    Sink(SinkError),
}

impl fmt::Display for EndpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exists(id) => write!(f, "endpoint {id} already exists"),
            Self::NoEndpoint(id) => write!(f, "endpoint {id} does not exist"),
            Self::LimitReached(full) => write!(f, "{full}"),
            Self::Reserved(error) => error.fmt(f),
            Self::Sink(error) => write!(f, "the sink failed: {error}"),
        }
    }
}

impl core::error::Error for EndpointError {}

impl From<ReservedRegionsError> for EndpointError {
    fn from(error: ReservedRegionsError) -> Self {
        Self::Reserved(error)
    }
}

impl From<SinkError> for EndpointError {
    fn from(error: SinkError) -> Self {
        Self::Sink(error)
    }
}
