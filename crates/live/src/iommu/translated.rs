//! Guest memory as one endpoint sees it: each access under a pin of its own.

use ringfence_softiommu::{Pin, Reader};
use ringfence_types::{Access, DeviceId, Fault, FaultReason, IovaRange};
use ringfence_virtio_iommu::{DeniedReason, EndpointId};
use vm_memory::GuestMemoryMmap;

use super::Behind;
use crate::dma::Dma;

/// An endpoint's way to memory.
pub struct Translated {
    iommu: Behind,
    device: DeviceId,
    reader: Reader<GuestMemoryMmap>,
}

impl std::fmt::Debug for Translated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Translated({})", self.device)
    }
}

impl Translated {
    pub(crate) fn new(iommu: Behind, device: DeviceId, reader: Reader<GuestMemoryMmap>) -> Self {
        Self {
            iommu,
            device,
            reader,
        }
    }

    /// Whether the driver has mapped the first byte of `range` for such an access, by the IOMMU's own record. Nobody is told.
    pub fn reaches(&self, range: IovaRange, access: Access) -> bool {
        match &self.iommu {
            Behind::Virtio(iommu) => {
                let endpoint = endpoint(self.device);
                iommu.unit().translate(endpoint, range, access).is_ok()
            }
            Behind::Para(iommu) => iommu.reaches(self.device, &range, access),
        }
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
            let reason = reason(&fault);
            self.iommu
                .report(self.device, fault.iova, fault.access, reason);
        }
        result
    }

    /// The guest's memory is the IOMMU's to tell.
    fn set_memory(&mut self, _memory: &GuestMemoryMmap) {}
}

/// The number by which VIOT names it.
fn endpoint(device: DeviceId) -> EndpointId {
    EndpointId::new(device.get().into())
}

/// What the driver is told of a stopped access.
pub(crate) fn reason(fault: &Fault) -> DeniedReason {
    match fault.reason {
        FaultReason::Blocked | FaultReason::RootNotPresent | FaultReason::ContextNotPresent => {
            DeniedReason::Unattached
        }
        FaultReason::ReadDenied | FaultReason::WriteDenied => DeniedReason::Permission,
        _ => DeniedReason::NotMapped,
    }
}
