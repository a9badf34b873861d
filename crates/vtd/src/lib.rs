//! Driver of an Intel VT-d unit.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod attach;
mod capabilities;
mod command;
mod cover;
mod error;
mod fault;
mod invalidate;
mod pasid;
mod plan;
mod queue;
mod register_invalidation;
mod registers;
mod scalable;
mod unit;

pub use capabilities::Capabilities;
pub use error::{Feature, UnitError};
pub use fault::{Fault, FaultRecord, Request};
pub use pasid::Pasid;
pub use registers::Register;
pub use unit::{Interface, Mode, Options, Translation, Unit};
