//! The laboratory: modes, replay, oracle and meter.
//!
//! A trace comes in as operations ([`ringfence_trace`]); [`plan`] decides once for all modes what
//! happens when; [`mode_dispatch`] turns a mode's row of answers into types; [`replay`] performs
//! the plan with devices, hardware and [`oracle`]; [`meter`] times the layer alone; [`compare`]
//! runs both for each mode and puts its [`row`] together. [`experiments`] are the documents' own.
//! What rows say to people and programs is the crate above.

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
