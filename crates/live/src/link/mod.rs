//! Network links: the peer of a network device, which takes and delivers Ethernet frames.
//!
//! A link never blocks. It buffers at most one partially sent frame; further frames stay in the
//! guest's ring or in the host kernel.

mod address;
mod datagram;
mod framing;
mod link_state;
mod stream;
mod tap;

pub use address::{Address, AddressError};
pub use datagram::DatagramLink;
pub use framing::{Deframed, Deframer, FRAME_PREFIX_BYTES, Framer, FramesLost, MAX_FRAMED_BYTES};
pub use link_state::{LinkState, PeerState};
pub use stream::CHUNK_BYTES;
pub use stream::StreamLink;
pub use tap::TapLink;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::event::PollSource;
use crate::saved_state::{HandOverBlocker, StateError};

/// Shortest frame in bytes: an Ethernet header.
pub const MIN_FRAME_BYTES: usize = 14;
/// Longest frame in bytes: 1500 bytes of payload after a header with one VLAN tag. Longer frames
/// are dropped in both directions.
pub const MAX_FRAME_BYTES: usize = 1518;

/// Longest path of a socket in bytes (Linux, unix(7)), without the terminating zero.
pub const MAX_PATH_BYTES: usize = 107;

/// Result of sending a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// The link accepted the frame.
    Taken,
    /// The link is full and did not accept the frame. [`NetLink::waits_for`] tells when to retry.
    Full,
    /// The frame is lost because the link has no peer.
    Lost,
}

/// Result of receiving a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveOutcome {
    /// A valid frame of this many bytes.
    Frame(usize),
    /// A frame of invalid length. More frames may follow.
    Dropped,
    /// No frame is available.
    Nothing,
}

/// A network link.
pub trait NetLink: Send {
    /// Sends a frame. On [`SendOutcome::Full`] the link keeps no part of the frame.
    fn send(&mut self, frame: &[u8]) -> SendOutcome;

    /// Receives a frame into `buffer`, which must have room for more than [`MAX_FRAME_BYTES`].
    fn receive(&mut self, buffer: &mut [u8]) -> ReceiveOutcome;

    /// Returns the descriptor to poll: for incoming frames (`input`), or until the link accepts
    /// frames again (`output`).
    fn waits_for(&self, input: bool, output: bool) -> Option<PollSource<'_>>;

    /// Continues a partial transfer after the descriptor became ready.
    fn on_ready(&mut self) {}

    /// Returns the path of the link's socket, by which the peer finds it. The caller removes it
    /// when the link ends, but not after a hand-over.
    fn name(&self) -> Option<PathBuf> {
        None
    }

    /// Returns the state that another process needs to continue the link. Sends and receives
    /// nothing.
    ///
    /// # Errors
    /// [`HandOverBlocker`] if the link cannot be handed over.
    fn save(&self) -> Result<LinkState, HandOverBlocker> {
        Err(HandOverBlocker::Unsupported("this link"))
    }
}

impl<L: NetLink + ?Sized> NetLink for Box<L> {
    fn send(&mut self, frame: &[u8]) -> SendOutcome {
        (**self).send(frame)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> ReceiveOutcome {
        (**self).receive(buffer)
    }

    fn waits_for(&self, input: bool, output: bool) -> Option<PollSource<'_>> {
        (**self).waits_for(input, output)
    }

    fn on_ready(&mut self) {
        (**self).on_ready();
    }

    fn name(&self) -> Option<PathBuf> {
        (**self).name()
    }

    fn save(&self) -> Result<LinkState, HandOverBlocker> {
        (**self).save()
    }
}

/// Opens the link of an address.
///
/// # Errors
/// Opening the host's interface or socket failed.
pub fn open(address: &Address) -> io::Result<Box<dyn NetLink>> {
    Ok(match address {
        Address::Tap(name) => Box::new(TapLink::open(name)?),
        Address::Stream(path) => Box::new(StreamLink::open(path)?),
        Address::Datagram { local, remote } => Box::new(DatagramLink::open(local, remote)?),
    })
}

/// Continues another process's link. Sends and receives nothing.
///
/// # Errors
/// [`StateError`] if a descriptor has the wrong kind, or no stream could have left a partial frame.
pub fn restore(state: LinkState) -> Result<Box<dyn NetLink>, StateError> {
    Ok(match state {
        LinkState::Tap { file } => Box::new(TapLink::restore(file)?),
        LinkState::Stream { listener, peer } => Box::new(StreamLink::restore(listener, peer)?),
        LinkState::Datagram { socket, remote } => Box::new(DatagramLink::restore(socket, remote)?),
    })
}

/// Makes `path` absolute, so that another process finds it too. Returns `path` unchanged if the
/// absolute path is too long for a socket.
fn from_the_root(path: &Path) -> PathBuf {
    let whole = std::path::absolute(path).ok();
    let fits = whole.filter(|whole| whole.as_os_str().len() <= MAX_PATH_BYTES);
    fits.unwrap_or_else(|| path.to_owned())
}

/// A socket whose absolute path is too long cannot be handed over.
const LONG_NAME: HandOverBlocker =
    HandOverBlocker::Unsupported("a link whose absolute socket path is too long");

/// Checks that `fd` is a local socket of this type that listens or not, as `listens` says.
fn local_socket(fd: OwnedFd, kind: SocketType, listens: bool) -> Result<OwnedFd, StateError> {
    let socket = fd.as_fd();
    let fits = sockopt::socket_domain(socket).is_ok_and(|family| family == AddressFamily::UNIX)
        && sockopt::socket_type(socket).is_ok_and(|one| one == kind)
        && sockopt::socket_acceptconn(socket).is_ok_and(|one| one == listens);
    fits.then_some(fd)
        .ok_or(StateError::NotA { what: "socket" })
}

/// Returns true if the descriptor is non-blocking. The flag is part of the open file description
/// that processes share.
fn never_waits(fd: impl AsFd) -> bool {
    fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// Classifies a received frame of `got` bytes. The buffer had room for more than the longest frame.
fn received(got: usize) -> ReceiveOutcome {
    if (MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&got) {
        ReceiveOutcome::Frame(got)
    } else {
        ReceiveOutcome::Dropped
    }
}
