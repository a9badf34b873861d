//! An NVMe controller (NVM Express Base Specification 1.4) without I/O: the registers of its BAR,
//! the queues in the host's memory, the admin commands and the NVM commands of one namespace.
//!
//! A monitor passes each register access of the guest to [`Controller::read`] and
//! [`Controller::write`], and calls [`Controller::step`] until it returns [`Step::Idle`]. The
//! embedder supplies the access to memory ([`Memory`]) and the blocks ([`Medium`]).
//!
//! | file | concept |
//! |---|---|
//! | `register.rs` | offsets and fields of the registers (section 3.1) |
//! | `command.rs` | submission and completion queue entries (sections 4.2, 4.6) |
//! | `status.rs` | status codes (section 4.6.1) |
//! | `prp.rs` | physical region pages (section 4.3) |
//! | `queue.rs` | positions in the queues (section 4.1) |
//! | `controller.rs` | registers, doorbells, reset, shutdown, one command at a time |
//! | `admin.rs` | admin commands (section 5) |
//! | `nvm.rs` | read, write and flush (section 6) |
//! | `identify.rs` | identify data structures (section 5.15) |
//! | `features.rs` | features (section 5.21) |
//! | `event.rs` | asynchronous events (section 5.2) and the error log |
//!
//! ```
//! use ringfence_nvme_device::{Config, Controller, register};
//!
//! let controller = Controller::new(&Config::new(2048));
//! assert_eq!(controller.read(register::VS, 4), 0x0001_0400);
//! // The controller is disabled.
//! assert_eq!(controller.read(register::CSTS, 4), 0);
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

mod admin;
mod command;
mod config;
mod controller;
mod event;
mod features;
mod identify;
mod nvm;
mod prp;
mod queue;
pub mod register;
mod status;

pub use command::{
    COMMAND_BYTES, COMPLETION_BYTES, NvmeCommand, NvmeCompletion, Opcode, RawCommand, RawCompletion,
};
pub use config::{Config, MAX_IO_QUEUES};
pub use controller::{CommandKind, Controller, Executed, FatalError, StartError, Step};
pub use prp::Segment;
pub use status::NvmeStatus;

use ringfence_types::Iova;

/// Bytes of a block of the namespace.
pub const BLOCK_BYTES: u64 = 512;
/// Bytes of a memory page: the only value of `CC.MPS` that the controller supports.
pub const PAGE_BYTES: u64 = 4096;

/// The IOMMU stopped an access, or no memory is at its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocked;

/// Access of the controller to the host's memory.
pub trait Memory {
    /// Reads `data.len()` bytes at `at`.
    ///
    /// # Errors
    /// [`Blocked`]; `data` then has any content.
    fn read(&mut self, at: Iova, data: &mut [u8]) -> Result<(), Blocked>;

    /// Writes `data` at `at`. A host that sees data of this call sees the data of all earlier
    /// calls.
    ///
    /// # Errors
    /// [`Blocked`]; part of the data may have been written.
    fn write(&mut self, at: Iova, data: &[u8]) -> Result<(), Blocked>;

    /// Called before the data of a read or a write command is transferred, with its buffers. For
    /// embedders that observe requests.
    fn before_transfer(&mut self, _kind: Opcode, _buffers: &[Segment]) {}
}

/// The blocks could not be read, written or made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediumError;

/// The blocks of the namespace. The controller checks ranges against [`Config::blocks`].
pub trait Medium {
    /// Reads whole blocks, from number `block` on.
    ///
    /// # Errors
    /// [`MediumError`]; `data` then has any content.
    fn read(&mut self, block: u64, data: &mut [u8]) -> Result<(), MediumError>;

    /// Writes whole blocks, from number `block` on.
    ///
    /// # Errors
    /// [`MediumError`]; part of the data may have been written.
    fn write(&mut self, block: u64, data: &[u8]) -> Result<(), MediumError>;

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// [`MediumError`].
    fn flush(&mut self) -> Result<(), MediumError>;
}
