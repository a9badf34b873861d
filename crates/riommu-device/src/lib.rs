//! A ring IOMMU (rIOMMU section 4) as a PCI function: the registers of its BAR 0, the ring unit
//! behind them, and a queue of faults in the guest's memory. docs/RIOMMU-DEVICE.md is the
//! specification.
//!
//! The crate does no I/O. A monitor passes it each register access of the guest and each access of
//! the devices behind the IOMMU, and delivers the interrupt.
//!
//! ```
//! use ringfence_memory::Arena;
//! use ringfence_riommu_device::{Config, RiommuDevice, register};
//! use ringfence_types::{Access, FaultReason, Iova, RequesterId};
//!
//! let disk = RequesterId::from_parts(0, 4, 0).unwrap();
//! let mut device = RiommuDevice::new(&Config::default(), &[disk]).unwrap();
//! let memory = Arena::new(1 << 20).unwrap();
//!
//! assert_eq!(device.read(register::ID, 4), 0x474e_4952);
//! // All devices are blocked until the driver enables translation.
//! let stopped = device.translate(&memory, disk, Iova::new(0x1000), 4, Access::Read);
//! assert_eq!(stopped.unwrap_err().reason, FaultReason::Blocked);
//! ```
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod device;
mod fault_queue;
mod invalidate;
pub mod register;

pub use device::{Config, ConfigError, RiommuDevice, State, UndefinedBits};
pub use fault_queue::FaultEntry;
pub use invalidate::{InvalidateScope, InvalidateWord};
