//! Devices for the statements: this crate's, called directly and through queues, and the broken
//! ones.

pub(crate) mod broken;
pub(crate) mod direct;
pub(crate) mod flaws;
#[cfg(feature = "virtio-queue")]
pub(crate) mod queued;
mod rewrite;
