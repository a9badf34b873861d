//! The PCI Express fabric between devices and the IOMMU: root ports or downstream ports of a switch
//! with Access Control Services (ACS), and the root complex with interrupt remapping.
//!
//! Without ACS, the fabric believes the requester id of a request and delivers a request to a
//! sibling's registers without the IOMMU. Without interrupt remapping, a device sends any
//! interrupt. Each has a switch; off is plain PCI.
//!
//! | attack | remedy |
//! |---|---|
//! | A12, forged requester id | [`Acs::SOURCE_VALIDATION`] |
//! | A13, translated request | [`Acs::TRANSLATION_BLOCKING`], and the IOMMU's permissions |
//! | A15, forged interrupt | [`InterruptRemapping`](ringfence_hw::InterruptRemapping) |
//! | A16, peer-to-peer access | [`Acs::REQUEST_REDIRECT`] |

mod acs;
mod root_complex;
mod topology;

pub use acs::Acs;
pub use root_complex::{FabricError, FabricRequest, RootComplex, Routed};
pub use topology::{AttachedBelow, Port, PortError, Topology};
