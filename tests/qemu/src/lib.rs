//! Judges the drivers of IOMMUs by QEMU's device models, without a guest.
#![warn(missing_docs)]

mod board;
mod emulator;
mod machine;
mod qtest;
mod ram;
mod registers;
mod test_device;

pub use board::Board;
pub use emulator::Emulator;
pub use machine::{Machine, Setup};
pub use qtest::{Commands, Qtest, Replies};
pub use ram::GuestRam;
pub use registers::QtestRegisters;
pub use test_device::{TestDevice, Verdict};
