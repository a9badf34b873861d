//! Reasons for refusing a request.

use ringfence_softiommu::iotlb::{FrameError, IotlbError, MessageError, RegionError};

use super::request::{RequestError, VringAddress};
use crate::memory::MemoryError;

/// Reason for refusing a request. The front-end receives only success or failure, if it requests a
/// reply; the log has the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The message is not a valid request.
    Request(RequestError),
    /// A memory file cannot be mapped.
    Memory(MemoryError),
    /// The front-end addresses of the memory regions are invalid.
    Regions(RegionError),
    /// A region is empty or ends after 2^64 - 1.
    Region {
        /// Start address in the front-end.
        user: u64,
    },
    /// The IOTLB message is malformed.
    Message(MessageError),
    /// The IOTLB refused the message.
    Iotlb(IotlbError),
    /// The back-end channel received a malformed reply.
    Reply(FrameError),
    /// The front-end set features that were not offered.
    Features {
        /// The offending features.
        features: u64,
    },
    /// A feature needed behind an IOMMU is missing: `VIRTIO_F_ACCESS_PLATFORM`,
    /// `VIRTIO_F_VERSION_1`, or the protocol features `REPLY_ACK` and `BACKEND_REQ`.
    Untranslated {
        /// Device features that the front-end set.
        features: u64,
        /// Protocol features that the front-end set.
        protocol: u64,
    },
    /// The device has only ring 0.
    NoRing {
        /// Index of the requested ring.
        index: u32,
    },
    /// The ring size is not a power of two, or exceeds the device's maximum.
    Size {
        /// Requested size in descriptors.
        size: u32,
    },
    /// The ring index exceeds 16 bits.
    Base {
        /// Index that the front-end requested.
        base: u32,
    },
    /// A part of the ring is misaligned.
    Misaligned {
        /// Addresses of the ring's parts.
        address: VringAddress,
    },
    /// The request is not allowed while the ring is running.
    Running,
    /// The ring has no size or no address, so it cannot start.
    Incomplete,
    /// The descriptor is not an eventfd.
    NotAnEvent,
    /// The front-end sent a second back-end channel.
    Channel,
    /// The back-end channel is not a connected stream socket.
    NotAStream,
    /// The host has no descriptors left, or the device's thread panicked.
    Host,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Request(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::Regions(error) => error.fmt(f),
            Self::Region { user } => write!(f, "the region at {user:#x} is none"),
            Self::Message(error) => error.fmt(f),
            Self::Iotlb(error) => error.fmt(f),
            Self::Reply(error) => error.fmt(f),
            Self::Features { features } => write!(f, "features {features:#x} are not offered"),
            Self::Untranslated { features, protocol } => write!(
                f,
                "not behind an IOMMU: features {features:#x}, of the protocol {protocol:#x}"
            ),
            Self::NoRing { index } => write!(f, "there is no ring {index}"),
            Self::Size { size } => write!(f, "no ring has {size} descriptors"),
            Self::Base { base } => write!(f, "no ring has an entry {base}"),
            Self::Misaligned { address } => write!(f, "a ring at {address:x?} is not aligned"),
            Self::Running => f.write_str("not while the ring is running"),
            Self::Incomplete => f.write_str("a ring without size or address"),
            Self::NotAnEvent => f.write_str("the descriptor is no eventfd"),
            Self::Channel => f.write_str("a second channel"),
            Self::NotAStream => f.write_str("the channel is no connected stream socket"),
            Self::Host => f.write_str("the host cannot"),
        }
    }
}

impl std::error::Error for Refusal {}
