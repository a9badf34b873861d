//! Decoding of requests from the device-readable part (virtio 1.3, section 5.13.6).

use crate::lazy::{IOTLB_FLUSH_BYTES, VIRTIO_IOMMU_T_IOTLB_FLUSH};
use crate::spec::{
    ATTACH_BYTES, DETACH_BYTES, MAP_BYTES, PROBE_BYTES, UNMAP_BYTES, VIRTIO_IOMMU_T_ATTACH,
    VIRTIO_IOMMU_T_DETACH, VIRTIO_IOMMU_T_MAP, VIRTIO_IOMMU_T_PROBE, VIRTIO_IOMMU_T_UNMAP,
};
use crate::{DomainId, EndpointId, RequestError};

/// A request of sufficient length. Its values are not validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    Attach {
        domain: DomainId,
        endpoint: EndpointId,
        flags: u32,
        reserved: u32,
    },
    Detach {
        domain: DomainId,
        endpoint: EndpointId,
    },
    Map {
        domain: DomainId,
        start: u64,
        last: u64,
        physical: u64,
        flags: u32,
    },
    Unmap {
        domain: DomainId,
        start: u64,
        last: u64,
    },
    Probe {
        endpoint: EndpointId,
    },
    IotlbFlush {
        domain: DomainId,
    },
}

impl Request {
    /// Decodes a request. Ignores trailing bytes and reserved fields, except ATTACH's.
    ///
    /// A device may reject reserved bytes of an UNMAP (section 5.13.6.6.2). But a driver that
    /// ignores the status would then reuse memory that its devices can still access.
    #[inline]
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, RequestError> {
        let too_short = RequestError::TooShort { bytes: bytes.len() };
        let Some(&[kind, _, _, _]) = bytes.first_chunk() else {
            return Err(too_short);
        };
        match kind {
            VIRTIO_IOMMU_T_MAP => {
                let request: &[u8; MAP_BYTES] = bytes.first_chunk().ok_or(too_short)?;
                Ok(Self::Map {
                    domain: DomainId::new(le32::<4, _>(request)),
                    start: le64::<8, _>(request),
                    last: le64::<16, _>(request),
                    physical: le64::<24, _>(request),
                    flags: le32::<32, _>(request),
                })
            }
            VIRTIO_IOMMU_T_UNMAP => {
                let request: &[u8; UNMAP_BYTES] = bytes.first_chunk().ok_or(too_short)?;
                Ok(Self::Unmap {
                    domain: DomainId::new(le32::<4, _>(request)),
                    start: le64::<8, _>(request),
                    last: le64::<16, _>(request),
                })
            }
            VIRTIO_IOMMU_T_ATTACH => {
                let request: &[u8; ATTACH_BYTES] = bytes.first_chunk().ok_or(too_short)?;
                Ok(Self::Attach {
                    domain: DomainId::new(le32::<4, _>(request)),
                    endpoint: EndpointId::new(le32::<8, _>(request)),
                    flags: le32::<12, _>(request),
                    reserved: le32::<16, _>(request),
                })
            }
            VIRTIO_IOMMU_T_DETACH => {
                let request: &[u8; DETACH_BYTES] = bytes.first_chunk().ok_or(too_short)?;
                Ok(Self::Detach {
                    domain: DomainId::new(le32::<4, _>(request)),
                    endpoint: EndpointId::new(le32::<8, _>(request)),
                })
            }
            VIRTIO_IOMMU_T_PROBE => {
                let request: &[u8; PROBE_BYTES] = bytes.first_chunk().ok_or(too_short)?;
                Ok(Self::Probe {
                    endpoint: EndpointId::new(le32::<4, _>(request)),
                })
            }
            VIRTIO_IOMMU_T_IOTLB_FLUSH => {
                let request: &[u8; IOTLB_FLUSH_BYTES] = bytes.first_chunk().ok_or(too_short)?;
                Ok(Self::IotlbFlush {
                    domain: DomainId::new(le32::<4, _>(request)),
                })
            }
            _ => Err(RequestError::UnknownType(kind)),
        }
    }
}

/// Returns the little-endian number at offset `AT`. The compiler checks the offset.
#[inline]
fn le32<const AT: usize, const LENGTH: usize>(bytes: &[u8; LENGTH]) -> u32 {
    const { assert!(AT + 4 <= LENGTH) };
    let mut raw = [0; 4];
    raw.copy_from_slice(&bytes[AT..AT + 4]);
    u32::from_le_bytes(raw)
}

/// Returns the little-endian number at offset `AT`. The compiler checks the offset.
#[inline]
fn le64<const AT: usize, const LENGTH: usize>(bytes: &[u8; LENGTH]) -> u64 {
    const { assert!(AT + 8 <= LENGTH) };
    let mut raw = [0; 8];
    raw.copy_from_slice(&bytes[AT..AT + 8]);
    u64::from_le_bytes(raw)
}
