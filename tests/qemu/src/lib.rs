//! Judges the drivers of IOMMUs by QEMU's device models, without a guest.
#![warn(missing_docs)]
