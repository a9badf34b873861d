//! Domains in lazy mode: a proposal for a later version of virtio (oasis-tcs/virtio-spec, issue
//! 204, open). Not part of virtio 1.3.
//!
//! An UNMAP of such a domain removes its mappings, but the device may keep cached translations. A
//! request `IOTLB_FLUSH` invalidates all cached translations of the domain. So the driver decides
//! how many UNMAPs share an invalidation, and must not reuse an unmapped address, or return its
//! memory, before the reply of the next `IOTLB_FLUSH`.
//!
//! The text of the issue names the feature and the request, and gives no numbers and no layout. A
//! device that offers the feature ([`Options::lazy_domains`](crate::Options::lazy_domains)) and its
//! driver must therefore both use the numbers of this file. Decision 0040
//! (`docs/decisions/0040-modes-of-guests-and-pools.md`) lists what is ours.

/// Feature bit: domains in lazy mode and the request [`VIRTIO_IOMMU_T_IOTLB_FLUSH`] are available.
/// Ours: the highest bit of a device type.
pub const VIRTIO_IOMMU_F_LAZY_IOTLB_FLUSH: u32 = 23;

/// ATTACH: the domain is in lazy mode. Ours: the highest bit of the flags.
pub const VIRTIO_IOMMU_ATTACH_F_LAZY: u32 = 1 << 31;

/// Request type: invalidate all cached translations of a domain in lazy mode. Ours: the highest
/// number.
pub const VIRTIO_IOMMU_T_IOTLB_FLUSH: u8 = 0xff;

/// Bytes of an `IOTLB_FLUSH` before its tail. Ours: head, domain, eight reserved bytes, which the
/// device ignores.
pub const IOTLB_FLUSH_BYTES: usize = 16;
