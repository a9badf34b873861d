//! Reasons for refusing a request.

use ringfence_softiommu::iotlb::{FrameError, IotlbError, MessageError, RegionError};

use super::request::{RequestError, VringAddress};
use crate::memory::MemoryError;

/// Reason for refusing a request. The front-end receives only success or failure, if it requests a
/// reply; the log has the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The message is not a valid request.
    #[error(transparent)]
    Request(RequestError),
    /// A memory file cannot be mapped.
    #[error(transparent)]
    Memory(MemoryError),
    /// The front-end addresses of the memory regions are invalid.
    #[error(transparent)]
    Regions(RegionError),
    /// A region is empty or ends after 2^64 - 1.
    #[error("the region at {user:#x} is empty or exceeds the address space")]
    Region {
        /// Start address in the front-end.
        user: u64,
    },
    /// The IOTLB message is malformed.
    #[error(transparent)]
    Message(MessageError),
    /// The IOTLB refused the message.
    #[error(transparent)]
    Iotlb(IotlbError),
    /// The back-end channel received a malformed reply.
    #[error(transparent)]
    Reply(FrameError),
    /// The front-end set features that were not offered.
    #[error("features {features:#x} were not offered")]
    Features {
        /// The offending features.
        features: u64,
    },
    /// A feature needed behind an IOMMU is missing: `VIRTIO_F_ACCESS_PLATFORM`,
    /// `VIRTIO_F_VERSION_1`, or the protocol features `REPLY_ACK` and `BACKEND_REQ`.
    #[error(
        "features that an IOMMU requires are missing: features {features:#x}, protocol \
        {protocol:#x}"
    )]
    Untranslated {
        /// Device features that the front-end set.
        features: u64,
        /// Protocol features that the front-end set.
        protocol: u64,
    },
    /// The device has only ring 0.
    #[error("ring {index} does not exist")]
    NoRing {
        /// Index of the requested ring.
        index: u32,
    },
    /// The ring size is not a power of two, or exceeds the device's maximum.
    #[error("invalid ring size {size}")]
    Size {
        /// Requested size in descriptors.
        size: u32,
    },
    /// The ring index exceeds 16 bits.
    #[error("invalid ring index {base}")]
    Base {
        /// Index that the front-end requested.
        base: u32,
    },
    /// A part of the ring is misaligned.
    #[error("misaligned ring: {address:x?}")]
    Misaligned {
        /// Addresses of the ring's parts.
        address: VringAddress,
    },
    /// The request is not allowed while the ring is running.
    #[error("the ring is running")]
    Running,
    /// The ring has no size or no address, so it cannot start.
    #[error("the ring has no size or no address")]
    Incomplete,
    /// The descriptor is not an eventfd.
    #[error("the descriptor is not an eventfd")]
    NotAnEvent,
    /// The front-end sent a second back-end channel.
    #[error("the session has a back-end channel already")]
    Channel,
    /// The back-end channel is not a connected stream socket.
    #[error("the back-end channel is not a connected stream socket")]
    NotAStream,
    /// The host has no descriptors left, or the device's thread panicked.
    #[error("the host has no descriptors left, or the device's thread panicked")]
    Host,
}
