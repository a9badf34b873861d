//! Devices that move data by DMA, their drivers, and what they are put to.
//!
//! [`Bus`] is the access engine: it asks the unit to translate a device's access, tells an
//! [`Observer`] what came of it, and moves the bytes. Devices reach memory through it alone; their
//! drivers map and unmap through a [`DmaApi`](api::DmaApi), behind which any protection mode can
//! stand. The [attackers](Attacker) decide which accesses to make, and know nothing of the
//! protection mode they are up against: they see what a driver does and whether an access was
//! stopped.
//!
//! | module | what |
//! |---|---|
//! | [`api`] | DMA as a driver sees it |
//! | [`ring`] | descriptors in memory, completions, interrupts in bursts |
//! | [`nic`] | network adapters of the shapes mlx and brcm |
//! | [`block`] | disks: NVMe, AHCI, and an adapter that only pretends |
//! | [`workload`] | who sends which packet when |
#![forbid(unsafe_code)]

mod access;
pub mod api;
mod attack;
pub mod block;
mod buffer;
mod bytes;
pub mod nic;
mod observer;
mod request;
mod returns;
pub mod ring;
mod seed;
mod transfer;
pub mod workload;

pub use access::{Bus, DmaError};
pub use attack::{
    Attacker, DEAD_RANGES, DeviceMapping, DmaPort, DriverEvent, Neighbour, Passive, Racer,
    Replayer, Reuse, Straddler, WARM_MAPPINGS,
};
pub use buffer::{Buffer, BufferOwner, Pool, PoolError};
pub use bytes::{ByteMemory, Unreachable};
pub use observer::Observer;
pub use request::DmaRequest;
pub use seed::Seed;
pub use transfer::Transfer;
