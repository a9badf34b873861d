//! Why a request was refused.

use ringfence_softiommu::iotlb::{FrameError, IotlbError, MessageError, RegionError};

use super::request::{RequestError, VringAddress};
use crate::memory::MemoryError;

/// Why a request was refused. Where the front-end asks, it is told that it was; the log has the
/// reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// It is no request.
    Request(RequestError),
    /// The memory's files.
    Memory(MemoryError),
    /// The memory's regions, as the front-end addresses them.
    Regions(RegionError),
    /// A region of no bytes, or past 2^64 - 1.
    Region {
        /// Where it begins in the front-end.
        user: u64,
    },
    /// No IOTLB message.
    Message(MessageError),
    /// The IOTLB.
    Iotlb(IotlbError),
    /// No reply where one should be, on the back-end's channel.
    Reply(FrameError),
    /// Features that were not offered.
    Features {
        /// Those.
        features: u64,
    },
    /// Of the features that it takes to be behind an IOMMU some are missing:
    /// `VIRTIO_F_ACCESS_PLATFORM`, `VIRTIO_F_VERSION_1`, or of the protocol `REPLY_ACK` and
    /// `BACKEND_REQ`.
    Untranslated {
        /// The device's.
        features: u64,
        /// The protocol's.
        protocol: u64,
    },
    /// There is one ring.
    NoRing {
        /// The one that was asked for.
        index: u32,
    },
    /// No such size: a power of two up to the device's.
    Size {
        /// The size.
        size: u32,
    },
    /// An index beyond 16 bits.
    Base {
        /// The index.
        base: u32,
    },
    /// A ring whose parts are not aligned.
    Misaligned {
        /// The addresses.
        address: VringAddress,
    },
    /// Not while the ring is running.
    Running,
    /// A ring that is to start, and has no size, or no address.
    Incomplete,
    /// A descriptor that is no eventfd.
    NotAnEvent,
    /// A second channel.
    Channel,
    /// A channel that is no connected stream socket.
    NotAStream,
    /// The host has no descriptors left, or the device is lost.
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
