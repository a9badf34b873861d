//! The reverse translation cache of the PVIOMMU paper (Tang et al., section 4.5): an adaptive radix
//! tree and a queue with separators.
//!
//! [`RtcAsPublished`] has the paper's defects, [`Rtc`] is fixed. [`tree`] has the trees of both.
//! [`tables`] computes the paper's Tables 7 and 8, and [`residency`] the time that mappings stay.

mod as_published;
mod fixed;
pub mod residency;
pub mod tables;
pub mod tree;

pub use as_published::RtcAsPublished;
pub use fixed::Rtc;
