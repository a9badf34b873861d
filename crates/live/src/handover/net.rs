//! State of a network device and its link, and its encoding in the stream.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use super::StateError;
use super::bytes::{Reader, Writer};
use crate::link::{CHUNK_BYTES, FRAME_PREFIX_BYTES, MAX_FRAME_BYTES, MAX_PATH_BYTES};
use crate::virtio::net::FLOWS;

/// Bytes of the longest frame with its length prefix.
const MAX_PREFIXED: usize = FRAME_PREFIX_BYTES + MAX_FRAME_BYTES;

/// State of a network device, without its registers.
#[derive(Debug)]
pub struct NetState {
    /// MAC address, in the order of transmission.
    pub mac: [u8; 6],
    /// Offered queue pairs.
    pub offered: u16,
    /// Queue pairs that the driver uses.
    pub active: u16,
    /// For each class of flows, the pair on which the driver last sent a frame, or
    /// [`NO_PAIR`](crate::virtio::net::NO_PAIR).
    pub flows: [u8; FLOWS],
    /// Received frame that waits for a buffer.
    pub pending_frame: Option<PendingFrameState>,
    /// One bit for each pair with frames in the driver's ring that the link did not accept.
    pub waiting: u16,
    /// State of the link.
    pub link: LinkState,
}

/// A received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingFrameState {
    /// Bytes of the frame.
    pub frame: Vec<u8>,
    /// Queue pair that the frame belongs to.
    pub pair: u16,
}

/// State of a link. Data in transit is in the kernel's socket buffers or in this state.
#[derive(Debug)]
pub enum LinkState {
    /// A tap interface.
    Tap {
        /// Descriptor of the interface.
        file: OwnedFd,
    },
    /// A stream socket.
    Stream {
        /// Socket that accepts the next peer, if this side listens. The kernel knows its name.
        listener: Option<OwnedFd>,
        /// The connected peer, if any.
        peer: Option<PeerState>,
    },
    /// A pair of datagram sockets.
    Datagram {
        /// Socket of this side. The kernel knows its name.
        socket: OwnedFd,
        /// Absolute path of the other side's socket.
        remote: PathBuf,
    },
}

/// The peer of a stream socket.
#[derive(Debug)]
pub struct PeerState {
    /// Socket of the connection.
    pub stream: OwnedFd,
    /// Partially received frame: the received part of its length prefix and of its data. A frame
    /// that is dropped has no data here.
    pub begun: Vec<u8>,
    /// Bytes of the frame that have not arrived.
    pub missing: u32,
    /// Bytes read beyond the frame.
    pub unread: Vec<u8>,
    /// Unsent rest of a partially sent frame.
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
