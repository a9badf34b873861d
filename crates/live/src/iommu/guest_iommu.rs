//! The kinds of IOMMU that a device can have.

use std::io;
use std::sync::Arc;

use ringfence_types::{Fault, RequesterId};

use super::{AddError, VirtioIommu};
use crate::assigned::AssignedDma;
use crate::counters::DeviceCounters;
use crate::dma::{EndpointMemory, FaultReporter};
use crate::grants::Grants;
use crate::pviommu::PvIommu;
use crate::riommu::{RingDma, RingIommu};

/// An IOMMU of the guest. Clones share it.
#[derive(Clone, Debug)]
pub enum GuestIommu {
    /// A virtio-iommu, as in the virtio specification.
    Virtio(VirtioIommu),
    /// The para-virtual IOMMU.
    Para(PvIommu),
    /// The ring IOMMU. Its devices are emulated.
    Ring(RingIommu),
}

/// An endpoint's view of guest memory.
#[derive(Debug)]
pub enum EndpointDma {
    /// The software IOMMU translates.
    Software(Box<EndpointMemory>),
    /// The ring IOMMU translates.
    Ring(RingDma),
}

impl GuestIommu {
    /// Adds an endpoint under its requester ID and returns its view of guest memory. The
    /// para-virtual and the ring IOMMU must already know the device.
    ///
    /// # Errors
    /// The endpoint exists already or is unknown, or there are too many.
    pub fn add_endpoint(
        &self,
        device: RequesterId,
        counters: &Arc<DeviceCounters>,
    ) -> Result<EndpointDma, AddError> {
        let software = |memory| EndpointDma::Software(Box::new(memory));
        match self {
            Self::Virtio(iommu) => iommu.add_endpoint(device).map(software),
            Self::Para(iommu) => iommu.reader(device).map_err(AddError::Unit).map(software),
            Self::Ring(iommu) => {
                let dma = iommu.endpoint(device, Arc::clone(counters));
                dma.map(EndpointDma::Ring).ok_or(AddError::Unlisted(device))
            }
        }
    }

    /// Adds an endpoint whose accesses the hardware model translates. The para-virtual IOMMU must
    /// already know it as an assigned device.
    ///
    /// # Errors
    /// The endpoint exists already or is another kind of device, or there are too many.
    pub fn assign(
        &self,
        device: RequesterId,
        counters: Arc<DeviceCounters>,
    ) -> io::Result<AssignedDma> {
        match self {
            Self::Virtio(iommu) => iommu.assign(device, counters),
            Self::Para(iommu) => iommu.assigned(device, counters),
            Self::Ring(_) => Err(io::Error::other(AddError::Ring(device))),
        }
    }

    /// Adds a further reader of guest memory to an existing endpoint.
    ///
    /// # Errors
    /// The endpoint does not exist, or has too many readers.
    pub fn add_reader(&self, device: RequesterId) -> Result<EndpointMemory, AddError> {
        match self {
            Self::Virtio(iommu) => iommu.add_reader(device),
            Self::Para(iommu) => iommu.reader(device).map_err(AddError::Unit),
            Self::Ring(_) => Err(AddError::Ring(device)),
        }
    }

    /// Declares that a sandboxed process with these grants implements the device. Call it before
    /// adding the endpoint.
    ///
    /// # Errors
    /// The para-virtual IOMMU does not know such a device, or already has its grants.
    pub fn set_sandboxed(&self, device: RequesterId, grants: Grants) -> Result<(), AddError> {
        match self {
            Self::Virtio(iommu) => iommu.set_sandboxed(device, grants),
            Self::Para(iommu) if iommu.set_sandboxed(device, grants) => {}
            Self::Para(_) | Self::Ring(_) => return Err(AddError::Sandboxed(device)),
        }
        Ok(())
    }

    /// Calls `with` on the grants of a sandboxed device. `None` if the device is not sandboxed.
    pub fn with_grants<R>(
        &self,
        device: RequesterId,
        with: impl FnOnce(&mut Grants) -> R,
    ) -> Option<R> {
        match self {
            Self::Virtio(iommu) => iommu.with_grants(device, with),
            Self::Para(iommu) => iommu.with_grants(device, with),
            Self::Ring(_) => None,
        }
    }

    /// Reports a stopped access to the driver, once it provides a buffer for the fault.
    pub(crate) fn report_fault(&self, fault: &Fault) {
        match self {
            Self::Virtio(iommu) => iommu.report_fault(fault),
            Self::Para(iommu) => iommu.report_fault(fault),
            // The unit has written the fault to its queue.
            Self::Ring(_) => {}
        }
    }
}
