//! Where a request takes effect: a domain of the software IOMMU for each device, and the grants of
//! a device that is a process of its own.
//!
//! Whether a process keeps the rules is no business of the guest's driver: its requests succeed,
//! and a process that breaks one is dead, reaches nothing, and its device asks to be reset.

use std::collections::BTreeMap;
use std::sync::Arc;

use ringfence_pviommu::backend::{DeviceSlot, IoError, IoTables};
use ringfence_pviommu::wire::PAGE_BYTES;
use ringfence_softiommu::{IommuError, MapReason, Reader, SoftIommu, SoftIommuLimits};
use ringfence_types::{Direction, DomainId, Iova, IovaRange, PhysAddr, RequesterId};
use vm_memory::GuestMemoryMmap;

use crate::host::FrameRmap;
use crate::sandbox::{GrantError, Grants};

/// Each device's domain. What is unmapped stays until it is settled, so that one wait does for all
/// of a request.
pub(super) struct Domains {
    iommu: SoftIommu<GuestMemoryMmap>,
    /// Of devices that are processes.
    sandboxed: BTreeMap<DeviceSlot, Grants>,
    leaving: Vec<(DeviceSlot, Iova)>,
    /// Where frames of the host lead.
    places: Arc<FrameRmap>,
}

fn domain_of(device: DeviceSlot) -> DomainId {
    DomainId::new(u16::try_from(device.index()).unwrap_or(u16::MAX))
}

impl Domains {
    /// Those of `devices`, in the order of their ids; nobody is attached. What is mapped are frames
    /// whose pages `places` knows.
    pub(super) fn new(devices: &[RequesterId], places: Arc<FrameRmap>) -> Result<Self, IommuError> {
        let mut iommu = SoftIommu::new(SoftIommuLimits::default(), GuestMemoryMmap::default());
        for (device, number) in devices.iter().zip(0..) {
            iommu.add_endpoint(*device)?;
            iommu.create_domain(DomainId::new(number))?;
        }
        Ok(Self {
            iommu,
            sandboxed: BTreeMap::new(),
            leaving: Vec::new(),
            places,
        })
    }

    pub(super) fn reader(
        &mut self,
        device: RequesterId,
    ) -> Result<Reader<GuestMemoryMmap>, IommuError> {
        self.iommu.reader(device)
    }

    /// The device is a process. False if it was one before.
    pub(super) fn set_apart(&mut self, device: DeviceSlot, grants: Grants) -> bool {
        let free = !self.sandboxed.contains_key(&device);
        if free {
            self.sandboxed.insert(device, grants);
        }
        free
    }

    pub(super) fn grants(&mut self, device: DeviceSlot) -> Option<&mut Grants> {
        self.sandboxed.get_mut(&device)
    }

    /// When it returns, no device holds anything of the memory before; a process that hangs in the
    /// kernel keeps the memory's pages, which are nobody else's by that.
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        // Whoever calls is no reader, so it is not refused.
        let _ = self.iommu.set_memory(memory.clone());
        for grants in self.sandboxed.values_mut() {
            let _ = grants.set_memory(memory);
        }
    }

    /// Each device reaches what its domain maps. A process is granted nothing else at any time.
    pub(super) fn attach(&mut self, devices: &[RequesterId]) {
        for (device, number) in devices.iter().zip(0..) {
            // Both are there, and whoever calls is no reader.
            let _ = self.iommu.attach(*device, DomainId::new(number));
        }
    }

    /// No device reaches anything, but processes what they are granted.
    pub(super) fn detach(&mut self, devices: &[RequesterId]) {
        for device in devices {
            let _ = self.iommu.detach(*device);
        }
    }

    /// Nothing is mapped any more: processes lose their tables.
    pub(super) fn clear(&mut self) {
        for grants in self.sandboxed.values_mut() {
            grants.unmap_all();
            let _ = grants.commit();
        }
    }

    /// Where the bytes of a frame are in the memory that the domains translate to: GPA to HPA was
    /// the second stage's, HPA to HVA is the reverse array's and the mapping's (PVIOMMU section
    /// 4.2).
    fn address_of(&self, frame: PhysAddr) -> Result<PhysAddr, IoError> {
        let page = self.places.page(frame).ok_or(IoError::Failed)?;
        Ok(PhysAddr::new(page.get()))
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
        // Put back what has not left yet.
        let waiting = self.leaving.iter().position(|one| *one == (device, giova));
        if let Some(at) = waiting {
            self.leaving.swap_remove(at);
            return Ok(());
        }
        let range = IovaRange::new(giova, PAGE_BYTES).ok_or(IoError::Failed)?;
        let memory = self.address_of(frame)?;
        let permissions = direction.permissions();
        let mut apart = self.sandboxed.get_mut(&device);
        if let Some(grants) = &mut apart {
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
                MapReason::OutOfTables => IoError::NoRoom,
                _ => IoError::Failed,
            })
        });
        if let (Err(_), Some(grants)) = (mapped, apart) {
            grants.unmap(giova);
        }
        mapped
    }

    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError> {
        self.leaving.push((device, giova));
        Ok(())
    }

    fn commit(&mut self, device: DeviceSlot) -> Result<(), IoError> {
        let of_device = |(slot, _): &&(DeviceSlot, Iova)| *slot == device;
        let pages = self.leaving.iter().filter(of_device);
        let ranges = pages.filter_map(|(_, giova)| IovaRange::new(*giova, PAGE_BYTES));
        let domain = self.iommu.domain(domain_of(device));
        let mut domain = domain.map_err(|_| IoError::Failed)?;
        domain.unmap_all(ranges).map_err(|_| IoError::Failed)?;
        let Self {
            sandboxed: apart,
            leaving,
            ..
        } = self;
        let mut apart = apart.get_mut(&device);
        leaving.retain(|one| {
            let left = one.0 == device;
            if let (true, Some(grants)) = (left, &mut apart) {
                grants.unmap(one.1);
            }
            !left
        });
        // A page is answered for when it is gone from the process, or the process is. One that
        // hangs in the kernel holds the answer back.
        apart
            .map_or(Ok(()), Grants::commit)
            .map_err(|_| IoError::Failed)
    }
}
