//! Constants of virtio 1.3, section 5.13, "IOMMU Device", under the specification's names. All
//! numbers are little-endian.

/// Device ID (section 5.13.1).
pub const VIRTIO_ID_IOMMU: u16 = 23;
/// Queue for requests (section 5.13.2).
pub const REQUESTQ: u16 = 0;
/// Queue for events (section 5.13.2).
pub const EVENTQ: u16 = 1;

/// Feature bit: `input_range` is valid (section 5.13.3).
pub const VIRTIO_IOMMU_F_INPUT_RANGE: u32 = 0;
/// Feature bit: `domain_range` is valid.
pub const VIRTIO_IOMMU_F_DOMAIN_RANGE: u32 = 1;
/// Feature bit: MAP and UNMAP requests are available.
pub const VIRTIO_IOMMU_F_MAP_UNMAP: u32 = 2;
/// Feature bit: unattached endpoints bypass the IOMMU. Superseded; this device never offers it.
pub const VIRTIO_IOMMU_F_BYPASS: u32 = 3;
/// Feature bit: the PROBE request is available.
pub const VIRTIO_IOMMU_F_PROBE: u32 = 4;
/// Feature bit: the flag [`VIRTIO_IOMMU_MAP_F_MMIO`] is available.
pub const VIRTIO_IOMMU_F_MMIO: u32 = 5;
/// Feature bit: field `bypass` and the flag [`VIRTIO_IOMMU_ATTACH_F_BYPASS`] are available.
pub const VIRTIO_IOMMU_F_BYPASS_CONFIG: u32 = 6;

/// Bytes of `struct virtio_iommu_config` (section 5.13.4).
pub const CONFIG_BYTES: usize = 40;
/// Offset of `page_size_mask` (le64).
pub const CONFIG_PAGE_SIZE_MASK: usize = 0;
/// Offset of `input_range` (two le64).
pub const CONFIG_INPUT_RANGE: usize = 8;
/// Offset of `domain_range` (two le32).
pub const CONFIG_DOMAIN_RANGE: usize = 24;
/// Offset of `probe_size` (le32).
pub const CONFIG_PROBE_SIZE: usize = 32;
/// Offset of `bypass` (one byte; three reserved ones follow).
pub const CONFIG_BYPASS: usize = 36;

/// Bytes of `struct virtio_iommu_req_head` (section 5.13.6): the type and three reserved ones.
pub const HEAD_BYTES: usize = 4;
/// Bytes of `struct virtio_iommu_req_tail`: the status and three reserved ones.
pub const TAIL_BYTES: usize = 4;

/// Request type (section 5.13.6): attach an endpoint to a domain.
pub const VIRTIO_IOMMU_T_ATTACH: u8 = 1;
/// Request type: detach an endpoint.
pub const VIRTIO_IOMMU_T_DETACH: u8 = 2;
/// Request type: create a mapping.
pub const VIRTIO_IOMMU_T_MAP: u8 = 3;
/// Request type: remove mappings.
pub const VIRTIO_IOMMU_T_UNMAP: u8 = 4;
/// Request type: return an endpoint's properties.
pub const VIRTIO_IOMMU_T_PROBE: u8 = 5;

/// Status (section 5.13.6): success.
pub const VIRTIO_IOMMU_S_OK: u8 = 0;
/// Status: virtio communication error. The driver sets it for a used length of 0; this device never
/// writes it.
pub const VIRTIO_IOMMU_S_IOERR: u8 = 1;
/// Status: unsupported request.
pub const VIRTIO_IOMMU_S_UNSUPP: u8 = 2;
/// Status: internal device error.
pub const VIRTIO_IOMMU_S_DEVERR: u8 = 3;
/// Status: invalid parameters.
pub const VIRTIO_IOMMU_S_INVAL: u8 = 4;
/// Status: parameters out of range.
pub const VIRTIO_IOMMU_S_RANGE: u8 = 5;
/// Status: entry not found.
pub const VIRTIO_IOMMU_S_NOENT: u8 = 6;
/// Status: bad address.
pub const VIRTIO_IOMMU_S_FAULT: u8 = 7;
/// Status: insufficient resources.
pub const VIRTIO_IOMMU_S_NOMEM: u8 = 8;

