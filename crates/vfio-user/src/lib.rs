//! The server's side of the vfio-user protocol as bytes, without sockets, devices or memory. The
//! parser trusts no field.
//!
//! An [`Inbox`] assembles messages from a byte stream, [`VfioUserRequest::parse`] turns a message
//! into a request, and [`Header::reply`] builds the reply. The embedder reads and writes the
//! socket.
//!
//! ```
//! use ringfence_vfio_user::{Inbox, ReceivedFds, VfioUserRequest, errno};
//!
//! // The header of DEVICE_RESET: message 7, command 13, 16 bytes, no flags, no error.
//! let bytes = [7, 0, 13, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
//! let mut inbox = Inbox::default();
//! let message = inbox.feed(&bytes, [], ReceivedFds::All)?.expect("a complete message");
//! let header = message.header;
//! let reply = match VfioUserRequest::parse(message) {
//!     Ok(VfioUserRequest::Reset) => header.reply(&[]),
//!     Ok(_) => header.error_reply(errno::ENOTSUP),
//!     Err(error) => header.error_reply(error.errno()),
//! };
//! assert_eq!(reply[..4], [7, 0, 13, 0]);
//! # Ok::<(), ringfence_vfio_user::FramingError>(())
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod fields;
mod header;
mod inbox;
mod request;

pub use header::{
    FramingError, HEADER_BYTES, Header, MAX_DATA_BYTES, MAX_FDS, MAX_MESSAGE_BYTES, VfioUserCommand,
};
pub use inbox::{Framing, Inbox, Message, MessageAssembler, ReceivedFds, VfioUser};
pub use request::{IrqAction, IrqData, RequestError, SetIrqs, VfioUserRequest, errno};
