//! IOTLB of a vhost-user back-end: caches the translations that the front-end sends, and readers
//! translate through it.
//!
//! A back-end whose driver has negotiated `VIRTIO_F_ACCESS_PLATFORM` receives I/O virtual addresses
//! but no page table. It sends a *miss* on the socket for back-end requests. The front-end answers
//! with an *update* on the main socket. When a translation becomes invalid, the front-end sends an
//! *invalidation* on the main socket.
//!
//! [`Iotlb`] is this cache without I/O: it consumes and produces messages. Hits go through
//! [`ReadGuard`](crate::ReadGuard). The caller acknowledges an invalidation when no reader holds an
//! affected translation.
//!
//! # Race between the two sockets
//! The front-end may look up an address, then send an invalidation for it, and only then send the
//! update with the old translation. If the back-end installed this update, the stale translation
//! would stay forever: no second invalidation follows.
//!
//! [`Iotlb`] therefore remembers an invalidation that arrives while misses are pending, until each
//! of them has been answered. Until then, no update installs a page of the invalidated range. A
//! reader that still needs the page sends another miss.
//!
//! This requires that each miss requests a reply and that the front-end replies after its update
//! was acknowledged. A back-end must not use this module without `VHOST_USER_PROTOCOL_F_REPLY_ACK`.
//!
//! # Bounds
//! [`IotlbLimits`] bounds pages, tables and pending misses; the number of remembered invalidations
//! is also bounded. Of an update that exceeds the limits, the IOTLB caches the missed pages and
//! some that follow. It evicts every cached page that the update contradicts, anywhere in the
//! update. If there is no room, it evicts the oldest pages first. If tables run out, it evicts all
//! pages for a missed page, and caches no further extra page. In both cases it keeps the pages that
//! older misses wait for; a missed page without room is missed again. The front-end can map only
//! memory that it has shared: an update outside the regions is rejected.
//!
//! Sources: vhost-user protocol, "IOMMU support" and "Memory access" ([QEMU's interop
//! documents](https://www.qemu.org/docs/master/interop/vhost-user.html)); `struct vhost_iotlb_msg`
//! of Linux's uapi `linux/vhost_types.h`.

mod cache;
#[cfg(feature = "vhost-user")]
mod client;
mod error;
mod frame;
mod message;
mod misses;
mod regions;
mod resident;

pub use cache::{Iotlb, IotlbLimits};
#[cfg(feature = "vhost-user")]
pub use client::{IotlbClient, IotlbClientError};
pub use error::{FrameError, IotlbError, MessageError, RegionError};
pub use frame::{FRONTEND_IOTLB, Header, IOTLB_BYTES, reply, reply_status, request};
pub use message::Message;
pub use misses::{MissAction, MissId, MissOutcome};
pub use regions::{Region, Regions};
