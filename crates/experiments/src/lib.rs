//! Repeats the experiments of the papers, one module each, and compares their published numbers.
//!
//! [`Experiment`] runs one experiment by its id and derives the [`Verdict`] of its [`Finding`].
//! [`published`] holds the numbers that the papers print, and [`model`] their throughput model. The
//! experiments use the replays and meters of `ringfence_lab`; the `report` crate formats findings.
//!
//! ```
//! use ringfence_experiments::{Experiment, Setting, Verdict};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let cached = Experiment::find("X10").ok_or("unknown experiment")?;
//! let finding = cached.run(&Setting::smoke())?;
//! assert_eq!(finding.source, "EIOVAR Table 1");
//! assert_eq!(finding.verdict, Verdict::Reproduced);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod allocators;
mod benchmarks;
mod capture;
mod catalogue;
mod claim_loads;
mod experiment;
mod figure;
mod finding;
pub mod guest_loads;
pub mod guests;
mod history;
mod loops;
pub mod model;
mod owned;
mod packet_loop;
mod page_reuse_workload;
pub mod prefetch;
pub mod published;
pub mod reuse;
mod setting;
mod stream;
mod substitution;
mod timed;
mod transactions;
mod x01_breakdown;
mod x02_model;
mod x03_benchmarks;
mod x04_latency;
mod x05_passthrough;
mod x06_misses;
mod x07_prefetchers;
mod x08_ahci;
mod x09_bursts;
mod x10_cached_node;
mod x11_search_length;
mod x12_freelists_strict;
mod x13_freelists_deferred;
mod x14_eiovar;
mod x15_sweeps;
mod x16_live_set;
mod x17_freebsd;
mod x18_fujita;
mod x19_flush_memory;
mod x20_calgary;
mod x21_guests;
mod x22_page_reuse;
mod x23_radix_tree;
mod x24_residency;
mod x25_host_side;
mod x26_windows;
mod x27_copies;
mod x28_pools;
mod x29_iommus;

pub use experiment::Experiment;
pub use figure::{Figure, Series};
pub use finding::{
    Finding, FindingRow, Findings, Measured, NullModel, NullScore, OrderScore, Published,
    Requirement, Score, TOLERANCE, Unjudged, Verdict,
};
pub use setting::Setting;
