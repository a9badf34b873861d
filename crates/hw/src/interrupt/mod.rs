//! Interrupt remapping (VT-d specification, chapter 5).
//!
//! A write to the addresses 0xfee0_0000 to 0xfeef_ffff is an interrupt request and never reaches
//! memory. Without remapping, the device chooses vector and destination itself (attack A15). With
//! remapping, the request names an entry of a table in memory, and the entry names the device that
//! may use it.

mod entry;
mod remapping;
mod request;

pub use entry::{InterruptEntry, SourceValidation};
pub use remapping::{
    CompatibilityFormat, InterruptFault, InterruptFaultReason, InterruptRemapping,
};
pub use request::{INTERRUPT_RANGE, Interrupt, InterruptRequest};
