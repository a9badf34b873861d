//! Sessions with the function, and an independent brute-force reference of docs/RIOMMU-DEVICE.md.
//!
//! The fuzz target `riommu` and the tests of this crate share these files.

pub(crate) mod memory;
pub(crate) mod reference;
pub(crate) mod session;
