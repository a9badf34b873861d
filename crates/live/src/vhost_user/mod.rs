//! The same devices as a vhost-user back-end, behind the front-end's own IOMMU.
//!
//! The front-end (QEMU's `vhost-user-blk-pci`, say) has the registers, the interrupts and the
//! IOMMU; here are the rings and the disk. All addresses are I/O virtual ones: of the rings, of
//! descriptors, of buffers. What they are is asked of the front-end and kept in an
//! [`Iotlb`](ringfence_softiommu::iotlb::Iotlb), through which alone memory is reached. It insists
//! on `VIRTIO_F_ACCESS_PLATFORM`: without it, it does not start.
//!
//! From the outside in: `request` is the protocol as bytes, [`Session`] one front-end's
//! conversation without a socket, `translations` what the device's thread and the conversation
//! share, `ring` the device's thread, [`serve`] the sockets. Two threads, because the front-end
//! stops the whole guest until an invalidation is acknowledged: that must not wait for a disk, and
//! a device that waits for a translation must be stoppable.
//!
//! One queue, no live migration, no memory slots one by one, no device state: what is not offered
//! is refused.
//!
//! Source: vhost-user protocol ([QEMU's interop
//! documents](https://www.qemu.org/docs/master/interop/vhost-user.html)).

mod refusal;
mod request;
mod ring;
mod server;
mod session;
mod translations;

pub use refusal::Refusal;
pub use request::{
    MAX_PAYLOAD_BYTES, MAX_REGIONS, RequestError, SharedRegion, StreamError, VhostUserRequest,
    VringAddress,
};
pub use server::{Clients, serve};
pub use session::{Outcome, Session, Settings};
