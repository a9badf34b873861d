//! Driver of a RISC-V IOMMU.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod attach;
mod attachments;
mod capabilities;
mod command;
mod completion;
mod directory;
mod error;
mod fault;
mod invalidate;
mod msi;
mod options;
mod page_request;
mod queue;
mod registers;
mod start;
mod submit;
mod translation;
mod unit;

pub use capabilities::{Capabilities, InterruptSupport};
pub use error::{Feature, UnitError};
pub use fault::{Cause, FaultEvent, FaultRecord, Transaction};
pub use msi::{MsiError, MsiPageTable};
pub use options::{Interrupts, Options};
pub use page_request::{PageRequest, PageRequestEvent, PageResponse};
pub use queue::Loss;
pub use registers::Register;
pub use translation::{
    Ats, GuestFirstStage, MsiTranslation, PageTable, Privilege, ProcessBits, Translation,
};
pub use unit::{PendingInterrupts, Unit};
