//! A stock Debian guest whose devices this process serves: finds or downloads its parts and boots
//! it.
//!
//! All downloads come from Debian's archive through a private apt, with signatures checked, and
//! stay in a cache. The host's packages and sources stay unchanged, and no root privileges are
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
