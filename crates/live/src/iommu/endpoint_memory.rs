//! Guest memory as one endpoint sees it: each access under a pin of its own.

use ringfence_softiommu::{ReadGuard, Reader};
use ringfence_types::{Access, Fault, FaultReason, IovaRange, RequesterId};
use ringfence_virtio_iommu::{EndpointId, TranslationFaultReason};
use vm_memory::GuestMemoryMmap;

use super::GuestIommu;
use crate::dma::Dma;

/// An endpoint's way to memory.
pub struct EndpointMemory {
    iommu: GuestIommu,
    device: RequesterId,
    reader: Reader<GuestMemoryMmap>,
}

impl std::fmt::Debug for EndpointMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EndpointMemory({})", self.device)
    }
}

impl EndpointMemory {
    pub(crate) fn new(
        iommu: GuestIommu,
        device: RequesterId,
        reader: Reader<GuestMemoryMmap>,
    ) -> Self {
        Self {
            iommu,
            device,
            reader,
        }
    }

    /// Whether the driver has mapped the first byte of `range` for such an access, by the IOMMU's
    /// own record. Nobody is told.
    pub fn reaches(&self, range: IovaRange, access: Access) -> bool {
        match &self.iommu {
            GuestIommu::Virtio(iommu) => {
                let endpoint = endpoint(self.device);
                iommu.unit().translate(endpoint, range, access).is_ok()
            }
            GuestIommu::Para(iommu) => iommu.reaches(self.device, &range, access),
        }
    }
}

impl Dma for EndpointMemory {
    type View<'a> = ReadGuard<'a, GuestMemoryMmap>;

    fn with<R>(&mut self, access: impl FnOnce(&ReadGuard<'_, GuestMemoryMmap>) -> R) -> R {
        let mut online = self.reader.online();
        let pin = online.guard();
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
fn endpoint(device: RequesterId) -> EndpointId {
    EndpointId::new(device.get().into())
}

/// What the driver is told of a stopped access.
pub(crate) fn reason(fault: &Fault) -> TranslationFaultReason {
    match fault.reason {
        FaultReason::Blocked | FaultReason::RootNotPresent | FaultReason::ContextNotPresent => {
            TranslationFaultReason::Unattached
        }
        FaultReason::ReadDenied | FaultReason::WriteDenied => TranslationFaultReason::Permission,
        _ => TranslationFaultReason::NotMapped,
    }
}
