//! The messages between guest and host. `docs/PVIOMMU.md` is the source of every layout here.
//!
//! Decoding borrows: a [`Request`] is a view of the bytes that the guest wrote, and reads its
//! arrays in place. Decoding checks only the layout. The backend checks the values.

mod address;
mod config;
mod crc32c;
mod direction;
mod event;
mod record;
mod request;
mod status;
mod stream;
mod words;

pub use address::{Devid, Gpa, GuestPhysical};
pub use config::{CONFIG_BYTES, Config, ConfigError, DEVICES_LIMIT, PAGES_LIMIT, VERSION};
pub use crc32c::crc32c;
pub use event::{EVENT_BYTES, Event, EventReason};
pub use record::Record;
pub use request::{Malformed, Map, Request, Unmap, encode_map, encode_unmap};
pub use status::Status;
pub use stream::{
    MigrationStream, OutOfOrder, STREAM_MAGIC, StreamError, StreamErrorKind, StreamWriter,
};
pub use words::{Giovas, Gpas};

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;
