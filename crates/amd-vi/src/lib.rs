//! Driver of an AMD-Vi unit: it confines devices to page tables, keeps the unit's caches right, and
//! reads its event log.
//!
//! [`Unit::new`] enables translation with all devices blocked. [`Unit::attach`] points a device to
//! a table of `ringfence-pgtable`; [`Unit`] implements
//! [`Invalidator`](ringfence_types::Invalidator) for the unmaps of that table.
//!
//! Sections and names are those of the AMD I/O Virtualization Technology (IOMMU) Specification,
//! 48882.
//!
//! ```
//! use ringfence_amd_vi::{Interrupts, Options, Stage, Unit, UnitError, device_table_bytes};
//! use ringfence_pgtable::{AmdV1, Level, Table};
//! use ringfence_types::{
//!     DomainId, FrameSource, PhysAddr, PhysMemory, PhysRange, Registers, RequesterId,
//! };
//!
//! fn confine<R: Registers, M: PhysMemory + Clone, S: FrameSource + Copy>(
//!     registers: R,
//!     memory: M,
//!     frames: S,
//!     device_table: PhysRange,
//!     device: RequesterId,
//! ) -> Result<(), UnitError> {
//!     let options = Options {
//!         capability_header: 0x0803_000f, // from the unit's configuration space
//!         ivhd_flags: 0,                  // from the IVRS
//!         device_table,
//!         interrupts: Interrupts::Pass,
//!         poll_limit: 1_000_000,
//!     };
//!     let mut unit = Unit::new(registers, memory.clone(), frames, &options)?;
//!     let domain = DomainId::new(1);
//!     let format = AmdV1::new(Level::new(4).ok_or(UnitError::Absent)?);
//!     let table = Table::new(format, domain, unit.coherency(), &memory, &frames)
//!         .map_err(UnitError::Table)?;
//!     let (root, levels) = (table.root(), Level::new(4).ok_or(UnitError::Absent)?);
//!     unit.attach(device, domain, Stage::Host { root, levels })?;
//!     // `table.map` and `table.unmap`; unmaps owe invalidations, which `unit` performs.
//!     unit.detach(device)?;
//!     unit.disable()
//! }
//! # use std::{cell::Cell, rc::Rc, sync::atomic::Ordering};
//! # use ringfence_memory::{Arena, Frames};
//! # struct Fake(Rc<Arena>, Cell<u64>, Cell<u64>);
//! # impl Registers for Fake {
//! #     fn read32(&self, offset: u64) -> u32 {
//! #         if offset == 0x2020 && self.1.get() != 0 { 0x18 } else { 0 }
//! #     }
//! #     fn read64(&self, offset: u64) -> u64 {
//! #         if offset == 0x30 { 0x40 } else { self.1.get() }
//! #     }
//! #     fn write32(&self, offset: u64, tail: u32) {
//! #         let slot = (u64::from(tail) + 4096 - 16) % 4096 + self.2.get();
//! #         if offset != 0x2008 || self.1.get() == 0 { return }
//! #         let command = self.0.words(PhysAddr::new(slot), 2).unwrap();
//! #         let [at, data] = [0, 1].map(|n: usize| command[n].load(Ordering::Relaxed));
//! #         let at = PhysAddr::new(at & 0xf_ffff_ffff_fff8);
//! #         self.0.word(at).unwrap().store(data, Ordering::Relaxed);
//! #     }
//! #     fn write64(&self, offset: u64, value: u64) {
//! #         match offset {
//! #             0x18 => self.1.set(value),
//! #             0x08 => self.2.set(value & 0xf_ffff_ffff_f000),
//! #             _ => {}
//! #         }
//! #     }
//! # }
//! # let memory = Rc::new(Arena::new(1 << 20).unwrap());
//! # let region = PhysRange::new(PhysAddr::new(0x10_000), 0x10_000).unwrap();
//! # let frames = Frames::new(memory.clone(), region);
//! # let registers = Fake(memory.clone(), Cell::new(0), Cell::new(0));
//! let device = RequesterId::new(0x20);
//! let bytes = device_table_bytes(RequesterId::new(0xff));
//! let device_table = PhysRange::new(PhysAddr::new(0x2000), bytes).unwrap();
//! confine(registers, memory, &frames, device_table, device).unwrap();
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod capabilities;
mod command;
mod command_buffer;
mod device_entry;
mod device_table;
mod error;
mod event;
mod event_log;
mod guest;
mod invalidate;
mod memory;
mod registers;
mod unit;

pub use capabilities::Capabilities;
pub use device_entry::{Interrupts, Stage};
pub use device_table::device_table_bytes;
pub use error::UnitError;
pub use event::{Event, FaultRecord, Request};
pub use registers::Register;
pub use unit::{Options, Unit};

#[cfg(test)]
extern crate std;
