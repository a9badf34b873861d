//! Which of the two IOMMUs a device stands behind.

use ringfence_types::DeviceId;

use super::{AddError, Iommu, Translated};
use crate::pviommu::PvIommu;

/// An IOMMU. Clones are the same one.
#[derive(Clone, Debug)]
pub enum Behind {
    /// The virtio-iommu.
    Virtio(Iommu),
    /// The para-virtual one.
    Para(PvIommu),
}

impl Behind {
    /// Adds an endpoint under its requester id; the para-virtual IOMMU was told of it before. What its accesses go through.
    ///
    /// # Errors
    /// If it is there already, or one too many.
    pub fn add_endpoint(&self, device: DeviceId) -> Result<Translated, AddError> {
        match self {
            Self::Virtio(iommu) => iommu.add_endpoint(device),
            Self::Para(iommu) => iommu.reader(device).map_err(AddError::Unit),
        }
    }

    /// Another way to memory of an endpoint that is there already.
    ///
    /// # Errors
    /// If it is not, or has too many.
    pub fn another_reader(&self, device: DeviceId) -> Result<Translated, AddError> {
        match self {
            Self::Virtio(iommu) => iommu.another_reader(device),
            Self::Para(iommu) => iommu.reader(device).map_err(AddError::Unit),
        }
    }
}
