//! Xen as the owner of I/O spaces (Calgary slides, "Xen IOMMU Support"; issue ids CG05 to CG14).
//!
//! dom0 detects the IOMMU and reports it to the hypervisor, which then owns the unit. Guests name
//! an I/O space by the BDF of a device and request single entries. Hypercalls are typed values
//! ([`IommuOp`], [`GrantMap`]), and a guest may send any of them. [`Xen`] checks each one:
//!
//! - An entry maps only a frame of the caller, or a frame that its owner granted to the caller.
//! - A frame keeps its owner while an entry, or a cached translation, still refers to it.
//!   Ballooning and page flipping of such a frame fail with [`XenError::Busy`].
//! - Calgary has one space for each host bridge. The devices of a bus belong to one domain.
//!
//! The slides give the names of the hypercalls, not their encoding. `FlushIoSpace` and the flag
//! [`TceFlush`] are additions, for the deferred flush that the slides propose.

mod balloon;
mod frames;
mod grants;
mod hypercall;
mod hypervisor;
mod io_space;

pub use frames::FrameReferences;
pub use grants::{GrantHandle, GrantMap, GrantRef};
pub use hypercall::{Domid, IommuOp, TceFlush, XenError};
pub use hypervisor::{MAX_MULTICALL, Xen, XenStats};
