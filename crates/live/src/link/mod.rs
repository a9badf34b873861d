//! The far side of a network device: whoever takes its frames and gives it others.
//!
//! A link never waits. It holds at most one frame that was half sent; what does not fit stays where
//! it is, in the guest's ring or in the host's kernel.

mod address;
mod datagram;
mod framing;
mod stream;
mod tap;

pub use address::{Address, AddressError};
pub use datagram::DatagramLink;
pub use framing::{Deframed, Deframer, FRAME_PREFIX_BYTES, Framer, FramesLost, MAX_FRAMED_BYTES};
pub use stream::CHUNK_BYTES;
pub use stream::StreamLink;
pub use tap::TapLink;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::handover::{HandOverBlocker, LinkState, StateError};
use crate::virtio::PollSource;

/// Shortest frame: an Ethernet header.
pub const MIN_FRAME_BYTES: usize = 14;
/// Longest frame: 1500 bytes of payload behind a header with one VLAN tag. Anything longer is
/// dropped, from either side.
pub const MAX_FRAME_BYTES: usize = 1518;

/// The longest name of a socket (Linux, unix(7)), without the zero at its end.
pub const MAX_PATH_BYTES: usize = 107;

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// It is on its way.
    Taken,
    /// Not now; it was not taken. [`NetLink::waits_for`] says when to try again.
    Full,
    /// It is lost: nobody is there.
    Lost,
}

/// What came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveOutcome {
    /// A frame of this many bytes, within the limits.
    Frame(usize),
    /// Something that is no frame, or too long a one. There may be more.
    Dropped,
    /// Nothing.
    Nothing,
}

/// A link.
pub trait NetLink: Send {
    /// Sends a frame. It keeps nothing of a frame that it did not take.
    fn send(&mut self, frame: &[u8]) -> SendOutcome;

    /// Receives a frame into `buffer`, which has room for more than [`MAX_FRAME_BYTES`].
    fn receive(&mut self, buffer: &mut [u8]) -> ReceiveOutcome;

    /// What to wait for until something comes (`input`), or until a frame can be sent that was not
    /// taken (`output`).
    fn waits_for(&self, input: bool, output: bool) -> Option<PollSource<'_>>;

    /// What it waits for has come: it goes on with what it has begun.
    fn on_ready(&mut self) {}

    /// The file by which the other side finds this one. It is to be removed when the link has
    /// ended, and not when another process has it.
    fn name(&self) -> Option<PathBuf> {
        None
    }

    /// What another process needs to go on with it. Nothing is sent or received by that.
    ///
    /// # Errors
    /// It cannot be handed over.
    fn save(&self) -> Result<LinkState, HandOverBlocker> {
        Err(HandOverBlocker::Keeps("a link of this kind"))
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
/// What the host says.
pub fn open(address: &Address) -> io::Result<Box<dyn NetLink>> {
    Ok(match address {
        Address::Tap(name) => Box::new(TapLink::open(name)?),
        Address::Stream(path) => Box::new(StreamLink::open(path)?),
        Address::Datagram { local, remote } => Box::new(DatagramLink::open(local, remote)?),
    })
}

/// Goes on with another process's link. Nothing is sent or received by that.
///
/// # Errors
/// [`StateError`]: a descriptor of another kind, or a frame in part that no stream could have left.
pub fn restore(state: LinkState) -> Result<Box<dyn NetLink>, StateError> {
    Ok(match state {
        LinkState::Tap { file } => Box::new(TapLink::restore(file)?),
        LinkState::Stream { listener, peer } => Box::new(StreamLink::restore(listener, peer)?),
        LinkState::Datagram { socket, remote } => Box::new(DatagramLink::restore(socket, remote)?),
    })
}

/// The same path from the root, where another process finds it too. A socket's name may have no
/// room for that: then it is as it was.
fn from_the_root(path: &Path) -> PathBuf {
    let whole = std::path::absolute(path).ok();
    let fits = whole.filter(|whole| whole.as_os_str().len() <= MAX_PATH_BYTES);
    fits.unwrap_or_else(|| path.to_owned())
}

/// Why a link stays whose socket's name has no room for a path from the root.
const LONG_NAME: HandOverBlocker =
    HandOverBlocker::Keeps("a link whose socket's path is too long from the root");

/// A local socket of this kind, one that listens or not.
fn local_socket(fd: OwnedFd, kind: SocketType, listens: bool) -> Result<OwnedFd, StateError> {
    let socket = fd.as_fd();
    let fits = sockopt::socket_domain(socket).is_ok_and(|family| family == AddressFamily::UNIX)
        && sockopt::socket_type(socket).is_ok_and(|one| one == kind)
        && sockopt::socket_acceptconn(socket).is_ok_and(|one| one == listens);
    fits.then_some(fd)
        .ok_or(StateError::NotA { what: "socket" })
}

/// Whether nobody ever waits at it. That belongs to what processes share of a descriptor.
fn never_waits(fd: impl AsFd) -> bool {
    fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// A frame as it was received, `got` bytes into a buffer with room for more than the longest.
fn received(got: usize) -> ReceiveOutcome {
    if (MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&got) {
        ReceiveOutcome::Frame(got)
    } else {
        ReceiveOutcome::Dropped
    }
}
