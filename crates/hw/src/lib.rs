//! Hardware models of IOMMUs. A unit translates a device's accesses through tables in memory and
//! caches translations until software invalidates them. It blocks and records accesses without a
//! translation.
//!
//! [`Iommu`] walks page tables; [`VtdUnit`], [`CalgaryUnit`] and [`DartUnit`] are its variants, and
//! a [`GartUnit`] contains one. A unit of AMD-Vi, SMMUv3 or RISC-V is an [`Iommu`] with a
//! [`DeviceTable`], and [`RangeCommands`] split its invalidations. [`RingUnit`] looks up rings. An
//! [`IommuRouter`] combines one unit of each kind. An [`AtsUnit`] serves devices with a device TLB.
//! A [`NestedUnit`] translates through a guest's tables and a host's.
//!
//! A unit reads [`PhysMemory`](ringfence_types::PhysMemory) in the hardware's formats and serves
//! [`Invalidator`](ringfence_types::Invalidator) requests. It shares no data structure with the
//! mapping layer: the two communicate only through memory, as a kernel and its IOMMU do.
//!
//! An access enters at [`translate`](Iommu::translate) (`translate.rs`) and looks up the IOTLB
//! (`iotlb.rs`). On a miss it uses the walk caches and [`walk`](ringfence_pgtable::walk)
//! (`walker.rs`). It ends as a [`Translation`] or in the [`FaultLog`].
//!
//! A cleared entry stays usable until the invalidation of the IOTLB:
//!
//! ```
//! use ringfence_hw::{Geometry, UnitConfig, VtdUnit};
//! use ringfence_memory::{Arena, Frames};
//! use ringfence_pgtable::{
//!     Coherency, Context, ContextTables, Levels, MapRequest, SecondStage, Table, TranslationType,
//! };
//! use ringfence_types::{
//!     Access, DomainId, Invalidation, Invalidator, Iova, Permissions, Pfn, PfnRange, PhysAddr,
//!     PhysRange, RequesterId,
//! };
//!
//! let memory = Arena::new(1 << 20)?;
//! let frames = Frames::new(&memory, PhysRange::new(PhysAddr::ZERO, 1 << 20).ok_or("empty")?);
//! let (nic, domain) = (RequesterId::new(0x18), DomainId::new(1));
//!
//! // The driver builds a table that maps one page for writes, and the context of the device.
//! let (format, coherent) = (SecondStage::new(Levels::Four), Coherency::Coherent);
//! let table = Table::new(format, domain, coherent, &memory, &frames)?;
//! let (iova, pa, permissions) = (Iova::new(0x4000), PhysAddr::new(0x9_0000), Permissions::WRITE);
//! table.map(&memory, &frames, MapRequest { iova, pa, pages: 1, permissions })?;
//! let translation = TranslationType::Table { root: table.root(), levels: Levels::Four };
//! let mut contexts = ContextTables::new(coherent, &memory, &frames)?;
//! contexts.attach(&memory, &frames, nic, &Context { domain, translation })?;
//!
//! // The unit has an IOTLB of 16 sets and 4 ways.
//! let config = UnitConfig { iotlb: Geometry::new(16, 4)?, ..UnitConfig::UNCACHED };
//! let mut unit = VtdUnit::vtd(&config);
//! unit.set_root_table(contexts.root());
//! unit.enable();
//! let write = |unit: &mut VtdUnit| {
//!     let written = unit.translate(&memory, nic, iova, 64, Access::Write);
//!     written.map(|translation| translation.first().start())
//! };
//! assert_eq!(write(&mut unit), Ok(pa));
//!
//! // After the unmap, the device still reaches the page.
//! let page = PfnRange::new(Pfn::containing(iova), 1).ok_or("empty")?;
//! let (_unmapped, levels) = table.unmap(&memory, page)?;
//! assert_eq!(write(&mut unit), Ok(pa));
//! // After the invalidation it faults, and the unit has recorded the access.
//! let ticket = unit.submit(Invalidation::Pages { domain, range: page, levels })?;
//! unit.wait(ticket)?;
//! assert!(write(&mut unit).is_err());
//! assert!(unit.faults().take().is_some_and(|fault| fault.source == nic));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod adjacent_prefetch;
mod applicability;
mod ats;
mod baseline_and_ring;
mod cache;
mod context_cache;
mod context_lookup;
mod dart_register;
mod device_table;
mod fault;
mod gart;
mod geometry;
mod host_bridge;
mod interrupt;
mod invalidation;
mod invalidation_descriptor;
mod iotlb;
mod iotlb_prefetch;
mod nested;
mod range_commands;
mod ring;
mod root_table;
mod stats;
mod tag;
mod translate;
mod translation;
mod unit;
mod walk_cache;
mod walker;

pub use adjacent_prefetch::{AdjacentPrefetch, PrefetchSide};
pub use applicability::{DmaUsage, UnmapOrder};
pub use ats::{
    AddressType, AtsUnit, CompletionError, DeviceTlbQueueConfig, GroupPosition, InvalidateRequest,
    InvalidationTag, PageGroupResponse, PageRequest, PageRequestQueue, PageRequestStats, PrgIndex,
    ResponseCode, TranslatedCheck, TranslationCompletion, TranslationService,
};
pub use baseline_and_ring::{IommuKind, IommuRouter};
pub use cache::Replacement;
pub use context_lookup::{ContextEntry, ContextLookup, DeviceTlbPermission, TableRoot};
pub use dart_register::DartRegister;
pub use device_table::DeviceTable;
pub use fault::{FaultLog, FaultRecord};
pub use gart::GartUnit;
pub use geometry::{Geometry, GeometryError};
pub use host_bridge::{HostBridge, HostBridges};
pub use interrupt::{
    CompatibilityFormat, INTERRUPT_RANGE, Interrupt, InterruptEntry, InterruptFault,
    InterruptFaultReason, InterruptRemapping, InterruptRequest, SourceValidation,
};
pub use invalidation_descriptor::{BadDescriptor, InvalidationDescriptor};
pub use nested::{
    NestedFault, NestedInvalidation, NestedStats, NestedUnit, NestedUnitConfig, Stage,
};
pub use range_commands::{RISCV_PAGES, RangeCommands};
pub use ring::{FixedLogic, Prefetch, RingLogic, RingStats, RingUnit, RingUnitConfig};
pub use root_table::RootTable;
pub use stats::{InvalidationCounts, IommuStats};
pub use translate::{MAX_TRANSLATED_BYTES, Translate};
pub use translation::Translation;
pub use unit::{CalgaryUnit, DartUnit, InvalidationGranularity, Iommu, UnitConfig, VtdUnit};
pub use walk_cache::WALK_CACHES;
