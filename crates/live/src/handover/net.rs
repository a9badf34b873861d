//! What only a network device has, and its link: values and their place in the stream.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use super::StateError;
use super::bytes::{Reader, Writer};
use crate::link::{CHUNK_BYTES, FRAME_PREFIX_BYTES, MAX_FRAME_BYTES, MAX_PATH_BYTES};
use crate::virtio::net::FLOWS;

/// Longest frame behind its length.
const MAX_PREFIXED: usize = FRAME_PREFIX_BYTES + MAX_FRAME_BYTES;

/// What a network device has beside its registers.
#[derive(Debug)]
pub struct NetState {
    /// Its hardware address.
    pub mac: [u8; 6],
    /// Queue pairs that are offered,
    pub offered: u16,
    /// and that the driver uses.
    pub active: u16,
    /// For each class of flows the pair on which the driver last sent;
    /// [`NO_PAIR`](crate::virtio::net::NO_PAIR): it has not.
    pub flows: [u8; FLOWS],
    /// The frame that came and waits for a buffer.
    pub pending_frame: Option<PendingFrameState>,
    /// A bit for each pair: it has frames that the link did not take, in the driver's ring.
    pub waiting: u16,
    /// The far side.
    pub link: LinkState,
}

/// A frame that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingFrameState {
    /// The frame.
    pub frame: Vec<u8>,
    /// Where it is to go.
    pub pair: u16,
}

/// A link. What is on its way to or from the other side is in the descriptors' sockets, or here.
#[derive(Debug)]
pub enum LinkState {
    /// A tap interface.
    Tap {
        /// The descriptor that has it.
        file: OwnedFd,
    },
    /// A stream socket.
    Stream {
        /// Where the next peer comes, if this side listens. The kernel knows its name.
        listener: Option<OwnedFd>,
        /// The peer, if there is one.
        peer: Option<PeerState>,
    },
    /// A pair of datagram sockets.
    Datagram {
        /// This side's. The kernel knows its name.
        socket: OwnedFd,
        /// The other's name, from the root.
        remote: PathBuf,
    },
}

/// The peer of a stream socket.
#[derive(Debug)]
pub struct PeerState {
    /// Its socket.
    pub stream: OwnedFd,
    /// The frame that has come in part: as much as is known of its length, and its bytes unless
    /// they are dropped.
    pub begun: Vec<u8>,
    /// Bytes of it that are to come.
    pub missing: u32,
    /// What was read behind it.
    pub unread: Vec<u8>,
    /// The rest of the frame that was sent in part.
    pub unsent: Vec<u8>,
}

impl NetState {
    pub(super) fn encode(self, out: &mut Writer) {
        out.bytes.extend(self.mac);
        out.u16(self.offered);
        out.u16(self.active);
        out.bytes.extend(self.flows);
        out.flag(self.pending_frame.is_some());
        if let Some(held) = self.pending_frame {
            out.blob(&held.frame);
            out.u16(held.pair);
        }
        out.u16(self.waiting);
        self.link.encode(out);
    }

    pub(super) fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        Ok(Self {
            mac: input.array()?,
            offered: input.u16()?,
            active: input.u16()?,
            flows: input.array()?,
            pending_frame: if input.flag()? {
                Some(PendingFrameState {
                    frame: input.blob("bytes of a frame", MAX_FRAME_BYTES)?,
                    pair: input.u16()?,
                })
            } else {
                None
            },
            waiting: input.u16()?,
            link: LinkState::decode(input)?,
        })
    }
}

impl LinkState {
    fn encode(self, out: &mut Writer) {
        match self {
            Self::Tap { file } => {
                out.u8(1);
                out.fd(file);
            }
            Self::Stream { listener, peer } => {
                out.u8(2);
                out.maybe_fd(listener);
                out.flag(peer.is_some());
                if let Some(peer) = peer {
                    out.fd(peer.stream);
                    out.blob(&peer.begun);
                    out.u32(peer.missing);
                    out.blob(&peer.unread);
                    out.blob(&peer.unsent);
                }
            }
            Self::Datagram { socket, remote } => {
                out.u8(3);
                out.fd(socket);
                out.blob(remote.as_os_str().as_bytes());
            }
        }
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        Ok(match input.u8()? {
            1 => Self::Tap { file: input.fd()? },
            2 => Self::Stream {
                listener: input.maybe_fd()?,
                peer: if input.flag()? {
                    Some(PeerState::decode(input)?)
                } else {
                    None
                },
            },
            3 => Self::Datagram {
                socket: input.fd()?,
                remote: OsString::from_vec(input.blob("bytes of a path", MAX_PATH_BYTES)?).into(),
            },
            kind => {
                return Err(StateError::BadValue {
                    what: "kind of link",
                    value: kind.into(),
                });
            }
        })
    }
}

impl PeerState {
    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        Ok(Self {
            stream: input.fd()?,
            begun: input.blob("bytes of a begun frame", MAX_PREFIXED)?,
            missing: input.u32()?,
            unread: input.blob("bytes that were read", CHUNK_BYTES)?,
            unsent: input.blob("bytes of an unsent frame", MAX_PREFIXED)?,
        })
    }
}
