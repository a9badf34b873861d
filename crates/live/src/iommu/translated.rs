//! Guest memory as one endpoint sees it: each access under a pin of its own.

use ringfence_softiommu::{Pin, Reader};
use ringfence_types::{Access, Fault, FaultReason, IovaRange};
use ringfence_virtio_iommu::{Denied, DeniedReason, EndpointId};
use vm_memory::GuestMemoryMmap;

use super::Iommu;
use crate::dma::Dma;

/// An endpoint's way to memory.
pub struct Translated {
    iommu: Iommu,
    endpoint: EndpointId,
    reader: Reader<GuestMemoryMmap>,
}

impl std::fmt::Debug for Translated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Translated({})", self.endpoint)
    }
}

impl Translated {
    pub(super) fn new(iommu: Iommu, endpoint: EndpointId, reader: Reader<GuestMemoryMmap>) -> Self {
        Self {
            iommu,
            endpoint,
            reader,
        }
    }

    /// Whether the driver has mapped the first byte of `range` for such an access, by the IOMMU's own record. Nobody is told.
    pub fn reaches(&self, range: IovaRange, access: Access) -> bool {
        let unit = self.iommu.unit();
        unit.translate(self.endpoint, range, access).is_ok()
    }
}

impl Dma for Translated {
    type View<'a> = Pin<'a, GuestMemoryMmap>;

    fn with<R>(&mut self, access: impl FnOnce(&Pin<'_, GuestMemoryMmap>) -> R) -> R {
        let mut online = self.reader.online();
        let pin = online.pin();
        let result = access(&pin);
        let fault = pin.take_fault();
        // Whoever holds the IOMMU may be waiting for this very pin to end.
        drop(online);
        if let Some(fault) = fault {
            self.iommu.report(denied(self.endpoint, &fault));
        }
        result
    }

    /// The guest's memory is the IOMMU's to tell.
    fn set_memory(&mut self, _memory: &GuestMemoryMmap) {}
}

fn denied(endpoint: EndpointId, fault: &Fault) -> Denied {
    Denied {
        endpoint,
        iova: fault.iova,
        access: fault.access,
        reason: match fault.reason {
            FaultReason::Blocked => DeniedReason::Unattached,
            FaultReason::ReadDenied | FaultReason::WriteDenied => DeniedReason::Permission,
            _ => DeniedReason::NotMapped,
        },
    }
}
