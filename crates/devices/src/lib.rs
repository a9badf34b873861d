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
//!
//! A network card writes a frame into the one page that its IOMMU maps:
//!
//! ```
//! use ringfence_devices::{Bus, DmaError, DmaRequest, Observer};
//! use ringfence_hw::{UnitConfig, VtdUnit};
//! use ringfence_memory::{Arena, Frames};
//! use ringfence_pgtable::{
//!     Coherency, Context, ContextTables, Levels, MapRequest, SecondStage, Table, TranslationType,
//! };
//! use ringfence_types::{
//!     DomainId, Fault, Iova, Permissions, PhysAddr, PhysRange, RequesterId,
//! };
//!
//! /// Counts allowed and blocked accesses.
//! #[derive(Default)]
//! struct Counts(u32, u32);
//!
//! impl Observer for Counts {
//!     fn allowed(&mut self, _: &DmaRequest, _: &[PhysRange]) {
//!         self.0 += 1;
//!     }
//!     fn faulted(&mut self, _: &DmaRequest, _: &Fault) {
//!         self.1 += 1;
//!     }
//! }
//!
//! let memory = Arena::new(1 << 20)?;
//! let frames = Frames::new(&memory, PhysRange::new(PhysAddr::ZERO, 1 << 19).ok_or("empty")?);
//! let (nic, domain, coherent) = (RequesterId::new(0x18), DomainId::new(1), Coherency::Coherent);
//! let table = Table::new(SecondStage::new(Levels::Four), domain, coherent, &memory, &frames)?;
//! let (iova, pa, permissions) = (Iova::new(0x4000), PhysAddr::new(0x9_0000), Permissions::WRITE);
//! table.map(&memory, &frames, MapRequest { iova, pa, pages: 1, permissions })?;
//! let translation = TranslationType::Table { root: table.root(), levels: Levels::Four };
//! let mut contexts = ContextTables::new(coherent, &memory, &frames)?;
//! contexts.attach(&memory, &frames, nic, &Context { domain, translation })?;
//! let mut unit = VtdUnit::vtd(&UnitConfig::UNCACHED);
//! unit.set_root_table(contexts.root());
//! unit.enable();
//!
//! let mut counts = Counts::default();
//! let mut bus = Bus::new(&mut unit, &memory, &mut counts);
//! bus.write(nic, iova, b"frame")?;
//! // The page is not readable, and a frame across its end moves no byte.
//! assert!(matches!(bus.read(nic, iova, &mut [0; 5]), Err(DmaError::Fault(_))));
//! assert!(matches!(bus.write(nic, Iova::new(0x4ffe), b"long"), Err(DmaError::Fault(_))));
//! assert_eq!((counts.0, counts.1), (1, 2));
//!
//! let mut received = [0; 5];
//! memory.read_bytes(pa, &mut received)?;
//! assert_eq!(&received, b"frame");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
