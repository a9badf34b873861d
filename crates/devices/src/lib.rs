//! Devices that transfer data by DMA, their drivers, and their workloads.
//!
//! [`Bus`] is the access engine. It has the IOMMU translate a device's access, reports the result
//! to an [`Observer`], and moves the bytes. Devices access memory only through it. Their drivers
//! map and unmap through a [`DmaApi`](api::DmaApi), which any protection mode can implement.
//!
//! The [attackers](Attacker) choose accesses without knowledge of the protection mode: they see
//! only the driver's actions and whether an access was blocked.
//!
//! | module | content |
//! |---|---|
//! | [`api`] | the DMA API of a driver |
//! | [`ats`] | functions with a device TLB and page requests, and the handler of I/O page faults |
//! | [`fabric`] | ports with access control, interrupt requests, peer-to-peer requests |
//! | [`posted`] | writes on their way between the IOMMU and memory |
//! | [`ring`] | descriptors in memory, completions, interrupt coalescing |
//! | [`nic`] | network adapters with the profiles mlx and brcm |
//! | [`block`] | disks: NVMe, AHCI, and a pseudo adapter without transfers |
//! | [`recovery`] | re-initialisation of a device after an I/O page fault |
//! | [`workload`] | traffic of the clients and the server |
#![forbid(unsafe_code)]

pub mod api;
pub mod ats;
mod attack;
pub mod block;
mod buffer;
mod bus;
mod bytes;
pub mod fabric;
pub mod nic;
mod observer;
pub mod posted;
pub mod recovery;
mod request;
mod returns;
pub mod ring;
mod seed;
mod transfer;
pub mod workload;

pub use attack::{
    Attacker, DEAD_RANGES, DeviceMapping, DmaPort, DriverEvent, Neighbour, Passive, Racer,
    Replayer, Reuse, Straddler, WARM_MAPPINGS, WrongDirection,
};
pub use buffer::{Buffer, BufferOwner, Pool, PoolError, ReuseOrder};
pub use bus::{Bus, DmaError};
pub use bytes::{ByteMemory, Unreachable};
pub use observer::Observer;
pub use request::DmaRequest;
pub use seed::Seed;
pub use transfer::Transfer;
