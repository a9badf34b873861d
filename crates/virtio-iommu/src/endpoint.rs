//! Endpoints: what the embedder says of them, and to what they are attached.

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::IovaRange;

use crate::{DomainId, EndpointId, LimitReached, Sink, SinkError};

/// What a reserved region is for (virtio 1.3, section 5.13.6.8.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ReservedRegionKind {
    /// Not to be used: accesses to it reach nothing.
    Reserved,
    /// Doorbells of message signaled interrupts: writes to it are interrupts, whatever is mapped.
    Msi,
}

/// Addresses that the driver cannot map for an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReservedRegion {
    /// The addresses.
    pub range: IovaRange,
    /// What they are for.
    pub kind: ReservedRegionKind,
}

/// One endpoint of the device.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) id: EndpointId,
    /// Sorted by address, without overlap, at most one for MSIs.
    pub(crate) reserved: Vec<ReservedRegion>,
    pub(crate) state: AttachState,
}

/// To what an endpoint is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttachState {
    /// To nothing; whether it bypasses the IOMMU. Not if the sink refused to let it.
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

    /// Attaches the endpoint to nothing, and lets it bypass the IOMMU if it may and the sink can.
    pub(crate) fn detach<S: Sink>(&mut self, bypass: bool, sink: &mut S) {
        let bypasses = bypass && sink.bypass(self.id).is_ok();
        if !bypasses {
            sink.block(self.id);
        }
        self.state = AttachState::Unattached { bypasses };
    }
}

/// Sorts `regions` and checks what the specification says of them; `most` is how many a PROBE can
/// describe.
pub(crate) fn checked(
    regions: &[ReservedRegion],
    most: usize,
) -> Result<Vec<ReservedRegion>, ReservedRegionsError> {
    if regions.len() > most {
        return Err(ReservedRegionsError::TooMany {
            given: regions.len(),
            most,
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

/// Why an endpoint cannot have these reserved regions (virtio 1.3, section 5.13.6.8.1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReservedRegionsError {
    /// A PROBE has no room for so many.
    TooMany {
        /// How many there are.
        given: usize,
        /// How many can be described.
        most: usize,
    },
    /// Two overlap.
    Overlap(IovaRange, IovaRange),
    /// Two are for MSIs.
    TwoMsi(IovaRange, IovaRange),
    /// The host has no memory.
    OutOfMemory,
}

impl fmt::Display for ReservedRegionsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany { given, most } => {
                write!(
                    f,
                    "{given} reserved regions, a PROBE describes at most {most}"
                )
            }
            Self::Overlap(one, other) => write!(f, "reserved regions {one} and {other} overlap"),
            Self::TwoMsi(one, other) => write!(f, "{one} and {other} are both for MSIs"),
            Self::OutOfMemory => f.write_str("out of memory"),
        }
    }
}

impl core::error::Error for ReservedRegionsError {}

/// Why an endpoint was not added or removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EndpointError {
    /// There is one with this number.
    Exists(EndpointId),
    /// There is none with this number.
    NoEndpoint(EndpointId),
    /// A limit was reached.
    LimitReached(LimitReached),
    /// Its reserved regions.
    Reserved(ReservedRegionsError),
    /// The sink cannot begin.
    Sink(SinkError),
}

impl fmt::Display for EndpointError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exists(id) => write!(f, "endpoint {id} exists"),
            Self::NoEndpoint(id) => write!(f, "there is no endpoint {id}"),
            Self::LimitReached(full) => write!(f, "{full}"),
            Self::Reserved(error) => error.fmt(f),
            Self::Sink(error) => write!(f, "the sink: {error}"),
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