/// Bytes of an ATTACH before its tail (section 5.13.6.3): head, domain, endpoint, flags, four
/// reserved bytes.
pub const ATTACH_BYTES: usize = 20;
/// ATTACH: the domain is a bypass domain.
pub const VIRTIO_IOMMU_ATTACH_F_BYPASS: u32 = 1 << 0;
/// Bytes of a DETACH before its tail (section 5.13.6.4): head, domain, endpoint, eight reserved
/// bytes.
pub const DETACH_BYTES: usize = 20;
/// Bytes of a MAP before its tail (section 5.13.6.5): head, domain, `virt_start`, `virt_end`,
/// `phys_start`, flags.
pub const MAP_BYTES: usize = 36;
/// MAP: reads are allowed.
pub const VIRTIO_IOMMU_MAP_F_READ: u32 = 1 << 0;
/// MAP: writes are allowed.
pub const VIRTIO_IOMMU_MAP_F_WRITE: u32 = 1 << 1;
/// MAP: accesses are to a memory-mapped device.
pub const VIRTIO_IOMMU_MAP_F_MMIO: u32 = 1 << 2;
/// Bytes of an UNMAP before its tail (section 5.13.6.6): head, domain, `virt_start`, `virt_end`,
/// four reserved bytes.
pub const UNMAP_BYTES: usize = 28;
/// Bytes of a PROBE before its properties (section 5.13.6.7): head, endpoint, 64 reserved bytes.
pub const PROBE_BYTES: usize = 72;
/// Bytes of the longest device-readable part of a request.
pub const MAX_REQUEST_BYTES: usize = PROBE_BYTES;

/// Bits of a property's type (section 5.13.6.8); the others are reserved.
pub const VIRTIO_IOMMU_PROBE_T_MASK: u16 = 0xfff;
/// Property: end of the list.
pub const VIRTIO_IOMMU_PROBE_T_NONE: u16 = 0;
/// Property: a range of addresses that the driver cannot map.
pub const VIRTIO_IOMMU_PROBE_T_RESV_MEM: u16 = 1;
/// Bytes of `struct virtio_iommu_probe_property`: type and length.
pub const PROPERTY_HEAD_BYTES: usize = 4;
/// Bytes of `struct virtio_iommu_probe_resv_mem`, its head included.
pub const RESV_MEM_BYTES: usize = 24;
/// Reserved region: not to be mapped.
pub const VIRTIO_IOMMU_RESV_MEM_T_RESERVED: u8 = 0;
/// Reserved region: doorbells of message signaled interrupts.
pub const VIRTIO_IOMMU_RESV_MEM_T_MSI: u8 = 1;

/// Bytes of `struct virtio_iommu_fault` (section 5.13.6.9).
pub const FAULT_BYTES: usize = 24;
/// Fault reason: not described by another reason.
pub const VIRTIO_IOMMU_FAULT_R_UNKNOWN: u8 = 0;
/// Fault reason: the endpoint is attached to no domain.
pub const VIRTIO_IOMMU_FAULT_R_DOMAIN: u8 = 1;
/// Fault reason: no mapping, or one that does not allow the access.
pub const VIRTIO_IOMMU_FAULT_R_MAPPING: u8 = 2;
/// Fault flag: a read.
pub const VIRTIO_IOMMU_FAULT_F_READ: u32 = 1 << 0;
/// Fault flag: a write.
pub const VIRTIO_IOMMU_FAULT_F_WRITE: u32 = 1 << 1;
/// Fault flag: field `address` is valid.
pub const VIRTIO_IOMMU_FAULT_F_ADDRESS: u32 = 1 << 8;
