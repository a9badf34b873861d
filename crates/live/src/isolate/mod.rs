//! A device in a process of its own, which has no memory of the guest's but what is mapped for it, while it is (the fifth document, section 4.2).
//!
//! ```text
//! daemon, trusted                                         the process, not trusted
//!   front.rs: registers, interrupts   -- orders, wire.rs -->   simulator.rs: the device and its rings
//!   grants.rs: windows, the table     -- board.rs -------->    reach.rs: translation; copy.rs: accesses, and their faults
//!   supervisor.rs: every mmap, munmap <-- the kernel -----     mapper.rs: a thread that maps and unmaps
//! ```
//! What is guaranteed, by whom, and what is not: decision 0018.

pub mod board;
mod call;
pub mod copy;
mod filter;
mod front;
mod grants;
mod lateness;
mod life;
mod limits;
pub mod mapper;
mod process;
mod reach;
mod simulator;
mod supervisor;
pub mod sys;
pub mod windows;
mod wire;

pub use call::Call;
pub use front::{Front, Said, Tell};
pub use grants::{GrantError, Grants, Undead};
pub use process::{Image, Link, Program, start};
pub use reach::{Reach, Stopped, View};
pub use simulator::{Simulator, enter, simulate};
pub use supervisor::Breach;
