//! Statements of the virtio-iommu specification (virtio 1.3, section 5.13), checked on any device
//! behind the interface [`Subject`].
//!
//! Each [`Statement`] has an id, a section and a [`Level`], and creates its own devices
//! ([`Make`]), so that none depends on another. It never panics: it returns [`Verdict::Pass`],
//! [`Verdict::Fail`] with the last observation, or [`Verdict::NotApplicable`] with a reason.
//!
//! ```
//! use ringfence_virtio_iommu_conformance::{STATEMENTS, Setup, Subject, Verdict};
//!
//! // An implementation that supports no setup.
//! let make = |_: &Setup| -> Result<Box<dyn Subject>, String> { Err("no device".into()) };
//! for statement in STATEMENTS {
//!     assert_eq!(statement.run(&make), Verdict::NotApplicable("no device".into()));
//! }
//! ```
//!
//! `examples/naive` has a whole device and its adapter.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod attach;
mod bypass;
mod config;
mod driver;
mod events;
mod map;
mod probe;
mod regions;
mod requests;
mod robustness;
pub mod spec;
mod statement;
mod subject;
mod unmap;

pub use statement::{Level, STATEMENTS, Statement, Verdict};
pub use subject::{Access, GuestLimits, Make, NotReturned, Outcome, Region, Setup, Subject};
