//! Guest memory in an endpoint's view; each access holds its own read guard.

use std::sync::Arc;

use ringfence_softiommu::Reader;
use ringfence_types::{Access, Fault, IovaRange, RequesterId};
use vm_memory::GuestMemoryMmap;

use super::recorded_view::RecordedView;
use super::{Dma, MemoryInUse};
use crate::record::DmaRecord;

/// The IOMMU of a device, as the device's accesses reach it.
pub(crate) trait FaultReporter: std::fmt::Debug + Send + Sync {
    /// Reports a stopped access to the driver, once it provides a buffer for the fault.
    fn report_fault(&self, fault: &Fault);

    /// Returns true if the driver has mapped the first byte of `range` for `access`. Reports no
    /// fault.
    fn reaches(&self, device: RequesterId, range: &IovaRange, access: Access) -> bool;
}

/// An endpoint's view of guest memory.
pub struct EndpointMemory {
    iommu: Arc<dyn FaultReporter>,
    device: RequesterId,
    reader: Reader<GuestMemoryMmap>,
    dmas: Arc<DmaRecord>,
}

impl std::fmt::Debug for EndpointMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EndpointMemory({})", self.device)
    }
}

impl EndpointMemory {
    pub(crate) fn new(
        iommu: Arc<dyn FaultReporter>,
        device: RequesterId,
        reader: Reader<GuestMemoryMmap>,
    ) -> Self {
        Self {
            iommu,
            device,
            reader,
            dmas: Arc::default(),
        }
    }

    /// Records the device's DMAs in `dmas` while that record is on.
    pub(crate) fn recorded_in(mut self, dmas: Arc<DmaRecord>) -> Self {
        self.dmas = dmas;
        self
    }

    /// Returns true if the driver has mapped the first byte of `range` for `access`, according to
    /// the IOMMU's own record. Reports no fault.
    pub fn reaches(&self, range: IovaRange, access: Access) -> bool {
        self.iommu.reaches(self.device, &range, access)
    }
}

impl Dma for EndpointMemory {
    type View<'a> = RecordedView<'a>;

    fn with<R>(&mut self, access: impl FnOnce(&RecordedView<'_>) -> R) -> R {
        let mut online = self.reader.online();
        let view = RecordedView::new(online.guard(), &self.dmas, self.device);
        let result = access(&view);
        let fault = view.guard().take_fault();
        // Drop the guard before taking the IOMMU's lock: its holder may be waiting for this reader.
        drop(online);
        if let Some(fault) = fault {
            self.iommu.report_fault(&fault);
        }
        result
    }

    /// Does nothing: the IOMMU sets the guest's memory.
    fn set_memory(&mut self, _memory: &GuestMemoryMmap) -> Result<(), MemoryInUse> {
        Ok(())
    }
}
