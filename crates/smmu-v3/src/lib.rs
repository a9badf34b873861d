//! Driver of an Arm SMMUv3: it confines devices to page tables, keeps the unit's caches right, and
//! reads its event queue.
//!
//! [`Unit::new`] enables translation with all devices blocked. [`Unit::attach`] points a device to
//! a table of `ringfence-pgtable` as stage 1 or stage 2; [`Unit`] implements
//! [`Invalidator`](ringfence_types::Invalidator) for the unmaps of that table.
//!
//! ```
//! use ringfence_pgtable::{Arm, Granule4K, Table};
//! use ringfence_smmu_v3::{Capabilities, Options, PageTable, Translation, Unit, UnitError};
//! use ringfence_types::{
//!     DomainId, FrameSource, PhysMemory, PhysRange, Registers, RequesterId,
//! };
//!
//! fn confine<R: Registers, M: PhysMemory + Clone, S: FrameSource + Copy>(
//!     registers: R,
//!     memory: M,
//!     frames: S,
//!     region: PhysRange,
//!     device: RequesterId,
//! ) -> Result<(), UnitError> {
//!     let found = Capabilities::read(&registers).ok_or(UnitError::Absent)?;
//!     let bits = found.stream_id_bits.min(16);
//!     let bytes = found.stream_table_bytes(bits, frames.frame_size());
//!     let stream_table = PhysRange::new(region.start(), bytes);
//!     let stream_table = stream_table.ok_or(UnitError::StreamTable { bytes })?;
//!     let options = Options::new(stream_table, bits);
//!     let mut unit = Unit::new(registers, memory.clone(), frames, &options)?;
//!     let domain = DomainId::new(1);
//!     let format = Arm::<Granule4K>::stage1(39).ok_or(UnitError::Width { width: 39 })?;
//!     let table = Table::new(format, domain, unit.coherency(), &memory, &frames)
//!         .map_err(UnitError::Table)?;
//!     unit.attach(device, domain, &Translation::Stage1(PageTable::of(&table)))?;
//!     // `table.map` and `table.unmap`; unmaps owe invalidations, which `unit` performs.
//!     unit.detach(device)?;
//!     unit.disable().map_err(|(_, error)| error)
//! }
//! # use core::cell::RefCell;
//! # use std::collections::BTreeMap;
//! # use ringfence_memory::{Arena, Frames};
//! # use ringfence_types::PhysAddr;
//! # struct Fake(RefCell<BTreeMap<u64, u32>>);
//! # impl Registers for Fake {
//! #     fn read32(&self, offset: u64) -> u32 {
//! #         match offset {
//! #             0x0 => 0x0844_101b,
//! #             0x4 => 0x0107_0010,
//! #             0x14 => 0x74,
//! #             // CR0ACK, IRQ_CTRLACK and CMDQ_CONS follow what is written.
//! #             0x24 | 0x54 | 0x9c => *self.0.borrow().get(&(offset - 4)).unwrap_or(&0),
//! #             _ => *self.0.borrow().get(&offset).unwrap_or(&0),
//! #         }
//! #     }
//! #     fn read64(&self, offset: u64) -> u64 {
//! #         self.read32(offset).into()
//! #     }
//! #     fn write32(&self, offset: u64, value: u32) {
//! #         // GBPA.Update is done at once.
//! #         let value = if offset == 0x44 { value & !(1 << 31) } else { value };
//! #         self.0.borrow_mut().insert(offset, value);
//! #     }
//! #     fn write64(&self, _offset: u64, _value: u64) {}
//! # }
//! # let memory = Arena::new(1 << 20).unwrap();
//! # let region = PhysRange::new(PhysAddr::new(0x1000), 0x10_000).unwrap();
//! # let frames = Frames::new(&memory, region);
//! # let table = PhysRange::new(PhysAddr::new(0x2_0000), 0x2000).unwrap();
//! # let fake = Fake(RefCell::new(BTreeMap::new()));
//! # confine(fake, &memory, &frames, table, RequesterId::new(0x20)).unwrap();
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

mod attach;
mod attachments;
mod capabilities;
mod command;
mod command_queue;
mod context;
mod error;
mod event;
mod event_queue;
mod global_errors;
mod invalidate;
mod options;
mod ranges;
mod registers;
mod start;
mod stream_entry;
mod stream_table;
mod submit;
mod translation;
mod unit;

pub use capabilities::{Capabilities, StallModel};
pub use command_queue::CommandError;
pub use error::{Feature, UnitError, UnitQueue};
pub use event::{Class, EventRecord, EventType, FaultEvent, Loss, StageFault, Transaction};
pub use options::{Interrupts, Options};
pub use registers::Register;
pub use translation::{PageTable, Translation};
pub use unit::Unit;
