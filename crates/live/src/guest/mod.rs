//! A stock Debian guest whose devices live in this process: what it takes is found or fetched, then
//! booted.
//!
//! Everything that is fetched comes from Debian's archive through an apt of its own, signatures
//! checked, and stays in a cache: the host's packages and sources are not touched, and no root is
//! needed.

mod apt;
mod bench_read;
mod boot;
mod cpio;
mod error;
mod idle_spinner;
mod initramfs;
mod kernel;
mod module;
mod qemu;
mod qemu_args;
mod viot;

pub use bench_read::{READ_BYTES, ReadTimes, bench_reads};
pub use boot::{Boot, boot};
pub use error::GuestError;
pub use initramfs::{Initramfs, OwnModule, build as build_initramfs};
pub use kernel::{Kernel, LATEST};
pub use module::build_module;
pub use qemu::Qemu;
pub use qemu_args::{COUNTED_WORDS, IOMMU, PVIOMMU, PciSlot, QemuArgs, QemuIommu};
