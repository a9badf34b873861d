//! A stock Debian guest whose devices live in this process: what it takes is found or fetched, then booted.
//!
//! Everything that is fetched comes from Debian's archive through an apt of its own, signatures checked, and stays in a cache: the
//! host's packages and sources are not touched, and no root is needed.

mod apt;
mod beside;
mod boot;
mod cpio;
mod error;
mod initramfs;
mod kernel;
mod machine;
mod module;
mod qemu;
mod reads;
mod viot;

pub use boot::{Boot, boot};
pub use error::GuestError;
pub use initramfs::{Initramfs, OwnModule, build as build_initramfs};
pub use kernel::{Kernel, LATEST};
pub use machine::{COUNTED_WORDS, ForeignIommu, IOMMU, Machine, PVIOMMU, Slot};
pub use module::build_module;
pub use qemu::Qemu;
pub use reads::{READ_BYTES, ReadTimes, timed_reads};
