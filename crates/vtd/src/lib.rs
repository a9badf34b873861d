//! Driver of an Intel VT-d unit.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]
