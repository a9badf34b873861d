//! Driver of an Arm SMMUv3.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]
