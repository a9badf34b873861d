//! A device in a process of its own, which has no memory of the guest's but what is mapped for it,
//! while it is (the fifth document, section 4.2).
//!
//! ```text
//! daemon, trusted                                         the process, not trusted
//!   disk_proxy.rs: registers, interrupts   -- orders, wire.rs -->   sandboxed_device.rs: the device and its rings
//!   grants.rs: windows, the table     -- control_region.rs -------->    sandbox_memory.rs: translation; copy.rs: accesses, and their faults
//!   supervisor.rs: every mmap, munmap <-- the kernel -----     mapper.rs: a thread that maps and unmaps
//! ```
//! What is guaranteed, by whom, and what is not: decision 0018.

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
