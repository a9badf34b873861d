//! Which of the two IOMMUs a device stands behind.

use std::io;
use std::sync::Arc;

use ringfence_types::{Access, Iova, RequesterId};
use ringfence_virtio_iommu::{EndpointId, TranslationFault, TranslationFaultReason};

use super::{AddError, EndpointMemory, VirtioIommu};
use crate::assigned::AssignedDma;
use crate::counters::DeviceCounters;
use crate::pviommu::PvIommu;
use crate::sandbox::Grants;

/// An IOMMU. Clones are the same one.
#[derive(Clone, Debug)]
pub enum GuestIommu {
    /// The virtio-iommu.
    Virtio(VirtioIommu),
    /// The para-virtual one.
    Para(PvIommu),
}

impl GuestIommu {
    /// Adds an endpoint under its requester id; the para-virtual IOMMU was told of it before. What
    /// its accesses go through.
    ///
    /// # Errors
    /// If it is there already, or one too many.
    pub fn add_endpoint(&self, device: RequesterId) -> Result<EndpointMemory, AddError> {
        match self {
            Self::Virtio(iommu) => iommu.add_endpoint(device),
            Self::Para(iommu) => iommu.reader(device).map_err(AddError::Unit),
        }
    }

    /// Adds an endpoint that the model of the hardware translates; the para-virtual IOMMU was told
    /// of it as an assigned one before. What its accesses go through.
    ///
    /// # Errors
    /// If it is there already, one too many, or was told of as another kind of device.
    pub fn assign(
        &self,
        device: RequesterId,
        counters: Arc<DeviceCounters>,
    ) -> io::Result<AssignedDma> {
        match self {
            Self::Virtio(iommu) => iommu.assign(device, counters),
            Self::Para(iommu) => iommu.assigned(device, counters),
        }
    }

    /// Another way to memory of an endpoint that is there already.
    ///
    /// # Errors
    /// If it is not, or has too many.
    pub fn add_reader(&self, device: RequesterId) -> Result<EndpointMemory, AddError> {
        match self {
            Self::Virtio(iommu) => iommu.add_reader(device),
            Self::Para(iommu) => iommu.reader(device).map_err(AddError::Unit),
        }
    }

    /// The device of an endpoint that is yet to be added is the process that has these grants.
    ///
    /// # Errors
    /// The para-virtual IOMMU was not told of such a device, or was told of its process already.
    pub fn set_sandboxed(&self, device: RequesterId, grants: Grants) -> Result<(), AddError> {
        match self {
            Self::Virtio(iommu) => iommu.set_sandboxed(device, grants),
            Self::Para(iommu) if iommu.set_sandboxed(device, grants) => {}
            Self::Para(_) => return Err(AddError::Sandboxed(device)),
        }
        Ok(())
    }

    /// Does something with the grants of such a device.
    pub fn with_grants<R>(
        &self,
        device: RequesterId,
        with: impl FnOnce(&mut Grants) -> R,
    ) -> Option<R> {
        match self {
            Self::Virtio(iommu) => iommu.with_grants(device, with),
            Self::Para(iommu) => iommu.with_grants(device, with),
        }
    }

    /// Tells the driver of an access that was stopped, as soon as it gives a buffer for that.
    pub(crate) fn report(
        &self,
        device: RequesterId,
        iova: Iova,
        access: Access,
        reason: TranslationFaultReason,
    ) {
        match self {
            Self::Virtio(iommu) => iommu.report(TranslationFault {
                endpoint: EndpointId::new(device.get().into()),
                iova,
                access,
                reason,
            }),
            // It knows the reason by its own record.
            Self::Para(iommu) => iommu.report(device, iova, access),
        }
    }
}
