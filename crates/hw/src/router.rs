//! Units of two kinds on one machine (HW13): every device is attached to one of them. "We do not
//! propose to entirely replace the baseline IOMMU, only to supplement it" (rIOMMU section 4,
//! "Applicability and Limitations").

use alloc::boxed::Box;
use alloc::vec;

use ringfence_types::{Access, Fault, FaultReason, Iova, PhysMemory, RequesterId};

use crate::{ContextLookup, FaultLog, Iommu, Translation};

/// What stands between devices and memory.
pub trait Translate {
    /// Translates an access of `bytes` bytes at `iova` by `device`.
    ///
    /// # Errors
    /// [`Fault`] with the first address that could not be translated; it has been recorded.
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault>;
}

impl<D: ContextLookup> Translate for Iommu<D> {
    #[inline]
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        Iommu::translate(self, mem, device, iova, bytes, access)
    }
}

/// To which unit of a [`IommuRouter`] a device is wired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IommuKind {
    /// The one that walks tables: disks with slots in any order, RDMA, anything slow.
    Baseline,
    /// The ring unit: devices that work through rings.
    Ring,
}

/// Two units with the devices that are wired to each ("PCIe allows for multiple IOMMUs"). Each unit
/// has its own root table, its own domains, and is sent its own invalidations.
#[derive(Debug)]
pub struct IommuRouter<B, R> {
    /// The unit that walks tables.
    pub baseline: B,
    /// The unit of rings.
    pub ring: R,
    /// By requester.
    routes: Box<[Option<IommuKind>]>,
    faults: FaultLog,
}

impl<B, R> IommuRouter<B, R> {
    /// A machine on which no device is wired to anything. `fault_log`: registers for the faults of
    /// such devices.
    pub fn new(baseline: B, ring: R, fault_log: usize) -> Self {
        const REQUESTERS: usize = 1 << 16;
        Self {
            baseline,
            ring,
            routes: vec![None; REQUESTERS].into_boxed_slice(),
            faults: FaultLog::new(fault_log),
        }
    }

    /// Wires `device` to a unit from now on; returns to which it was. What the other unit has
    /// cached for it stays there until it is invalidated, and can no more be used.
    pub fn attach(&mut self, device: RequesterId, to: IommuKind) -> Option<IommuKind> {
        self.set_route(device, Some(to))
    }

    /// Denies `device` all DMA; returns to which unit it was wired.
    pub fn detach(&mut self, device: RequesterId) -> Option<IommuKind> {
        self.set_route(device, None)
    }

    /// To which unit `device` is wired.
    #[inline]
    pub fn iommu_kind(&self, device: RequesterId) -> Option<IommuKind> {
        self.routes
            .get(usize::from(device.get()))
            .copied()
            .flatten()
    }

    /// Faults of devices that are wired to no unit. Each unit records those of its own devices.
    pub fn faults(&mut self) -> &mut FaultLog {
        &mut self.faults
    }

    fn set_route(&mut self, device: RequesterId, to: Option<IommuKind>) -> Option<IommuKind> {
        let slot = self.routes.get_mut(usize::from(device.get()))?;
        core::mem::replace(slot, to)
    }
}

impl<B: Translate, R: Translate> Translate for IommuRouter<B, R> {
    #[inline]
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        match self.iommu_kind(device) {
            Some(IommuKind::Baseline) => self.baseline.translate(mem, device, iova, bytes, access),
            Some(IommuKind::Ring) => self.ring.translate(mem, device, iova, bytes, access),
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
