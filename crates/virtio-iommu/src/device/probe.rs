//! PROBE (virtio 1.3, sections 5.13.6.7 and 5.13.6.8).

use super::{Device, encode_tail};
use crate::endpoint::{ReservedRegion, ReservedRegionKind};
use crate::spec::{
    PROPERTY_HEAD_BYTES, RESV_MEM_BYTES, TAIL_BYTES, VIRTIO_IOMMU_PROBE_T_RESV_MEM,
    VIRTIO_IOMMU_RESV_MEM_T_MSI, VIRTIO_IOMMU_RESV_MEM_T_RESERVED, VIRTIO_IOMMU_T_PROBE,
};
use crate::{EndpointId, RequestError, RequestOutcome, Sink};

impl<S: Sink> Device<S> {
    /// Fills `reply` with the properties of `endpoint`, zeroes up to `probe_bytes`, and the tail.
    /// If `reply` is shorter, the tail goes to its end, where the driver expects it.
    pub(super) fn probe(&self, endpoint: EndpointId, reply: &mut [u8]) -> RequestOutcome {
        let probe_bytes = self.options.probe_bytes as usize;
        let writable_bytes = reply.len().saturating_sub(TAIL_BYTES);
        let reply = reply.split_at_mut_checked(writable_bytes.min(probe_bytes));
        let Some((properties, tail)) = reply else {
            return unwritten(RequestError::NoTail { bytes: 0 });
        };
        let Some(tail) = tail.first_chunk_mut::<TAIL_BYTES>() else {
            return unwritten(RequestError::NoTail { bytes: tail.len() });
        };
        if probe_bytes == 0 {
            return unwritten(RequestError::UnknownType(VIRTIO_IOMMU_T_PROBE));
        }
        properties.fill(0);
        let result = if writable_bytes < probe_bytes {
            Err(RequestError::ProbeTooShort {
                bytes: writable_bytes,
            })
        } else {
            match self.find_endpoint(endpoint) {
                Ok(index) => {
                    let regions = self.endpoints.get(index).map(|found| &found.reserved);
                    let slots = properties.as_chunks_mut::<RESV_MEM_BYTES>().0;
                    for (slot, region) in slots.iter_mut().zip(regions.into_iter().flatten()) {
                        *slot = encode(region);
                    }
                    Ok(())
                }
                Err(_) => Err(RequestError::NoEndpoint(endpoint)),
            }
        };
        *tail = encode_tail(result);
        RequestOutcome {
            used: properties.len() + TAIL_BYTES,
            result,
        }
    }
}

const fn unwritten(error: RequestError) -> RequestOutcome {
    RequestOutcome {
        used: 0,
        result: Err(error),
    }
}

/// Encodes `struct virtio_iommu_probe_resv_mem` (section 5.13.6.8.1); reserved bytes are zero.
fn encode(region: &ReservedRegion) -> [u8; RESV_MEM_BYTES] {
    const LENGTH: u16 = (RESV_MEM_BYTES - PROPERTY_HEAD_BYTES) as u16;
    let subtype = match region.kind {
        ReservedRegionKind::Reserved => VIRTIO_IOMMU_RESV_MEM_T_RESERVED,
        ReservedRegionKind::Msi => VIRTIO_IOMMU_RESV_MEM_T_MSI,
    };
    let mut bytes = [0; RESV_MEM_BYTES];
    let fields = VIRTIO_IOMMU_PROBE_T_RESV_MEM
        .to_le_bytes()
        .into_iter()
        .chain(LENGTH.to_le_bytes())
        .chain([subtype, 0, 0, 0])
        .chain(region.range.start().get().to_le_bytes())
        .chain(region.range.last().get().to_le_bytes());
    for (byte, field) in bytes.iter_mut().zip(fields) {
        *byte = field;
    }
    bytes
}
