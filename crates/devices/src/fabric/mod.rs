//! The PCI Express fabric between devices and the IOMMU: root ports or downstream ports of a switch
//! with Access Control Services (ACS), and the root complex with interrupt remapping.
//!
//! Without ACS, a port does not check the requester ID of a request, and a switch delivers a
//! request to a sibling's registers without the IOMMU. Without interrupt remapping, a device can
//! send any interrupt. Each defence can be disabled; without all of them the fabric is plain PCI.
//!
//! | attack | remedy |
//! |---|---|
//! | A12, forged requester ID | [`Acs::SOURCE_VALIDATION`] |
//! | A13, translated request | [`Acs::TRANSLATION_BLOCKING`], and the IOMMU's permissions |
//! | A15, forged interrupt | [`InterruptRemapping`](ringfence_hw::InterruptRemapping) |
//! | A16, peer-to-peer access | [`Acs::REQUEST_REDIRECT`] |

mod acs;
mod root_complex;
mod topology;

pub use acs::Acs;
pub use root_complex::{FabricError, FabricRequest, RootComplex, Routed};
pub use topology::{AttachedBelow, Port, PortError, Topology};
