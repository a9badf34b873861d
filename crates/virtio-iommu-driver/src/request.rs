//! Encoding of requests (virtio 1.3, section 5.13.6), with the constants of the device's crate.

use ringfence_types::{DomainId, IovaRange, Permissions, PhysAddr};
use ringfence_virtio_iommu::EndpointId;
use ringfence_virtio_iommu::spec::{
    ATTACH_BYTES, DETACH_BYTES, MAP_BYTES, MAX_REQUEST_BYTES, PROBE_BYTES, UNMAP_BYTES,
    VIRTIO_IOMMU_ATTACH_F_BYPASS, VIRTIO_IOMMU_MAP_F_READ, VIRTIO_IOMMU_MAP_F_WRITE,
    VIRTIO_IOMMU_T_ATTACH, VIRTIO_IOMMU_T_DETACH, VIRTIO_IOMMU_T_MAP, VIRTIO_IOMMU_T_PROBE,
    VIRTIO_IOMMU_T_UNMAP,
};

/// Words of the longest request.
pub(crate) const WORDS: usize = MAX_REQUEST_BYTES / 8;
// `words` omits the bytes of a last word that is not whole.
const _: () = assert!(MAX_REQUEST_BYTES.is_multiple_of(8));

/// A request of the driver, before it is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    Attach {
        domain: DomainId,
        endpoint: EndpointId,
        kind: DomainKind,
    },
    Detach {
        domain: DomainId,
        endpoint: EndpointId,
    },
    Map {
        domain: DomainId,
        range: IovaRange,
        physical: PhysAddr,
        permissions: Permissions,
    },
    Unmap {
        domain: DomainId,
        range: IovaRange,
    },
    Probe {
        endpoint: EndpointId,
    },
}

/// The kind of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DomainKind {
    /// Endpoints reach what is mapped.
    Mapped,
    /// Endpoints reach all physical memory.
    Bypass,
}

/// Collects the bytes of a request.
struct Encoder {
    bytes: [u8; MAX_REQUEST_BYTES],
    at: usize,
}

impl Encoder {
    const fn new(kind: u8) -> Self {
        let mut bytes = [0; MAX_REQUEST_BYTES];
        bytes[0] = kind;
        Self { bytes, at: 4 }
    }

    fn put(mut self, field: &[u8]) -> Self {
        let rest = self.bytes.get_mut(self.at..).unwrap_or_default();
        debug_assert!(field.len() <= rest.len(), "no request is so long");
        for (byte, value) in rest.iter_mut().zip(field) {
            *byte = *value;
        }
        self.at = self.at.saturating_add(field.len());
        self
    }

    fn put32(self, value: u32) -> Self {
        self.put(&value.to_le_bytes())
    }

    fn put64(self, value: u64) -> Self {
        self.put(&value.to_le_bytes())
    }

    fn put_range(self, range: &IovaRange) -> Self {
        self.put64(range.start().get()).put64(range.last().get())
    }
}

impl Request {
    /// Returns the bytes of the device-readable part and their number. Reserved bytes are zero.
    pub(crate) fn encode(&self) -> ([u8; MAX_REQUEST_BYTES], usize) {
        let domain = |kind: u8, domain: DomainId| Encoder::new(kind).put32(domain.get().into());
        let (encoder, bytes) = match self {
            Self::Attach {
                domain: id,
                endpoint,
                kind,
            } => {
                let flags = match kind {
                    DomainKind::Mapped => 0,
                    DomainKind::Bypass => VIRTIO_IOMMU_ATTACH_F_BYPASS,
                };
                let encoder = domain(VIRTIO_IOMMU_T_ATTACH, *id).put32(endpoint.get());
                (encoder.put32(flags), ATTACH_BYTES)
            }
            Self::Detach {
                domain: id,
                endpoint,
            } => {
                let encoder = domain(VIRTIO_IOMMU_T_DETACH, *id).put32(endpoint.get());
                (encoder, DETACH_BYTES)
            }
            Self::Map {
                domain: id,
                range,
                physical,
                permissions,
            } => {
                let encoder = domain(VIRTIO_IOMMU_T_MAP, *id).put_range(range);
                let encoder = encoder.put64(physical.get());
                (encoder.put32(map_flags(*permissions)), MAP_BYTES)
            }
            Self::Unmap { domain: id, range } => {
                let encoder = domain(VIRTIO_IOMMU_T_UNMAP, *id).put_range(range);
                (encoder, UNMAP_BYTES)
            }
            Self::Probe { endpoint } => {
                let encoder = Encoder::new(VIRTIO_IOMMU_T_PROBE).put32(endpoint.get());
                (encoder, PROBE_BYTES)
            }
        };
        (encoder.bytes, bytes)
    }

