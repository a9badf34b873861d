//! State of a link and its encoding.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use super::{CHUNK_BYTES, FRAME_PREFIX_BYTES, MAX_FRAME_BYTES, MAX_PATH_BYTES};
use crate::saved_state::{Reader, SaveState, StateError, Writer, save_fields, wire_numbers};

/// Bytes of the longest frame with its length prefix.
const MAX_PREFIXED: usize = FRAME_PREFIX_BYTES + MAX_FRAME_BYTES;

wire_numbers! {
    enum LinkKind: u8 {
        Tap = 1,
        Stream = 2,
        Datagram = 3,
    }
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

impl SaveState for LinkState {
    fn encode(self, out: &mut Writer) {
        match self {
            Self::Tap { file } => {
                out.u8(LinkKind::Tap as u8);
                out.fd(file);
            }
            Self::Stream { listener, peer } => {
                out.u8(LinkKind::Stream as u8);
                listener.encode(out);
                peer.encode(out);
            }
            Self::Datagram { socket, remote } => {
                out.u8(LinkKind::Datagram as u8);
                out.fd(socket);
                out.blob(remote.as_os_str().as_bytes());
            }
        }
    }

    fn decode(input: &mut Reader<'_>) -> Result<Self, StateError> {
        let number = input.u8()?;
        let kind = LinkKind::from_number(number).ok_or(StateError::BadValue {
            what: "link kind",
            value: number.into(),
        })?;
        Ok(match kind {
            LinkKind::Tap => Self::Tap { file: input.fd()? },
            LinkKind::Stream => Self::Stream {
                listener: Option::decode(input)?,
                peer: Option::decode(input)?,
            },
            LinkKind::Datagram => Self::Datagram {
                socket: input.fd()?,
                remote: OsString::from_vec(input.blob("path length", MAX_PATH_BYTES)?).into(),
            },
        })
    }
}

save_fields! {
    PeerState {
        stream,
        begun: blob("length of a partial frame", MAX_PREFIXED),
        missing,
        unread: blob("length of unread bytes", CHUNK_BYTES),
        unsent: blob("length of an unsent frame", MAX_PREFIXED),
    }
}
