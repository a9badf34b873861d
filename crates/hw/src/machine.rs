//! Units of two kinds on one machine (HW13): every device is attached to one of them. "We do not propose to entirely replace the
//! baseline IOMMU, only to supplement it" (rIOMMU section 4, "Applicability and Limitations").

use alloc::boxed::Box;
use alloc::vec;

use ringfence_types::{Access, DeviceId, Fault, FaultReason, Iova, PhysMemory};

use crate::{Directory, FaultLog, Iommu, Translation};

/// What stands between devices and memory.
pub trait Translate {
    /// Translates an access of `bytes` bytes at `iova` by `device`.
    ///
    /// # Errors
    /// [`Fault`] with the first address that could not be translated; it has been recorded.
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: DeviceId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault>;
}

impl<D: Directory> Translate for Iommu<D> {
    #[inline]
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: DeviceId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        Iommu::translate(self, mem, device, iova, bytes, access)
    }
}

/// To which unit of a [`Machine`] a device is wired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wiring {
    /// The one that walks tables: disks with slots in any order, RDMA, anything slow.
    Baseline,
    /// The ring unit: devices that work through rings.
    Ring,
}

/// Two units with the devices that are wired to each ("PCIe allows for multiple IOMMUs"). Each unit has its own root table, its own
/// domains, and is sent its own invalidations.
#[derive(Debug)]
pub struct Machine<B, R> {
    /// The unit that walks tables.
    pub baseline: B,
    /// The unit of rings.
    pub ring: R,
    /// By requester.
    wiring: Box<[Option<Wiring>]>,
    faults: FaultLog,
}

impl<B, R> Machine<B, R> {
    /// A machine on which no device is wired to anything. `fault_log`: registers for the faults of such devices.
    pub fn new(baseline: B, ring: R, fault_log: usize) -> Self {
        const REQUESTERS: usize = 1 << 16;
        Self {
            baseline,
            ring,
            wiring: vec![None; REQUESTERS].into_boxed_slice(),
            faults: FaultLog::new(fault_log),
        }
    }

    /// Wires `device` to a unit from now on; returns to which it was. What the other unit has cached for it stays there until it is
    /// invalidated, and can no more be used.
    pub fn attach(&mut self, device: DeviceId, to: Wiring) -> Option<Wiring> {
        self.rewire(device, Some(to))
    }

    /// Denies `device` all DMA; returns to which unit it was wired.
    pub fn detach(&mut self, device: DeviceId) -> Option<Wiring> {
        self.rewire(device, None)
    }

    /// To which unit `device` is wired.
    #[inline]
    pub fn wiring(&self, device: DeviceId) -> Option<Wiring> {
        self.wiring
            .get(usize::from(device.get()))
            .copied()
            .flatten()
    }

    /// Faults of devices that are wired to no unit. Each unit records those of its own devices.
    pub fn faults(&mut self) -> &mut FaultLog {
        &mut self.faults
    }

    fn rewire(&mut self, device: DeviceId, to: Option<Wiring>) -> Option<Wiring> {
        let slot = self.wiring.get_mut(usize::from(device.get()))?;
        core::mem::replace(slot, to)
    }
}

impl<B: Translate, R: Translate> Translate for Machine<B, R> {
    #[inline]
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: DeviceId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        match self.wiring(device) {
            Some(Wiring::Baseline) => self.baseline.translate(mem, device, iova, bytes, access),
            Some(Wiring::Ring) => self.ring.translate(mem, device, iova, bytes, access),
            None => {
                let fault = Fault {
                    device,
                    iova,
                    access,
                    reason: FaultReason::Blocked,
                };
                self.faults.record(&fault);
                Err(fault)
            }
        }
    }
}
