//! The vfio-user protocol as bytes: no socket, no device, no memory. Everything here is written for a client that lies.

pub(crate) mod fields;
mod header;
mod inbox;
mod request;

pub use header::{
    VfioUserCommand, FramingError, HEADER_BYTES, Header, MAX_DATA_BYTES, MAX_FDS, MAX_MESSAGE_BYTES,
};
pub use inbox::{MessageAssembler, Framed, Inbox, Message};
pub use request::{IrqAction, IrqData, VfioUserRequest, RequestError, SetIrqs, errno};
