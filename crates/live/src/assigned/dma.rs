//! An assigned device's way to memory.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::Arc;

use ringfence_types::{DeviceId, Fault, IovaRange};
use vm_memory::GuestMemoryMmap;

use super::hardware::Silicon;
use super::{Hardware, HardwareView, Mapped};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::handover::{DiskKind, Own, Unmovable};
use crate::host::Host;
use crate::iommu::{Behind, reason};

/// Who keeps the device's table.
#[derive(Debug)]
enum Keeper {
    /// The IOMMU that the guest has, which is told of stopped accesses.
    Iommu(Behind),
    /// The host has mapped all of the guest, at its own addresses: there is no IOMMU for the guest (kvm-baseline, PV01).
    Whole {
        mapped: Box<Mapped>,
        ranges: Vec<IovaRange>,
    },
}

/// What the accesses of an assigned device go through.
#[derive(Debug)]
pub struct AssignedDma {
    hardware: Arc<Hardware>,
    device: DeviceId,
    keeper: Keeper,
    counters: Arc<DeviceCounters>,
}

impl AssignedDma {
    /// For `device`, whose table an IOMMU keeps. What the unit does is counted by `counters`.
    pub(crate) fn behind(
        iommu: Behind,
        hardware: &Arc<Hardware>,
        device: DeviceId,
        counters: Arc<DeviceCounters>,
    ) -> Self {
        Self {
            hardware: Arc::clone(hardware),
            device,
            keeper: Keeper::Iommu(iommu),
            counters,
        }
    }

    /// For `device` of a guest without an IOMMU: all memory of the guest is mapped for it, at the guest's own addresses, as soon as there is some.
    ///
    /// # Errors
    /// The host has no memory for its tables.
    pub fn whole(device: DeviceId, counters: Arc<DeviceCounters>) -> io::Result<Self> {
        let hardware = Arc::new(Hardware::new(Arc::new(Host::new(Arc::clone(&counters))?))?);
        let mapped = Mapped::new(&hardware, device)?;
        mapped.attach();
        Ok(Self {
            hardware,
            device,
            keeper: Keeper::Whole {
                mapped: Box::new(mapped),
                ranges: Vec::new(),
            },
            counters,
        })
    }

    fn tell(&self, fault: &Fault) {
        match &self.keeper {
            Keeper::Iommu(iommu) => {
                iommu.report(self.device, fault.iova, fault.access, reason(fault));
            }
            // There is nobody to be told.
            Keeper::Whole { .. } => self.counters.faults.add(1),
        }
    }
}

impl Dma for AssignedDma {
    type View<'a> = HardwareView<'a>;

    fn with<R>(&mut self, access: impl FnOnce(&HardwareView<'_>) -> R) -> R {
        let mut silicon = self.hardware.silicon();
        let Silicon { unit, guest, .. } = &mut *silicon;
        let before = *unit.stats();
        let view = HardwareView {
            unit: RefCell::new(unit),
            tables: self.hardware.host().memory(),
            places: self.hardware.host().places(),
            guest,
            device: self.device,
            fault: Cell::new(None),
        };
        let result = access(&view);
        let fault = view.fault.take();
        self.counters.add_unit(&before, silicon.unit.stats());
        // Whoever holds the IOMMU may be waiting for this very access to end.
        drop(silicon);
        if let Some(fault) = fault {
            self.tell(&fault);
        }
        result
    }

    /// Where there is an IOMMU the guest's memory is its to tell.
    fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        if let Keeper::Whole { mapped, ranges } = &mut self.keeper {
            mapped.set_memory(memory);
            *ranges = mapped.follow(ranges, memory);
        }
    }

    fn hand_over(&self, mut device: Own) -> Result<Own, Unmovable> {
        match &mut device {
            Own::Blk { kind, .. } => *kind = DiskKind::Assigned,
            _ => return Err(Unmovable::Keeps("a device that the hardware translates")),
        }
        Ok(device)
    }
}
