//! Driver of a RISC-V IOMMU (RISC-V IOMMU Architecture Specification, version 1.0), for kernels and
//! hypervisors.
//!
//! [`Unit`] owns the device directory, the process directories and the three queues. It reaches
//! registers, memory and frames through the ports of `ringfence-types`. Attach and detach write a
//! device context in the order that the specification demands, submit the invalidations that the
//! change owes, and wait for them. The unit implements [`Invalidator`] for the mapping layer.
//!
//! ```text
//! attach:  check -> empty an unused domain-id -> write the context, V last -> IODIR.INVAL_DDT
//! detach:  clear V -> IODIR.INVAL_DDT, IOTINVAL of the domain, IOFENCE.C -> free
//! submit:  commands of a burst -> IOFENCE.C that writes the ticket -> one write of cqt
//! ```
//! A domain-id is the PSCID of a first stage, or the GSCID of a second stage. The driver rejects
//! two tables under one id, because cached entries bear only the id.
//!
//! ```
//! # use core::cell::RefCell;
//! # use core::sync::atomic::Ordering;
//! # use std::collections::HashMap;
//! use ringfence_memory::{Arena, Frames};
//! use ringfence_pgtable::{Coherency, Levels, MapRequest, RiscV, Table};
//! use ringfence_riscv_iommu::{Options, PageTable, Translation, Unit};
//! use ringfence_types::{
//!     CachedLevels, DomainId, Invalidation, Invalidator, Iova, Permissions, PhysAddr, PhysRange,
//!     RequesterId,
//! };
//! # use ringfence_types::{PhysMemory, Registers};
//! # // A unit that only completes fences.
//! # struct Fake<'a>(&'a Arena, RefCell<HashMap<u64, u64>>);
//! # impl Fake<'_> {
//! #     fn get(&self, at: u64) -> u64 { self.1.borrow().get(&at).copied().unwrap_or(0) }
//! #     fn load(&self, at: u64) -> u64 {
//! #         self.0.word(PhysAddr::new(at)).unwrap().load(Ordering::SeqCst)
//! #     }
//! # }
//! # impl Registers for Fake<'_> {
//! #     fn read32(&self, at: u64) -> u32 { self.get(at) as u32 }
//! #     fn read64(&self, at: u64) -> u64 { if at == 0 { 0x38_0000_0210 } else { self.get(at) } }
//! #     fn write64(&self, at: u64, value: u64) { self.1.borrow_mut().insert(at, value); }
//! #     fn write32(&self, at: u64, value: u32) {
//! #         let on = if matches!(at, 72 | 76) && value & 1 != 0 { 1 << 16 } else { 0 };
//! #         self.write64(at, u64::from(value) | on);
//! #         while at == 36 && self.get(32) != self.get(36) {
//! #             let command = (self.get(24) >> 10 << 12) + self.get(32) * 16;
//! #             let (low, high) = (self.load(command), self.load(command + 8));
//! #             if low & 0x7f == 2 {
//! #                 let word = self.0.word(PhysAddr::new(high << 2)).unwrap();
//! #                 word.store(low >> 32, Ordering::SeqCst);
//! #             }
//! #             self.write64(32, (self.get(32) + 1) % 256);
//! #         }
//! #     }
//! # }
//! # let memory = Arena::new(4 << 20)?;
//! # let registers = Fake(&memory, RefCell::default());
//! let region = PhysRange::new(PhysAddr::new(1 << 20), 3 << 20).ok_or("no region")?;
//! let frames = Frames::new(&memory, region);
//! let mut unit = Unit::new(registers, &memory, &frames, Options::default())?;
//!
//! // A domain: one page, at the address 0x5000 of the device.
//! let (domain, levels) = (DomainId::new(1), Levels::Three);
//! let format = RiscV::first_stage(levels);
//! let table = Table::new(format, domain, Coherency::Coherent, &memory, &frames)?;
//! table.map(
//!     &memory,
//!     &frames,
//!     MapRequest {
//!         iova: Iova::new(0x5000),
//!         pa: PhysAddr::new(0x8000),
//!         pages: 1,
//!         permissions: Permissions::READ_WRITE,
//!     },
//! )?;
//! let device = RequesterId::new(0x20);
//! let root = PageTable { root: table.root(), levels };
//! unit.attach(&frames, device, domain, &Translation::FirstStage(root))?;
//!
//! // After an unmap, the page is free once its invalidation has completed.
//! let (unmapped, levels) = table.unmap(&memory, ringfence_types::PfnRange::new(
//!     ringfence_types::Pfn::new(5),
//!     1,
//! ).ok_or("no range")?)?;
//! let ticket = unit.submit(Invalidation::Pages {
//!     domain,
//!     range: unmapped.range(),
//!     levels,
//! })?;
//! unit.wait(ticket)?;
//! # assert_eq!(levels, CachedLevels::Leaves);
//!
//! unit.detach(&frames, device)?;
//! unit.disable(&frames).map_err(|(_, error)| error)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! [`Invalidator`]: ringfence_types::Invalidator
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

mod attach;
mod attachments;
mod capabilities;
mod command;
mod completion;
mod directory;
mod error;
mod fault;
mod invalidate;
mod msi;
mod options;
mod page_request;
mod queue;
mod registers;
mod start;
mod submit;
mod translation;
mod unit;

pub use capabilities::{Capabilities, InterruptSupport};
pub use error::{Feature, UnitError};
pub use fault::{Cause, FaultEvent, FaultRecord, Transaction};
pub use msi::{MsiAddresses, MsiError, MsiPageTable};
pub use options::{Interrupts, Options};
pub use page_request::{PageRequest, PageRequestEvent, PageResponse};
pub use queue::Loss;
pub use registers::Register;
pub use translation::{
    Ats, GuestFirstStage, MsiTranslation, PageTable, Privilege, ProcessBits, Translation,
};
pub use unit::{PendingInterrupts, Unit};
