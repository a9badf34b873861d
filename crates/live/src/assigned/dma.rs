//! An assigned device's access to guest memory.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;

use ringfence_types::{Fault, IovaRange, RequesterId};
use vm_memory::GuestMemoryMmap;

use super::hardware::IommuModel;
use super::{AssignedTable, Hardware, HardwareView};
use crate::counters::DeviceCounters;
use crate::dma::{Dma, FaultReporter, MemoryInUse};
use crate::host::Host;

/// Owner of the device's I/O page table.
#[derive(Debug)]
enum TableOwner {
    /// The guest's IOMMU, which receives the stopped accesses.
    Iommu(Arc<dyn FaultReporter>),
    /// The host, which has identity-mapped all guest memory because the guest has no IOMMU
    /// (kvm-baseline, PV01).
    HostIdentity {
        mapped: Box<AssignedTable>,
        ranges: Vec<IovaRange>,
    },
}

/// Memory view of an assigned device.
#[derive(Debug)]
pub struct AssignedDma {
    hardware: Arc<Hardware>,
    device: RequesterId,
    keeper: TableOwner,
    counters: Arc<DeviceCounters>,
}

impl AssignedDma {
    /// Creates the view of `device` whose table an IOMMU owns. `counters` count the unit's work.
    pub(crate) fn with_iommu(
        iommu: Arc<dyn FaultReporter>,
        hardware: &Arc<Hardware>,
        device: RequesterId,
        counters: Arc<DeviceCounters>,
    ) -> Self {
        Self {
            hardware: Arc::clone(hardware),
            device,
            keeper: TableOwner::Iommu(iommu),
            counters,
        }
    }

    /// Creates the view of `device` in a guest without an IOMMU. All guest memory is
    /// identity-mapped for it as soon as the client shares it.
    ///
    /// # Errors
    /// The host has no memory for its tables.
    pub fn identity_mapped(device: RequesterId, counters: Arc<DeviceCounters>) -> io::Result<Self> {
        let hardware = Arc::new(Hardware::new(Arc::new(Host::new(Arc::clone(&counters))?))?);
        let mapped = AssignedTable::new(&hardware, device)?;
        mapped.attach();
        Ok(Self {
            hardware,
            device,
            keeper: TableOwner::HostIdentity {
                mapped: Box::new(mapped),
                ranges: Vec::new(),
            },
            counters,
        })
    }

    fn report_fault(&self, fault: &Fault) {
        match &self.keeper {
            TableOwner::Iommu(iommu) => {
                iommu.report_fault(fault);
            }
            // Without an IOMMU no driver receives the fault.
            TableOwner::HostIdentity { .. } => self.counters.faults.add(1),
        }
    }
}

impl Dma for AssignedDma {
    type View<'a> = HardwareView<'a>;

    fn with<R>(&mut self, access: impl FnOnce(&HardwareView<'_>) -> R) -> R {
        let mut model = self.hardware.model();
        let IommuModel { unit, guest, .. } = &mut *model;
        let before = *unit.stats();
        let view = HardwareView {
            unit: RefCell::new(unit),
            tables: self.hardware.host().memory(),
            rmap: self.hardware.host().rmap(),
            guest,
            device: self.device,
            fault: Cell::new(None),
        };
        let result = access(&view);
        let fault = view.fault.take();
        self.counters.add_unit(&before, model.unit.stats());
        // Release the hardware before taking the IOMMU's lock: its holder may be waiting for this
        // access.
        drop(model);
        if let Some(fault) = fault {
            self.report_fault(&fault);
        }
        result
    }

    /// Follows the guest's memory without an IOMMU; with one, the IOMMU sets the memory.
    fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), MemoryInUse> {
        if let TableOwner::HostIdentity { mapped, ranges } = &mut self.keeper {
            mapped.set_memory(memory);
            *ranges = mapped.follow(ranges, memory);
        }
        Ok(())
    }

    fn is_assigned(&self) -> bool {
        true
    }
}