    /// Returns the bytes as words in memory.
    pub(crate) fn words(&self) -> ([u64; WORDS], usize) {
        let (bytes, count) = self.encode();
        let mut words = [0; WORDS];
        for (word, eight) in words.iter_mut().zip(bytes.chunks(8)) {
            if let Some(eight) = eight.first_chunk() {
                *word = u64::from_le_bytes(*eight);
            }
        }
        (words, count)
    }
}

const fn map_flags(permissions: Permissions) -> u32 {
    let read = match permissions.intersect(Permissions::READ) {
        Some(_) => VIRTIO_IOMMU_MAP_F_READ,
        None => 0,
    };
    let write = match permissions.intersect(Permissions::WRITE) {
        Some(_) => VIRTIO_IOMMU_MAP_F_WRITE,
        None => 0,
    };
    read | write
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_types::Iova;
    use std::vec::Vec;

    fn bytes(request: Request) -> Vec<u8> {
        let (bytes, count) = request.encode();
        assert!(bytes[count..].iter().all(|byte| *byte == 0));
        bytes[..count].to_vec()
    }

    /// By hand from section 5.13.6.
    #[test]
    fn golden_requests() {
        let domain = DomainId::new(0x0102);
        let endpoint = EndpointId::new(0x0a0b_0c0d);
        let range = IovaRange::inclusive(Iova::new(0x1000), Iova::new(0x0003_2211_0000_4fff));
        let range = range.unwrap();
        let attach = |kind| Request::Attach {
            domain,
            endpoint,
            kind,
        };
        let head = |kind: u8| [&[kind, 0, 0, 0, 0x02, 0x01, 0, 0][..]].concat();
        let ends = [
            0x00, 0x10, 0, 0, 0, 0, 0, 0, 0xff, 0x4f, 0x00, 0x00, 0x11, 0x22, 0x03, 0x00,
        ];
        let id = [0x0d, 0x0c, 0x0b, 0x0a];
        let expected = [head(1), id.to_vec(), [0; 8].to_vec()].concat();
        assert_eq!(bytes(attach(DomainKind::Mapped)), expected);
        let expected = [head(1), id.to_vec(), [1, 0, 0, 0, 0, 0, 0, 0].to_vec()].concat();
        assert_eq!(bytes(attach(DomainKind::Bypass)), expected);
        let expected = [head(2), id.to_vec(), [0; 8].to_vec()].concat();
        assert_eq!(bytes(Request::Detach { domain, endpoint }), expected);
        for (permissions, flags) in [
            (Permissions::READ, 1),
            (Permissions::WRITE, 2),
            (Permissions::READ_WRITE, 3),
        ] {
            let physical = PhysAddr::new(0x0001_0203_0405_6000);
            let map = Request::Map {
                domain,
                range,
                physical,
                permissions,
            };
            let rest = [0, 0x60, 0x05, 0x04, 0x03, 0x02, 0x01, 0, flags, 0, 0, 0];
            assert_eq!(bytes(map), [head(3), ends.to_vec(), rest.to_vec()].concat());
        }
        let expected = [head(4), ends.to_vec(), [0; 4].to_vec()].concat();
        assert_eq!(bytes(Request::Unmap { domain, range }), expected);
        let expected = [&[5, 0, 0, 0][..], &id, &[0; 64]].concat();
        assert_eq!(bytes(Request::Probe { endpoint }), expected);
    }
}
