//! Parsers of the firmware tables that describe IOMMUs.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]
