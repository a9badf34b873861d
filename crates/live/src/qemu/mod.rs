//! QEMU's view of the devices: command line and firmware table of a guest that uses them.

mod args;
mod viot;

pub use args::{COUNTED_WORDS, IOMMU, PVIOMMU, PciSlot, QemuArgs, QemuIommu, RIOMMU};
