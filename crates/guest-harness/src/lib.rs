//! Development tools around a live guest: they boot it, measure in it, and compare it with QEMU.
//!
//! [`boot`](boot()) runs a stock Debian guest whose devices `ringfence-live` serves. All downloads
//! come from Debian's archive through a private apt, with signatures checked, and stay in a cache.
//! The host's packages and sources stay unchanged, and no root privileges are needed.
//! [`differential`] compares the software IOMMU with QEMU's, and [`bench_reads`] measures reads
//! inside a guest.
#![deny(unsafe_code)]
#![warn(missing_docs)]

mod apt;
mod architecture;
mod bench_read;
mod boot;
mod cpio;
pub mod differential;
mod error;
mod idle_spinner;
mod initramfs;
mod kernel;
mod linux;
mod module;
mod qemu;
mod rust;

pub use architecture::Architecture;
pub use bench_read::{READ_BYTES, ReadTimes, bench_reads};
pub use boot::{Boot, boot};
pub use error::GuestError;
pub use initramfs::{Initramfs, OwnModule, build as build_initramfs};
pub use kernel::{Kernel, LATEST};
pub use linux::{archive_with_command, prepare_linux};
pub use module::build_module;
pub use qemu::Qemu;
pub use rust::prepare_rust;
