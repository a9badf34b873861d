//! The replay of a plan.
//!
//! One loop performs the steps ([`Replay`] in `steps.rs`). Its [hooks](ReplayHooks) add the oracle
//! ([`CheckedReplay`]) or the clock ([`TimedReplay`]).

mod attackers;
mod bus;
mod checked;
mod hooks;
mod oracle_observer;
mod outcomes;
mod release_delays;
mod stalled;
mod steps;
mod timed;
mod ways;

pub use attackers::{AttackerKind, Attackers};
pub use checked::CheckedReplay;
pub use hooks::ReplayHooks;
pub use outcomes::{BufferExposure, Outcomes, RingOutcomes};
pub use release_delays::{Delays, ReleaseDelays};
pub use stalled::{StalledMap, StalledMaps};
pub use steps::{PlanResources, Replay};
pub use timed::DynTimedReplay;
#[cfg(test)]
pub(crate) use timed::counted;
pub use timed::{Clock, EmptyLoop, TimedReplay, cycles};
pub use ways::{BufferCounts, Buffers};
