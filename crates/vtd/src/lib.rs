//! Driver of an Intel VT-d unit: it confines devices to page tables, keeps the unit's caches right,
//! and reads its fault records.
//!
//! [`Unit::new`] enables translation with all devices blocked. [`Unit::attach`] points a device to
//! a table of `ringfence-pgtable`; [`Unit`] implements
//! [`Invalidator`](ringfence_types::Invalidator) for the unmaps of that table. Legacy mode has the
//! second stage only, scalable mode both stages and PASIDs.
//!
//! ```
//! use ringfence_pgtable::{Levels, SecondStage, Table};
//! use ringfence_types::{
//!     DomainId, FrameSource, PhysMemory, Registers, RequesterId,
//! };
//! use ringfence_vtd::{Interface, Mode, Options, Translation, Unit, UnitError};
//!
//! fn confine<R: Registers, M: PhysMemory + Clone, S: FrameSource + Copy>(
//!     registers: R,
//!     memory: M,
//!     frames: S,
//!     device: RequesterId,
//! ) -> Result<(), UnitError> {
//!     let options = Options {
//!         mode: Mode::Legacy,
//!         interface: Interface::Registers,
//!         poll_limit: 1_000_000,
//!     };
//!     let mut unit = Unit::new(registers, memory.clone(), frames, &options)?;
//!     let levels = unit.capabilities().second_stage_for(39).ok_or(UnitError::Absent)?;
//!     let domain = DomainId::new(1);
//!     let format = SecondStage::new(levels);
//!     let table = Table::new(format, domain, unit.coherency(), &memory, &frames)?;
//!     let root = table.root();
//!     unit.attach(device, domain, Translation::SecondStage { root, levels })?;
//!     // `table.map` and `table.unmap`; unmaps owe invalidations, which `unit` performs.
//!     unit.detach(device)?;
//!     unit.disable()
//! }
//! # use core::cell::Cell;
//! # use ringfence_memory::{Arena, Frames};
//! # use ringfence_types::{PhysAddr, PhysRange};
//! # struct Fake(Cell<u32>);
//! # impl Registers for Fake {
//! #     fn read32(&self, offset: u64) -> u32 {
//! #         if offset == 0x1c { self.0.get() } else { 0 }
//! #     }
//! #     fn read64(&self, offset: u64) -> u64 {
//! #         match offset {
//! #             0x08 => 0x9_0380_4026_0606,
//! #             0x10 => 0x1041,
//! #             // Not under way; the granularity that was asked for.
//! #             _ => 0x1e00_0000_0000_0000,
//! #         }
//! #     }
//! #     fn write32(&self, offset: u64, value: u32) {
//! #         if offset == 0x18 { self.0.set(value) }
//! #     }
//! #     fn write64(&self, _offset: u64, _value: u64) {}
//! # }
//! # let memory = Arena::new(1 << 20).unwrap();
//! # let region = PhysRange::new(PhysAddr::new(0x1000), 0x10_000).unwrap();
//! # let frames = Frames::new(&memory, region);
//! # confine(Fake(Cell::new(0)), &memory, &frames, RequesterId::new(0x20)).unwrap();
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod attach;
mod attachment;
mod capabilities;
mod command;
mod error;
mod fault;
mod invalidate;
mod pasid_entry;
mod plan;
mod queue;
mod register_invalidation;
mod registers;
mod scalable;
mod unit;

pub use attachment::Translation;
pub use capabilities::Capabilities;
pub use error::{Feature, Register, UnitError};
pub use fault::{Fault, FaultRecord, InterruptFault, Request};
pub use unit::{Interface, Mode, Options, Unit};
