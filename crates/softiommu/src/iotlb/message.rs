//! IOTLB messages: `struct vhost_iotlb_msg` in host byte order, 32 bytes including padding.

use ringfence_types::{Iova, IovaRange, Permissions};

use super::error::MessageError;
use super::frame::IOTLB_BYTES;

const VHOST_IOTLB_MISS: u8 = 1;
const VHOST_IOTLB_UPDATE: u8 = 2;
const VHOST_IOTLB_INVALIDATE: u8 = 3;
const VHOST_IOTLB_ACCESS_FAIL: u8 = 4;

/// One message. `VHOST_ACCESS_RO`, `_WO` and `_RW` equal the bits of [`Permissions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Message {
    /// From the back-end: requests a translation.
    Miss {
        /// The address. The front-end determines the extent of the translation.
        iova: Iova,
        /// Permissions that the access needs.
        required: Permissions,
    },
    /// From the front-end: the translation of `range`.
    Update {
        /// I/O virtual addresses of the device.
        range: IovaRange,
        /// Start of the memory in the front-end's own address space; [`Regions`](super::Regions)
        /// translates it.
        user: u64,
        /// Permissions of the device.
        permissions: Permissions,
    },
    /// From the front-end: invalidates the translations of a range, or of all addresses if `None`.
    Invalidate(Option<IovaRange>),
    /// From the back-end: an access failed.
    AccessFail {
        /// Address of the access.
        iova: Iova,
        /// Permissions that the access needed.
        required: Permissions,
    },
}

impl Message {
    /// Decodes a message. An invalidation with an invalid range (empty, or exceeding 2^64 - 1)
    /// becomes a global one. Over-invalidation only costs misses; under-invalidation would leave a
    /// device access to memory.
    ///
    /// # Errors
    /// [`MessageError`] for an unknown type, or an update with an invalid range or invalid
    /// permissions.
    pub fn decode(bytes: &[u8; IOTLB_BYTES]) -> Result<Self, MessageError> {
        let [iova, size, user] = [0, 8, 16].map(|at| {
            let mut word = [0; 8];
            word.iter_mut()
                .zip(bytes.iter().skip(at))
                .for_each(|(to, from)| *to = *from);
            u64::from_ne_bytes(word)
        });
        let &[.., permissions, kind, _, _, _, _, _, _] = bytes;
        let iova = Iova::new(iova);
        let required = || {
            match permissions {
                1..=3 => Permissions::from_bits(permissions.into()),
                _ => None,
            }
            .ok_or(MessageError::Permissions(permissions))
        };
        let range = IovaRange::new(iova, size);
        match kind {
            VHOST_IOTLB_MISS => Ok(Self::Miss {
                iova,
                required: required()?,
            }),
            VHOST_IOTLB_UPDATE => Ok(Self::Update {
                range: range.ok_or(MessageError::Range { iova, bytes: size })?,
                user,
                permissions: required()?,
            }),
            VHOST_IOTLB_INVALIDATE => Ok(Self::Invalidate(range)),
            VHOST_IOTLB_ACCESS_FAIL => Ok(Self::AccessFail {
                iova,
                required: required()?,
            }),
            _ => Err(MessageError::Kind(kind)),
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> [u8; IOTLB_BYTES] {
        let (kind, iova, size, user, permissions) = match *self {
            Self::Miss { iova, required } => (VHOST_IOTLB_MISS, iova, 0, 0, required.bits()),
            Self::Update {
                range,
                user,
                permissions,
            } => (
                VHOST_IOTLB_UPDATE,
                range.start(),
                range.bytes(),
                user,
                permissions.bits(),
            ),
            Self::Invalidate(Some(range)) => {
                (VHOST_IOTLB_INVALIDATE, range.start(), range.bytes(), 0, 0)
            }
            Self::Invalidate(None) => (VHOST_IOTLB_INVALIDATE, Iova::ZERO, 0, 0, 0),
            Self::AccessFail { iova, required } => {
                (VHOST_IOTLB_ACCESS_FAIL, iova, 0, 0, required.bits())
            }
        };
        let mut bytes = [0; IOTLB_BYTES];
        let words = [iova.get(), size, user, 0].map(u64::to_ne_bytes);
        bytes
            .iter_mut()
            .zip(words.iter().flatten())
            .for_each(|(to, from)| *to = *from);
        let [.., permission, code, _, _, _, _, _, _] = &mut bytes;
        // `permissions` has two bits, so the cast is lossless.
        (*permission, *code) = (permissions as u8, kind);
        bytes
    }
}
