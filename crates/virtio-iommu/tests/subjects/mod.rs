//! The devices that the statements are run against: this crate's, over bytes and over queues, and
//! those that are broken.

pub(crate) mod broken;
pub(crate) mod direct;
pub(crate) mod flaws;
#[cfg(feature = "virtio-queue")]
pub(crate) mod queued;
mod rewrite;
