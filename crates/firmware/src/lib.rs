//! Parsers of the firmware tables that describe IOMMUs, as input for the crates that drive the
//! units.
//!
//! | table | architecture | type |
//! |---|---|---|
//! | ACPI DMAR | Intel VT-d | [`Dmar`] |
//! | ACPI IVRS | AMD-Vi | [`Ivrs`] |
//! | ACPI IORT | Arm SMMU | [`Iort`] |
//! | ACPI RIMT | RISC-V IOMMU | [`Rimt`] |
//! | ACPI VIOT | virtio-iommu | [`Viot`] |
//! | device tree | RISC-V IOMMU, SMMUv3, virtio-iommu | [`DeviceTree`] |
//!
//! `new` checks a whole table and returns the first error with its offset. After that, the
//! iterators yield plain facts. `unit_of` answers which unit translates a PCI device, and
//! `reserved_regions` which addresses firmware reserves for it; [`merge_reserved`] turns them into
//! page ranges for an allocator.
//!
//! The tables may contain anything. The time of each call is linear in the length of the table,
//! times constants: a lookup follows at most [`MAX_HOPS`] references, and a tree has at most
//! [`MAX_DEPTH`] levels.
//!
//! ```
//! use ringfence_firmware::{Dmar, NoBridges, merge_reserved};
//! use ringfence_types::{Pfn, PfnRange, RequesterId};
//!
//! // A unit at 0xfed9_0000 with INCLUDE_PCI_ALL, and an RMRR of one page for 00:1d.0.
//! let mut table = [
//!     &b"DMAR\x60\0\0\0\x01\0RINGFEEXAMPLE \x01\0\0\0RING\x01\0\0\0"[..],
//!     &[0x26, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
//!     &[0, 0, 16, 0, 1, 0, 0, 0, 0x00, 0x00, 0xd9, 0xfe, 0, 0, 0, 0],
//!     &[1, 0, 32, 0, 0, 0, 0, 0],
//!     &[0x00, 0x60, 0x8c, 0x7d, 0, 0, 0, 0, 0xff, 0x6f, 0x8c, 0x7d, 0, 0, 0, 0],
//!     &[1, 8, 0, 0, 0, 0, 0x1d, 0],
//! ]
//! .concat();
//! table[9] = table.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
//!
//! let dmar = Dmar::new(&table)?;
//! assert_eq!(dmar.host_address_width, 39);
//! assert!(dmar.flags.interrupt_remapping());
//!
//! let usb = RequesterId::from_parts(0, 0x1d, 0).ok_or("no such device")?;
//! let unit = dmar.unit_of(0, usb, &NoBridges).ok_or("no unit")?;
//! assert_eq!(unit.registers.get(), 0xfed9_0000);
//!
//! let mut buffer = [PfnRange::covering(&ringfence_types::IovaRange::ALL); 8];
//! let reserved = merge_reserved(dmar.reserved_regions(0, usb, NoBridges), &mut buffer)?;
//! assert_eq!(reserved, [PfnRange::new(Pfn::new(0x7d8c6), 1).ok_or("empty")?]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod acpi;
mod bytes;
mod device_tree;
mod dmar;
mod endpoint;
mod error;
mod fdt;
mod id_mapping;
mod iort;
mod iort_node;
mod ivhd;
mod ivrs;
mod reserved;
mod rimt;
mod scope;
mod topology;
mod viot;

pub use acpi::AcpiHeader;
pub use device_tree::{DeviceTree, TreeDevice, TreeUnit, UnitKind, UnitLocation};
pub use dmar::{Dmar, DmarFlags, DmarStructure, Drhd, Rmrr};
pub use endpoint::Endpoint;
pub use error::{FirmwareError, FirmwareErrorKind};
pub use fdt::MAX_DEPTH;
pub use id_mapping::IdMapping;
pub use iort::{Iort, MAX_HOPS};
pub use iort_node::{IortNode, IortNodeKind, ItsGroup, Rmr, RootComplex, SmmuV3};
pub use ivhd::{AcpiUid, DeviceEntry, DeviceEntryKind, SpecialDevice};
pub use ivrs::{IvInfo, Ivhd, Ivmd, Ivrs, IvrsBlock, IvrsDevice};
pub use reserved::{
    HYPERTRANSPORT, ReservedRegion, TooManyRanges, Treatment, X86_INTERRUPTS, merge_reserved,
};
pub use rimt::{InterruptWire, IommuLocation, Rimt, RimtIommu, RimtNode, RimtNodeKind};
pub use scope::{DeviceScope, PathHop, ScopeKind, Scopes};
pub use topology::{BridgeBuses, NoBridges, PciTopology};
pub use viot::{Viot, ViotNode, ViotUnit};
