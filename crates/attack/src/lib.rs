//! Attack classes A01 to A38, executed on every mode under the oracle.
//!
//! A [scenario](class) drives the DMA layer and the modelled hardware of one mode: a driver maps
//! and unmaps, and a device makes accesses that it should not make. The oracle of physical bytes
//! judges every access. [`run`] executes classes on modes; each [`Cell`] holds the measured counts
//! and the outcome that the mode's properties [predict](expect).
//!
//! A device that accesses a buffer after its unmap, with strict and with deferred invalidations:
//!
//! ```
//! use ringfence_attack::{Class, Options, Status, run};
//! use ringfence_lab::modes::Mode;
//!
//! let modes = ["linux-strict", "linux-lazy"].map(|name| Mode::find(name).expect("a named mode"));
//! let class = Class::find("A02").expect("a class");
//! let matrix = run(&modes, &[class], &Options::default(), |_| Ok(()))?;
//! let found: Vec<Status> = matrix.row("A02").map(|cell| cell.status).collect();
//! assert_eq!(found, [Status::Stopped, Status::Succeeded]);
//! // Both outcomes are those that the modes promise.
//! assert_eq!(matrix.unexpected().count(), 0);
//! # Ok::<(), ringfence_lab::LabError>(())
//! ```
#![forbid(unsafe_code)]

mod bench;
pub mod class;
mod departures;
mod device_tlb;
mod evidence;
pub mod expect;
mod guest_host;
mod matrix;
mod scenario;
mod shipped;
pub mod untried;

pub use class::{CLASSES, Class};
pub use evidence::{Evidence, Executed, Found, Trial};
pub use matrix::{Cell, Matrix, Options, Status, run};
