//! Devices for the statements: this crate's, called directly and through queues, and the broken
//! ones.

pub(crate) mod broken;
#[path = "../../../virtio-iommu-conformance/src/bin/virtio-iommu-conformance/ringfence.rs"]
pub(crate) mod direct;
pub(crate) mod flaws;
#[path = "../../../virtio-iommu-conformance/src/bin/virtio-iommu-conformance/options.rs"]
mod options;
#[cfg(feature = "virtio-queue")]
pub(crate) mod queued;
mod rewrite;
