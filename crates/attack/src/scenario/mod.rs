//! One module per group of classes. A scenario executes a class on one mode.

pub(crate) mod alias;
pub(crate) mod ats;
pub(crate) mod batch;
pub(crate) mod cache;
pub(crate) mod direction;
pub(crate) mod emulated_device;
pub(crate) mod fabric;
mod forged_virtio;
pub(crate) mod freed_table;
mod hypercall;
pub(crate) mod iotlb;
pub(crate) mod page_request;
pub(crate) mod para_virtual;
pub(crate) mod posted;
pub(crate) mod recycled_address;
pub(crate) mod rings;
pub(crate) mod scan;
mod sharers;
pub(crate) mod sub_page;
pub(crate) mod toctou;
pub(crate) mod unbound;
pub(crate) mod unmapped;
pub(crate) mod window;
pub(crate) mod write_back;
pub(crate) mod wrong_unmap;

use ringfence_lab::LabError;

use crate::evidence::Found;

/// The result of a scenario, or the reason why it could not run.
pub(crate) type ScenarioResult = Result<Found, LabError>;
