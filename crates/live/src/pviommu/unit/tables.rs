//! I/O page tables of simulated devices: a domain of the software IOMMU for each device, and the
//! grants of a sandboxed device.
//!
//! A protocol violation by a sandboxed process does not affect the guest driver's requests, which
//! succeed. The violating process is killed, so it accesses nothing more, and its device requests a
//! reset.

use std::collections::BTreeMap;
use std::sync::Arc;

use ringfence_pviommu::backend::{DeviceSlot, IoError, IoTables, TablesHandle};
use ringfence_pviommu::wire::PAGE_BYTES;
use ringfence_softiommu::{DomainMapReason, IommuError, Reader, SoftIommu, SoftIommuLimits};
use ringfence_types::{Direction, DomainId, Iova, IovaRange, PhysAddr, RequesterId};
use vm_memory::GuestMemoryMmap;

use crate::grants::{GrantError, Grants, StuckProcess};
use crate::host::FrameRmap;

/// The domain of each device. Unmapped pages stay until commit, so that one wait covers a whole
/// request.
pub(super) struct Domains {
    iommu: SoftIommu<GuestMemoryMmap>,
    /// Grants of sandboxed devices.
    sandboxed: BTreeMap<DeviceSlot, Grants>,
    unmapping: Vec<(DeviceSlot, Iova)>,
    /// Guest pages behind host frames.
    rmap: Arc<FrameRmap>,
}

fn domain_of(device: DeviceSlot) -> DomainId {
    DomainId::new(u16::try_from(device.index()).unwrap_or(u16::MAX))
}

impl Domains {
    /// Creates a domain for each of `devices`, in the order of their requester IDs; no device is
    /// attached. `rmap` must know the page of every frame that is mapped.
    pub(super) fn new(devices: &[RequesterId], rmap: Arc<FrameRmap>) -> Result<Self, IommuError> {
        let mut iommu = SoftIommu::new(SoftIommuLimits::default(), GuestMemoryMmap::default());
        for (device, number) in devices.iter().zip(0..) {
            iommu.add_endpoint(*device)?;
            iommu.create_domain(DomainId::new(number))?;
        }
        Ok(Self {
            iommu,
            sandboxed: BTreeMap::new(),
            unmapping: Vec::new(),
            rmap,
        })
    }

    pub(super) fn reader(
        &mut self,
        device: RequesterId,
    ) -> Result<Reader<GuestMemoryMmap>, IommuError> {
        self.iommu.reader(device)
    }

    /// Declares that a sandboxed process implements the device. Returns false if one does already.
    pub(super) fn set_sandboxed(&mut self, device: DeviceSlot, grants: Grants) -> bool {
        let free = !self.sandboxed.contains_key(&device);
        if free {
            self.sandboxed.insert(device, grants);
        }
        free
    }

    pub(super) fn grants(&mut self, device: DeviceSlot) -> Option<&mut Grants> {
        self.sandboxed.get_mut(&device)
    }

