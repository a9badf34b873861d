//! Runs a device in a sandbox: a confined process, which maps only the guest pages that the IOMMU
//! grants to the device (the PVIOMMU paper, section 4.2). The daemon checks all that it sends.
//!
//! ```text
//! daemon (trusted)                                             sandbox process (not trusted)
//!   disk_proxy.rs: registers, interrupts   <- wire.rs ----------->  sandboxed_device.rs: device
//!   grants.rs: windows, I/O page table     -- control_region.rs ->  sandbox_memory.rs: translation
//!                                                                   copy.rs: accesses and faults
//!   supervisor.rs: every mmap and munmap  <-- the kernel ---------  mapper.rs: maps and unmaps
//! ```
//!
//! Decision 0018 lists the guarantees, the component that gives each, and the limits.

mod call;
mod child;
pub mod control_region;
pub mod copy;
mod disk_proxy;
mod filter;
mod grants;
mod lateness;
mod limits;
pub mod mapper;
mod process;
mod sandbox_memory;
mod sandboxed_device;
mod supervisor;
pub mod sys;
pub mod windows;
mod wire;

pub use call::Call;
pub use disk_proxy::{DiskProxy, ProxyEvent, ProxyEventHandler};
pub use grants::{GrantError, Grants, StuckProcess};
pub use process::{SandboxDisk, SandboxLink, SandboxProgram, start};
pub use sandbox_memory::{SandboxFault, SandboxMemory, SandboxView};
pub use sandboxed_device::{SandboxedDevice, enter, run_sandboxed_device};
pub use supervisor::ProtocolViolation;
