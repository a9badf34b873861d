//! Replays traces in modes: plan, replay, oracle and meter.
//!
//! [`ringfence_trace`] reads a trace as operations. [`plan`] decides once, for all modes, which
//! step happens at which time. [`mode_dispatch`] maps a mode to the types that implement it.
//! [`replay`] performs the plan with devices, hardware and the [`oracle`]. [`meter`] times the DMA
//! layer alone. [`compare`] runs both for each mode and builds its [`row`]. [`experiments`]
//! reproduce the papers' results. The `report` crate formats the rows.

pub mod compare;
pub mod compose;
mod dynamic;
mod error;
pub mod experiments;
pub mod guest;
pub mod hardware;
mod limits;
pub mod meter;
pub mod mode_dispatch;
pub mod modes;
pub mod oracle;
pub mod plan;
pub mod platform;
mod profile;
pub mod replay;
pub mod ring;
pub mod row;
mod runner;
pub mod size;
mod status;

pub use error::LabError;
pub use limits::ReplayLimits;
pub use profile::{Profile, ProfileError};
pub use status::ReplayStatus;