    /// Replaces the guest's memory for every device, even after a failure. When it returns `Ok`, no
    /// device holds any of the old memory.
    ///
    /// # Errors
    /// As for [`Grants::set_memory`].
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), StuckProcess> {
        // The call fails only for a reader, and the caller is not one.
        let _ = self.iommu.set_memory(memory.clone());
        let processes = self.sandboxed.values_mut();
        let set = processes.map(|grants| grants.set_memory(memory));
        set.fold(Ok(()), Result::and)
    }

    /// Attaches each device to its domain. A sandboxed process has its grants at any time.
    pub(super) fn attach(&mut self, devices: &[RequesterId]) {
        for (device, number) in devices.iter().zip(0..) {
            // Device and domain exist, and the caller is not a reader.
            let _ = self.iommu.attach(*device, DomainId::new(number));
        }
    }

    /// Detaches all devices. Sandboxed processes keep their grants.
    pub(super) fn detach(&mut self, devices: &[RequesterId]) {
        for device in devices {
            let _ = self.iommu.detach(*device);
        }
    }

    /// Removes all grants of every sandboxed process, even after a failure.
    ///
    /// # Errors
    /// As for [`Grants::commit`].
    pub(super) fn clear(&mut self) -> Result<(), StuckProcess> {
        let cleared = self.sandboxed.values_mut().map(|grants| {
            grants.unmap_all();
            grants.commit()
        });
        cleared.fold(Ok(()), Result::and)
    }

    /// Commits the grants of every sandboxed process, even after a failure.
    ///
    /// # Errors
    /// As for [`Grants::commit`].
    pub(super) fn commit_grants(&mut self) -> Result<(), StuckProcess> {
        let committed = self.sandboxed.values_mut().map(Grants::commit);
        committed.fold(Ok(()), Result::and)
    }

    /// Returns the address of a frame's bytes in the memory that the domains translate to. The
    /// second stage mapped GPA to HPA; the reverse map and the memory mapping lead from HPA to HVA
    /// (PVIOMMU section 4.2).
    fn address_of(&self, frame: PhysAddr) -> Result<PhysAddr, IoError> {
        let page = self.rmap.page(frame).ok_or(IoError::Failed)?;
        Ok(PhysAddr::new(page.get()))
    }
}

impl TablesHandle for Domains {
    type Handle<'t> = &'t mut Self;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl IoTables for Domains {
    fn map(
        &mut self,
        device: DeviceSlot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        // Restore an entry that is not yet removed.
        let waiting = self
            .unmapping
            .iter()
            .position(|one| *one == (device, giova));
        if let Some(at) = waiting {
            self.unmapping.swap_remove(at);
            return Ok(());
        }
        let range = IovaRange::new(giova, PAGE_BYTES).ok_or(IoError::Failed)?;
        let memory = self.address_of(frame)?;
        let permissions = direction.permissions();
        let mut sandboxed = self.sandboxed.get_mut(&device);
        if let Some(grants) = &mut sandboxed {
            let granted = grants.map(range, memory, permissions);
            granted.map_err(|error| match error {
                GrantError::NoRoom => IoError::NoRoom,
                GrantError::Unfit => IoError::Failed,
            })?;
        }
        let domain = self.iommu.domain(domain_of(device));
        let mapped = domain.map_err(|_| IoError::Failed).and_then(|mut domain| {
            let mapped = domain.map(range, memory, permissions);
            mapped.map_err(|error| match error.reason {
                DomainMapReason::OutOfTables => IoError::NoRoom,
                _ => IoError::Failed,
            })
        });
        if let (Err(_), Some(grants)) = (mapped, sandboxed) {
            grants.unmap(giova);
        }
        mapped
    }

    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError> {
        self.unmapping.push((device, giova));
        Ok(())
    }

    fn commit(&mut self, device: DeviceSlot) -> Result<(), IoError> {
        let of_device = |(slot, _): &&(DeviceSlot, Iova)| *slot == device;
        let pages = self.unmapping.iter().filter(of_device);
        let ranges = pages.filter_map(|(_, giova)| IovaRange::new(*giova, PAGE_BYTES));
        let domain = self.iommu.domain(domain_of(device));
        let mut domain = domain.map_err(|_| IoError::Failed)?;
        domain.unmap_all(ranges).map_err(|_| IoError::Failed)?;
        let Self {
            sandboxed,
            unmapping,
            ..
        } = self;
        let mut sandboxed = sandboxed.get_mut(&device);
        unmapping.retain(|one| {
            let left = one.0 == device;
            if let (true, Some(grants)) = (left, &mut sandboxed) {
                grants.unmap(one.1);
            }
            !left
        });
        // The reply waits until the process has lost the page or has died. A process stuck in the
        // kernel delays the reply.
        sandboxed
            .map_or(Ok(()), Grants::commit)
            .map_err(|_| IoError::Failed)
    }
}
