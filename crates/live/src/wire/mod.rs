//! The vfio-user protocol as bytes, without sockets, devices or memory. The parser trusts no field.

pub mod fields;
mod header;
mod inbox;
mod request;

pub use header::{
    FramingError, HEADER_BYTES, Header, MAX_DATA_BYTES, MAX_FDS, MAX_MESSAGE_BYTES, VfioUserCommand,
};
pub use inbox::{Framed, Inbox, Message, MessageAssembler};
pub use request::{IrqAction, IrqData, RequestError, SetIrqs, VfioUserRequest, errno};
