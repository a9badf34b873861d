//! The far side of a network device: whoever takes its frames and gives it others.
//!
//! A link never waits. It holds at most one frame that was half sent; what does not fit stays where it is, in the guest's ring or in the
//! host's kernel.

mod address;
mod datagram;
mod framing;
mod stream;
mod tap;

pub use address::{Address, AddressError};
pub use datagram::Datagram;
pub use framing::{Deframed, Deframer, FRAME_PREFIX_BYTES, Framer, FramesLost, MAX_FRAMED_BYTES};
pub use stream::Stream;
pub use tap::Tap;

use std::io;

use crate::virtio::Awaited;

/// Shortest frame: an Ethernet header.
pub const MIN_FRAME_BYTES: usize = 14;
/// Longest frame: 1500 bytes of payload behind a header with one VLAN tag. Anything longer is dropped, from either side.
pub const MAX_FRAME_BYTES: usize = 1518;

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sending {
    /// It is on its way.
    Taken,
    /// Not now; it was not taken. [`Link::waits_for`] says when to try again.
    Full,
    /// It is lost: nobody is there.
    Lost,
}

/// What came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receiving {
    /// A frame of this many bytes, within the limits.
    Frame(usize),
    /// Something that is no frame, or too long a one. There may be more.
    Dropped,
    /// Nothing.
    Nothing,
}

/// A link.
pub trait Link: Send {
    /// Sends a frame. It keeps nothing of a frame that it did not take.
    fn send(&mut self, frame: &[u8]) -> Sending;

    /// Receives a frame into `buffer`, which has room for more than [`MAX_FRAME_BYTES`].
    fn receive(&mut self, buffer: &mut [u8]) -> Receiving;

    /// What to wait for until something comes (`input`), or until a frame can be sent that was not taken (`output`).
    fn waits_for(&self, input: bool, output: bool) -> Option<Awaited<'_>>;

    /// What it waits for has come: it goes on with what it has begun.
    fn came(&mut self) {}
}

impl<L: Link + ?Sized> Link for Box<L> {
    fn send(&mut self, frame: &[u8]) -> Sending {
        (**self).send(frame)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Receiving {
        (**self).receive(buffer)
    }

    fn waits_for(&self, input: bool, output: bool) -> Option<Awaited<'_>> {
        (**self).waits_for(input, output)
    }

    fn came(&mut self) {
        (**self).came();
    }
}

/// Opens the link of an address.
///
/// # Errors
/// What the host says.
pub fn open(address: &Address) -> io::Result<Box<dyn Link>> {
    Ok(match address {
        Address::Tap(name) => Box::new(Tap::open(name)?),
        Address::Stream(path) => Box::new(Stream::open(path)?),
        Address::Datagram { local, remote } => Box::new(Datagram::open(local, remote)?),
    })
}

/// A frame as it was received, `got` bytes into a buffer with room for more than the longest.
fn received(got: usize) -> Receiving {
    if (MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&got) {
        Receiving::Frame(got)
    } else {
        Receiving::Dropped
    }
}
