//! NVMe: a submission queue, a completion queue, physical region pages (NVM Express base
//! specification 2.0, sections 3.3 and 4.1; NVM command set specification 1.0, section 3.2).

mod controller;
mod layout;
mod queue;

pub use controller::NvmeController;
pub use layout::{COMMAND_BYTES, MAX_PAGES, NvmeCommand, NvmeCompletion, NvmeStatus, Opcode};
pub use queue::{NvmeAddresses, NvmeQueue};
