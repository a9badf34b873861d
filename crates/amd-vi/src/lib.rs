//! Driver of an AMD-Vi unit.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]
