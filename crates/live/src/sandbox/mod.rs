//! Runs a device in a sandbox: a confined process, which maps only the guest pages that the IOMMU
//! grants to the device (the PVIOMMU paper, section 4.2). The daemon checks all that it sends.
//!
//! ```text
//! daemon (trusted)                                             sandbox process (not trusted)
//!   disk_proxy.rs: registers, interrupts   <- wire.rs ----------->  sandboxed_device.rs: device
//!   grants: windows, I/O page table        -- control region  ->  sandbox_memory.rs: translation
//!                                                                   copy.rs: accesses and faults
//!   grants: every mmap and munmap         <-- the kernel ---------  mapper.rs: maps and unmaps
//! ```
//!
//! Decision 0018 lists the guarantees, the component that gives each, and the limits.

pub mod copy;
mod disk_proxy;
mod filter;
mod limits;
pub mod mapper;
mod process;
mod resident;
mod sandbox_memory;
mod sandboxed_device;
mod wire;

pub use disk_proxy::{DiskProxy, ProxyEvent, ProxyEventHandler};
pub use process::{SandboxDisk, SandboxLink, SandboxProgram, start};
pub use sandbox_memory::{SandboxFault, SandboxMemory, SandboxView};
pub use sandboxed_device::{SandboxedDevice, enter, run_sandboxed_device};

pub use crate::grants::{
    Call, GrantError, Grants, LateThread, ProtocolViolation, StuckProcess, control_region, sys,
    windows,
};
