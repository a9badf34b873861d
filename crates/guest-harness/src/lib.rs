//! Development tools around a live guest: they boot it, measure in it, and compare it with QEMU.
//!
//! [`boot`](boot()) runs a stock Debian guest whose devices `ringfence-live` serves. All downloads
//! come from Debian's archive through a private apt, with signatures checked, and stay in a cache.
//! The host's packages and sources stay unchanged, and no root privileges are needed.
//! [`differential`] compares the software IOMMU with QEMU's, and [`bench_reads`], [`bench_stream`]
//! and [`bench_round_trips`] measure inside a guest.
//!
//! A debug kernel reports defects of a module on its console. They fail a guest that ended well:
//!
//! ```
//! use ringfence_guest_harness::{GuestError, check_kernel_log};
//!
//! # let scratch = tempfile::tempdir()?;
//! # let dir = scratch.path();
//! // `boot` writes the console of the machine in `dir` to this file.
//! std::fs::write(
//!     dir.join("console.log"),
//!     "[    1.500000] riommu: loading out-of-tree module\n\
//!      [    2.000000] BUG: KASAN: slab-out-of-bounds in riommu_map+0x40/0x90 [riommu]\n",
//! )?;
//! let mut shown = Vec::new();
//! let ended = Ok(0);
//! match check_kernel_log(dir, ended, &mut |line| shown.push(line.to_owned())) {
//!     Err(GuestError::Reported { reports, .. }) => {
//!         assert_eq!(reports.len(), 1);
//!         assert!(reports[0].starts_with("BUG: KASAN: slab-out-of-bounds"));
//!     }
//!     other => panic!("{other:?}"),
//! }
//! assert_eq!(shown.len(), 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]
#![warn(missing_docs)]

mod apt;
mod architecture;
mod bench_net;
mod bench_read;
mod boot;
mod cpio;
mod debug_kernel;
pub mod differential;
mod error;
mod idle_spinner;
mod initramfs;
mod kernel;
mod kernel_log;
mod linux;
mod module;
mod qemu;
mod queue_pairs;
mod rust;

pub use architecture::Architecture;
pub use bench_net::{
    DATAGRAMS_BEFORE, DISCARD, ECHO, STREAM_BYTES, bench_round_trips, bench_stream,
};
pub use bench_read::{READ_BYTES, ReadTimes, Reads, bench_reads};
pub use boot::{Boot, boot};
pub use debug_kernel::prepare_debug_kernel;
pub use error::GuestError;
pub use initramfs::{Initramfs, OwnModule, build as build_initramfs};
pub use kernel::{DEBUG_KERNEL, Kernel, LATEST};
pub use kernel_log::{LOG_WORDS, check_kernel_log};
pub use linux::{archive_with_command, prepare_linux};
pub use module::build_module;
pub use qemu::Qemu;
pub use queue_pairs::set_queue_pairs;
pub use rust::prepare_rust;
