//! Judges the drivers of IOMMUs by QEMU's device models, without a guest.
#![warn(missing_docs)]

mod board;
mod buffers;
mod driver;
mod emulator;
pub mod family;
pub mod linux;
mod machine;
mod oracle;
mod qtest;
mod ram;
mod random;
mod read_device;
mod registers;
mod report;
mod test_device;

pub use board::Board;
pub use driver::{Broken, Options, drive};
pub use emulator::Emulator;
pub use machine::{Machine, Setup};
pub use qtest::{Commands, Qtest, RegisterRead, Replies};
pub use ram::GuestRam;
pub use read_device::ReadDevice;
pub use registers::QtestRegisters;
pub use report::{Disagreement, Kind, Report};
pub use test_device::{TestDevice, Verdict};
