//! Fault events (virtio 1.3, section 5.13.6.9).

use ringfence_types::{Iova, Permissions, RequesterId};
use ringfence_virtio_iommu::EndpointId;
use ringfence_virtio_iommu::spec::{
    FAULT_BYTES, VIRTIO_IOMMU_FAULT_F_ADDRESS, VIRTIO_IOMMU_FAULT_F_READ,
    VIRTIO_IOMMU_FAULT_F_WRITE, VIRTIO_IOMMU_FAULT_R_DOMAIN, VIRTIO_IOMMU_FAULT_R_MAPPING,
};

use crate::error::Failure;

/// Words of an event.
pub(crate) const FAULT_WORDS: usize = FAULT_BYTES / 8;

/// An entry of the event queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultRecord {
    /// A stopped access.
    Fault(Fault),
    /// An event of another length than a fault.
    Malformed {
        /// Bytes that the device wrote.
        bytes: u32,
        /// The words of the buffer.
        raw: [u64; FAULT_WORDS],
    },
    /// The device broke the event queue. No event follows before
    /// [`Unit::recover`](crate::Unit::recover).
    QueueFailed(Failure),
}

/// A stopped access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fault {
    /// Domain, mapping or another reason.
    pub reason: FaultReason,
    /// The endpoint that made the access.
    pub endpoint: EndpointId,
    /// Its requester id; `None` if the number is none of this unit's.
    pub device: Option<RequesterId>,
    /// The address; `None` if the device does not tell.
    pub iova: Option<Iova>,
    /// The kinds of access; `None` if the device does not tell.
    pub access: Option<Permissions>,
    /// The words of the event.
    pub raw: [u64; FAULT_WORDS],
}

/// The reason of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultReason {
    /// The endpoint is attached to no domain.
    Domain,
    /// No mapping allows the access.
    Mapping,
    /// Another reason, with its number: 0 is the specification's UNKNOWN.
    Unknown(u8),
}

impl Fault {
    /// Decodes an event. `base` is the number of requester id 0.
    pub(crate) fn decode(raw: [u64; FAULT_WORDS], base: u32) -> Self {
        let [first, second, address] = raw;
        let flags = (first >> 32) as u32;
        let endpoint = second as u32;
        let read = if flags & VIRTIO_IOMMU_FAULT_F_READ == 0 {
            None
        } else {
            Some(Permissions::READ)
        };
        let write = if flags & VIRTIO_IOMMU_FAULT_F_WRITE == 0 {
            None
        } else {
            Some(Permissions::WRITE)
        };
        let has_address = flags & VIRTIO_IOMMU_FAULT_F_ADDRESS != 0;
        Self {
            reason: match first as u8 {
                VIRTIO_IOMMU_FAULT_R_DOMAIN => FaultReason::Domain,
                VIRTIO_IOMMU_FAULT_R_MAPPING => FaultReason::Mapping,
                other => FaultReason::Unknown(other),
            },
            endpoint: EndpointId::new(endpoint),
            device: endpoint
                .checked_sub(base)
                .and_then(|id| u16::try_from(id).ok())
                .map(RequesterId::new),
            iova: has_address.then(|| Iova::new(address)),
            access: match (read, write) {
                (Some(read), Some(write)) => Some(read.union(write)),
                (read, write) => read.or(write),
            },
            raw,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand from section 5.13.6.9: reason, three reserved bytes, flags; endpoint, four reserved
    /// bytes; address.
    #[test]
    fn golden_events() {
        let address = 0x1234_5678_9abc_d000;
        for (first, second, reason, device, iova, access) in [
            (
                0x0000_0101_0000_0002_u64,
                0x108_u64,
                FaultReason::Mapping,
                Some(8),
                Some(address),
                Some(Permissions::READ),
            ),
            (
                0x0000_0102_0000_0001,
                0x1_00ff,
                FaultReason::Domain,
                Some(0xffff),
                Some(address),
                Some(Permissions::WRITE),
            ),
            (
                0x0000_0003_0000_0000,
                0x1_0100,
                FaultReason::Unknown(0),
                None,
                None,
                Some(Permissions::READ_WRITE),
            ),
            (0xff, 0xff, FaultReason::Unknown(0xff), None, None, None),
        ] {
            let raw = [first, second, address];
            let fault = Fault::decode(raw, 0x100);
            let expected = Fault {
                reason,
                endpoint: EndpointId::new(second as u32),
                device: device.map(RequesterId::new),
                iova: iova.map(Iova::new),
                access,
                raw,
            };
            assert_eq!(fault, expected);
        }
    }
}
