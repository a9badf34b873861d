//! The meter: cycles by component, by ablation.
//!
//! A map plus an unmap take less time than two reads of the clock, so probes around components
//! would measure themselves. Instead the meter replays the whole trace several times. Each timed
//! replay replaces one more component by a stub that returns the recorded results of the real one,
//! in two orders. The cost of a component is the difference between two neighbours, so the
//! components add up to the whole by construction. The meter reports the mean of the two orders and
//! their spread.
//!
//! | replay | IOVA allocator | table | invalidation |
//! |---|---|---|---|
//! | `full` | real | real | real |
//! | `no_find` | real, without lookups | real | real |
//! | `a` | replayed | real | real |
//! | `at` | replayed | none | real |
//! | `ati` | replayed | none | none |
//! | `i` | real | real | none |
//! | `it` | real | none | none |
//! | `idle` | the replay's own loop | | |
//!
//! A ring is allocator and table in one. Its slots cannot exist without its entries, because the
//! entry tells whether a slot is free. For rings, the allocator is the cost that disappears when
//! slots come from a recording while the replay still fills and clears entries. The table is the
//! cost that disappears with the entries after that. `it` is a ring with recorded slots and without
//! invalidation: both orders remove the allocator before the table. A ring has no lookups.
//!
//! If a host owns the table, the table component includes the host's work for a request and its
//! invalidations. The layer itself then makes no invalidations, so `at` equals `ati` and `i`
//! equals `full`.
//!
//! A second set of timed replays splits a component between map and unmap. It reads the clock
//! between runs of maps and runs of unmaps; the meter uses only the ratio.

mod ablations;
mod components;
mod mapping_cache;
mod offloaded;
mod paged;
mod rings;
mod shadow;

pub(crate) use ablations::TIMED_REPLAYS;
pub use ablations::{Ablations, CONFIG_NAMES, Meter};
pub use components::{AblationOrders, Components, Cycles, SecondAblation};

pub use crate::alloc_trace::AllocTrace;
pub use crate::layer::{FreeInvalidator, LayerPlatform, TimedInvalidationQueue};
pub use crate::replay::{Clock, EmptyLoop, TimedReplay, cycles};
pub use crate::stubs::{
    FlushFor, FlushForRings, NoFind, NullTable, ReplayAlloc, ReplayRing, ReplayedAlloc,
    ReplayedRings, StaticStubs,
};
