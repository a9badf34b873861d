//! Virtio devices for an unmodified guest, each behind a virtio-iommu, served to QEMU over
//! vfio-user.
//!
//! From the outside in: `ringfence-vfio-user` is the protocol, and [`Session`] is one client's
//! connection.
//! `virtio` and `pci` implement the PCI function that the client drives. [`dma`] is a device's
//! access to the guest's memory. None of these uses a socket: [`server`] does.
//!
//! A daemon serves a disk and a random generator, and prints the arguments for QEMU:
//!
//! ```
//! use std::sync::Arc;
//!
//! use ringfence_live::access::SocketAccess;
//! use ringfence_live::daemon::{Daemon, DeviceOptions, Disk, Log, VfioUserDevices};
//!
//! # let scratch = tempfile::tempdir()?;
//! # let image = scratch.path().join("disk.img");
//! # std::fs::write(&image, vec![0; 1 << 20])?;
//! let dir = scratch.path().join("sockets");
//! SocketAccess::OwnUser.make_directory(&dir)?;
//! let devices = VfioUserDevices {
//!     disk: Some(Disk::new(&image)),
//!     entropy: true,
//!     ..VfioUserDevices::default()
//! };
//! let log: Log = Arc::new(|device, event| eprintln!("{device}: {event:?}"));
//! let mut daemon = Daemon::start(&dir, &DeviceOptions::from(devices), &log)
//!     .map_err(|(path, error)| format!("{}: {error}", path.display()))?;
//!
//! let machine = daemon.qemu_args_mut();
//! assert!(machine.socket("blk").exists() && machine.socket("rng").exists());
//! let arguments = machine.device_arguments().map_err(|(_, error)| error)?;
//! assert!(arguments.join(" ").contains("vfio-user-pci"));
//! // Start QEMU with them. `metrics.sock` serves the counters meanwhile.
//! assert!(daemon.metrics().contains("blk"));
//!
//! daemon.stopper().stop();
//! daemon.join()?;
//! assert!(!dir.join("blk.sock").exists());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod access;
pub mod assigned;
pub mod confine;
pub mod counter_table;
pub mod counters;
pub mod daemon;
mod delay_timer;
pub mod dma;
pub mod dma_fault_injection;
mod event;
mod grants;
pub mod handover;
pub mod host;
pub mod iommu;
mod irq;
pub mod limits;
pub mod link;
mod memory;
pub mod nvme;
mod pci;
mod privileges;
pub mod pviommu;
pub mod qemu;
mod record;
pub mod riommu;
pub mod sandbox;
mod saved_state;
mod seccomp;
pub mod server;
mod session;
mod stale_socket;
pub mod vhost_user;
pub mod virtio;

pub use memory::{GuestRam, Locked, MAX_RANGES, MemoryError, MemoryRules, RangeSource};
pub use session::{
    CONFIG_REGION, ERROR_IRQ, Function, FunctionError, IRQ_KINDS, MSIX_IRQ, Outcome, REGIONS,
    Refusal, Region, Session,
};
