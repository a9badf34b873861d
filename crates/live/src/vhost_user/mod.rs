//! A vhost-user back-end with the same devices, behind the front-end's IOMMU.
//!
//! The front-end (for example QEMU's `vhost-user-blk-pci`) owns the registers, the interrupts and
//! the IOMMU; the back-end owns the rings and the disk. All addresses of rings, descriptors and
//! buffers are IOVAs. The back-end requests their translations from the front-end and keeps them in
//! an [`Iotlb`](ringfence_softiommu::iotlb::Iotlb). It accesses guest memory only through that
//! IOTLB. It requires `VIRTIO_F_ACCESS_PLATFORM` and does not start a ring without it.
//!
//! From the outside in: `request` parses the protocol. [`Session`] handles one front-end's
//! connection without a socket. `translations` is the state that the session shares with the
//! device's thread, and `ring` is that thread. [`serve`] owns the sockets. Two threads are needed
//! because the front-end stops the whole guest until an invalidation is acknowledged. The
//! acknowledgement must not wait for a disk, and a device that waits for a translation must be
//! stoppable.
//!
//! One queue; no live migration, no hot-plugged memory slots, no device state. Requests for
//! features that were not offered are refused.
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
    MAX_PAYLOAD_BYTES, MAX_REGIONS, RequestError, SharedRegion, StreamError, VhostUser,
    VhostUserRequest, VringAddress,
};
pub use server::{Clients, serve};
pub use session::{Outcome, Session, Settings};
