//! Requests: from the bytes of the device-readable part to what they ask for (virtio 1.3, section
//! 5.13.6).

use crate::spec::{
    ATTACH_BYTES, DETACH_BYTES, MAP_BYTES, PROBE_BYTES, UNMAP_BYTES, VIRTIO_IOMMU_T_ATTACH,
    VIRTIO_IOMMU_T_DETACH, VIRTIO_IOMMU_T_MAP, VIRTIO_IOMMU_T_PROBE, VIRTIO_IOMMU_T_UNMAP,
};
use crate::{DomainId, EndpointId, RequestError};

/// A request whose bytes are all there. Nothing has been said of their values.
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
}

impl Request {
    /// Reads a request. Bytes behind it are ignored, and so are reserved ones, except ATTACH's.
    ///
    /// UNMAP's may be refused (section 5.13.6.6.2), but a driver that does not look at the status
    /// would then hand on memory that its devices still reach.
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
            _ => Err(RequestError::UnknownType(kind)),
        }
    }
}

/// The little-endian number at byte `AT`, which the compiler checks to lie inside.
#[inline]
fn le32<const AT: usize, const LENGTH: usize>(bytes: &[u8; LENGTH]) -> u32 {
    const { assert!(AT + 4 <= LENGTH) };
    let mut raw = [0; 4];
    raw.copy_from_slice(&bytes[AT..AT + 4]);
    u32::from_le_bytes(raw)
}

/// The little-endian number at byte `AT`, which the compiler checks to lie inside.
#[inline]
fn le64<const AT: usize, const LENGTH: usize>(bytes: &[u8; LENGTH]) -> u64 {
    const { assert!(AT + 8 <= LENGTH) };
    let mut raw = [0; 8];
    raw.copy_from_slice(&bytes[AT..AT + 8]);
    u64::from_le_bytes(raw)
}
