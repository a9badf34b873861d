//! Two kinds of IOMMU in one machine. Each device is attached to one of them. "We do not
//! propose to entirely replace the baseline IOMMU, only to supplement it" (rIOMMU section 4,
//! "Applicability and Limitations").

use alloc::boxed::Box;
use alloc::vec;

use ringfence_types::{Access, Fault, FaultReason, Iova, PhysMemory, RequesterId};

use crate::{DmaUsage, FaultLog, Translate, Translation};

/// The unit of an [`IommuRouter`] that a device is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IommuKind {
    /// The unit that walks page tables: for disks that use slots in any order, for RDMA, and for
    /// slow devices.
    Baseline,
    /// The ring unit: for devices that access memory through rings.
    Ring,
}

/// Two units and the routing of devices to them ("PCIe allows for multiple IOMMUs"). Each unit has
/// its own root table, domains and invalidation interface.
#[derive(Debug)]
pub struct IommuRouter<B, R> {
    /// The unit that walks page tables.
    pub baseline: B,
    /// The ring unit.
    pub ring: R,
    /// Unit of each device, indexed by requester ID.
    routes: Box<[Option<IommuKind>]>,
    faults: FaultLog,
}

impl<B, R> IommuRouter<B, R> {
    /// Creates a router with no device attached. `fault_log` is the number of fault recording
    /// registers for unattached devices.
    pub fn new(baseline: B, ring: R, fault_log: usize) -> Self {
        const REQUESTERS: usize = 1 << 16;
        Self {
            baseline,
            ring,
            routes: vec![None; REQUESTERS].into_boxed_slice(),
            faults: FaultLog::new(fault_log),
        }
    }

    /// Attaches `device` to a unit and returns its previous one. The previous unit keeps its cached
    /// entries for the device until they are invalidated, but cannot use them.
    pub fn attach(&mut self, device: RequesterId, to: IommuKind) -> Option<IommuKind> {
        self.set_route(device, Some(to))
    }

    /// Attaches `device` to the unit that [`IommuKind::for_device`] selects, and returns that unit.
    pub fn attach_by_usage(&mut self, device: RequesterId, usage: &DmaUsage) -> IommuKind {
        let kind = IommuKind::for_device(usage);
        self.attach(device, kind);
        kind
    }

    /// Detaches `device`, which denies it all DMA. Returns its previous unit.
    pub fn detach(&mut self, device: RequesterId) -> Option<IommuKind> {
        self.set_route(device, None)
    }

    /// Returns the unit that `device` is attached to; `None` if unattached.
    #[inline]
    pub fn iommu_kind(&self, device: RequesterId) -> Option<IommuKind> {
        self.routes
            .get(usize::from(device.get()))
            .copied()
            .flatten()
    }

    /// Returns the faults of unattached devices. Each unit records the faults of its own devices.
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
