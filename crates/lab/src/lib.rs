//! Replays traces in modes: plan, replay, oracle and meter.
//!
//! [`ringfence_trace`] reads a trace as operations. [`plan`] decides once, for all modes, which
//! step happens at which time. [`mode_dispatch`] maps a mode to the types that implement it; the
//! replays see them as one [`layer`]. [`replay`] performs the plan, with devices, hardware and the
//! [`oracle`] or with a clock. [`meter`] splits the measured cycles by component. [`compare`] runs
//! both for each mode and builds its [`row`]. The `report` crate formats the rows. [`testbed`]
//! gives attack scenarios the same layers and the same hardware.
//!
//! The bundled trace in two modes. With flushes in batches, an attacker reaches unmapped buffers:
//!
//! ```
//! use ringfence_lab::compare::{CompareOptions, compare};
//! use ringfence_lab::modes::Mode;
//! use ringfence_trace::{Operations, TraceOptions};
//!
//! let options = CompareOptions {
//!     modes: ["fence", "linux-lazy"].iter().filter_map(|name| Mode::find(name)).collect(),
//!     repetitions: 0, // no timed replay
//!     ..CompareOptions::new()
//! };
//! let sample = Operations::sample(TraceOptions::default())?;
//! let comparison = compare("sample", sample, &options, |_| {})?;
//! let stale = comparison.rows.iter().map(|row| row.violations.map(|found| found.stale));
//! let stale: Option<Vec<u64>> = stale.collect();
//! assert!(matches!(stale.as_deref(), Some([0, reached]) if *reached > 0));
//! # Ok::<(), ringfence_lab::LabError>(())
//! ```

#![deny(unsafe_code)]

pub mod agreement;
mod alloc_trace;
mod applicability;
pub mod compare;
pub mod components;
pub mod compose;
mod copy_threshold;
mod error;
mod family_dispatch;
pub mod guest;
pub mod hardware;
pub mod hybrid;
mod iommu_family;
pub mod layer;
mod limits;
mod line_rate;
mod machine;
pub mod mapping_cache;
pub mod meter;
pub mod mode_dispatch;
mod mode_thresholds;
pub mod modes;
mod options;
pub mod oracle;
pub mod plan;
mod profile;
mod queue_stats;
pub mod reached;
pub mod replay;
pub mod replay_platform;
pub mod ring;
pub mod round_trips;
pub mod row;
mod runner;
pub mod shadow;
pub mod sidecore;
pub mod size;
mod status;
mod stubs;
pub mod testbed;
mod withholds;
pub mod xen;

pub use copy_threshold::{TransferCosts, copy_threshold, transmit_threshold};
pub use error::LabError;
pub use iommu_family::IommuFamily;
pub use limits::ReplayLimits;
pub use line_rate::LineRate;
pub use machine::{Baseline, DeviceSide, MachineProfile, Operation, Prices, Reported};
pub use mode_thresholds::ModeThresholds;
pub use profile::{IotlbPrefetch, Profile, ProfileError};
pub use status::ReplayStatus;
