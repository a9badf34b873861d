//! Driver of an Arm SMMUv3.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

mod attach;
mod attachments;
mod capabilities;
mod command;
mod command_queue;
mod context;
mod error;
mod event;
mod event_queue;
mod global_errors;
mod invalidate;
mod options;
mod ranges;
mod registers;
mod start;
mod stream_entry;
mod stream_table;
mod submit;
mod table_memory;
mod translation;
mod unit;

pub use capabilities::Capabilities;
pub use command_queue::CommandError;
pub use error::{Feature, UnitError};
pub use event::{Cause, Class, FaultEvent, FaultRecord, Loss, StageFault, Transaction};
pub use options::{Interrupts, Options};
pub use registers::Register;
pub use translation::{PageTable, Translation};
pub use unit::Unit;
