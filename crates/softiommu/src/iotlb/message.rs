//! IOTLB messages: `struct vhost_iotlb_msg`, in the host's byte order, as its 32 bytes with
//! padding.

use ringfence_types::{Iova, IovaRange, Permissions};

use super::error::MessageError;
use super::frame::IOTLB_BYTES;

const VHOST_IOTLB_MISS: u8 = 1;
const VHOST_IOTLB_UPDATE: u8 = 2;
const VHOST_IOTLB_INVALIDATE: u8 = 3;
const VHOST_IOTLB_ACCESS_FAIL: u8 = 4;

/// One message. `VHOST_ACCESS_RO`, `_WO` and `_RW` are the bits of [`Permissions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Message {
    /// From the back-end: how may it access this address?
    Miss {
        /// The address; everything else about the translation is for the front-end to say.
        iova: Iova,
        /// What it wants to do there.
        wanted: Permissions,
    },
    /// From the front-end: this is what `range` is.
    Update {
        /// Addresses of the device.
        range: IovaRange,
        /// Where they begin in the front-end's own address space, of which
        /// [`Regions`](super::Regions) tells.
        user: u64,
        /// What the device may do.
        permissions: Permissions,
    },
    /// From the front-end: whatever was said of these addresses no longer holds. `None`: of all.
    Invalidate(Option<IovaRange>),
    /// From the back-end: an access failed.
    AccessFail {
        /// Its address.
        iova: Iova,
        /// What it was.
        wanted: Permissions,
    },
}

impl Message {
    /// Reads a message. An invalidation whose range is none (empty, or past 2^64 - 1) is one of
    /// everything: what is invalidated too much is asked for again, and what is invalidated too
    /// little is reached by a device that may not.
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
        let wanted = || {
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
                wanted: wanted()?,
            }),
            VHOST_IOTLB_UPDATE => Ok(Self::Update {
                range: range.ok_or(MessageError::Range { iova, bytes: size })?,
                user,
                permissions: wanted()?,
            }),
            VHOST_IOTLB_INVALIDATE => Ok(Self::Invalidate(range)),
            VHOST_IOTLB_ACCESS_FAIL => Ok(Self::AccessFail {
                iova,
                wanted: wanted()?,
            }),
            _ => Err(MessageError::Kind(kind)),
        }
    }

    /// The bytes of the message.
    pub fn encode(&self) -> [u8; IOTLB_BYTES] {
        let (kind, iova, size, user, permissions) = match *self {
            Self::Miss { iova, wanted } => (VHOST_IOTLB_MISS, iova, 0, 0, wanted.bits()),
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
            Self::AccessFail { iova, wanted } => {
                (VHOST_IOTLB_ACCESS_FAIL, iova, 0, 0, wanted.bits())
            }
        };
        let mut bytes = [0; IOTLB_BYTES];
        let words = [iova.get(), size, user, 0].map(u64::to_ne_bytes);
        bytes
            .iter_mut()
            .zip(words.iter().flatten())
            .for_each(|(to, from)| *to = *from);
        let [.., permission, code, _, _, _, _, _, _] = &mut bytes;
        // Two bits.
        (*permission, *code) = (permissions as u8, kind);
        bytes
    }
}
