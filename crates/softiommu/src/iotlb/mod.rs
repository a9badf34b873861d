//! A vhost-user back-end's IOTLB: what its front-end has said of the device's addresses, cached
//! where readers translate.
//!
//! A back-end whose driver has negotiated `VIRTIO_F_ACCESS_PLATFORM` sees I/O virtual addresses and
//! no table. It asks its front-end (a *miss*, on the socket for the back-end's requests), is told
//! (an *update*, on the main socket), and is told when that no longer holds (an *invalidation*, on
//! the main socket, too). [`Iotlb`] is that cache without I/O: messages in, messages out. Its hits
//! are [`ReadGuard`](crate::ReadGuard)'s, and an invalidation is acknowledged when no reader holds
//! what it took away.
//!
//! # Two sockets
//! The front-end may look an address up, be told by the guest that it is unmapped, send the
//! invalidation, and only then send the update that it has looked up before. To install that one
//! would bring back what is gone, for good: nobody will invalidate it a second time. So an
//! invalidation that arrives while misses are under way is remembered until each of them has been
//! answered, and no update installs a page of it meanwhile; whoever still needs the page asks
//! again. What this rests on: a miss is sent with a request for a reply
//! (`VHOST_USER_PROTOCOL_F_REPLY_ACK`, without which a back-end must not use this), and the
//! front-end replies to it after its update has been acknowledged.
//!
//! # Bounds
//! Pages, tables, misses under way and remembered invalidations are bounded ([`IotlbLimits`]). Of
//! an update that is larger, the pages that are missed are kept, and some that follow; a page of it
//! that is there already, and that it contradicts, goes, wherever in the update it lies; where
//! there is no room, what came first goes first. The front-end can map only what it has shared: an
//! update outside the regions is refused.
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

pub use cache::{Iotlb, IotlbLimits};
#[cfg(feature = "vhost-user")]
pub use client::{IotlbClient, IotlbClientError};
pub use error::{FrameError, IotlbError, MessageError, RegionError};
pub use frame::{FRONTEND_IOTLB, Header, IOTLB_BYTES, reply, reply_status, request};
pub use message::Message;
pub use misses::{MissAction, MissId, MissOutcome};
pub use regions::{Region, Regions};
