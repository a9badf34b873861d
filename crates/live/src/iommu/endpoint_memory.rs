//! Guest memory in an endpoint's view; each access holds its own read guard.

use ringfence_softiommu::{ReadGuard, Reader};
use ringfence_types::{Access, Fault, FaultReason, IovaRange, RequesterId};
use ringfence_virtio_iommu::{EndpointId, TranslationFaultReason};
use vm_memory::GuestMemoryMmap;

use super::GuestIommu;
use crate::dma::Dma;

/// An endpoint's view of guest memory.
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

    /// Returns true if the driver has mapped the first byte of `range` for `access`, according to
    /// the IOMMU's own record. Reports no fault.
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
        // Drop the guard before taking the IOMMU's lock: its holder may be waiting for this reader.
        drop(online);
        if let Some(fault) = fault {
            let reason = reason(&fault);
            self.iommu
                .report(self.device, fault.iova, fault.access, reason);
        }
        result
    }

    /// Does nothing: the IOMMU sets the guest's memory.
    fn set_memory(&mut self, _memory: &GuestMemoryMmap) {}
}

/// Returns the endpoint ID in the VIOT table.
fn endpoint(device: RequesterId) -> EndpointId {
    EndpointId::new(device.get().into())
}

/// Returns the fault reason that the driver receives.
pub(crate) fn reason(fault: &Fault) -> TranslationFaultReason {
    match fault.reason {
        FaultReason::Blocked | FaultReason::RootNotPresent | FaultReason::ContextNotPresent => {
            TranslationFaultReason::Unattached
        }
        FaultReason::ReadDenied | FaultReason::WriteDenied => TranslationFaultReason::Permission,
        _ => TranslationFaultReason::NotMapped,
    }
}
