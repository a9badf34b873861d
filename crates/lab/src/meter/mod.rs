//! The meter: cycles by component, by telescoping ablation.
//!
//! A map and an unmap together take less time than reading the clock twice, so probes around
//! components would measure themselves. Instead the whole trace is replayed with one component
//! after the other replaced by a stub that answers what the real one answered, in two orders; what
//! a component costs is the difference between two neighbours, so the components add up to the
//! whole by construction. The mean of the two orders is reported, and their spread.
//!
//! | replica | IOVA allocator | table | invalidation |
//! |---|---|---|---|
//! | `full` | real | real | real |
//! | `no_find` | real, but asked for no find | real | real |
//! | `a` | recorded | real | real |
//! | `at` | recorded | none | real |
//! | `ati` | recorded | none | none |
//! | `i` | real | real | none |
//! | `it` | real | none | none |
//! | `idle` | the replay's own loop | | |
//!
//! A ring is allocator and table in one, and there is no way to have its slots without its entries:
//! whether a slot is free is what its entry says. There the allocator is what goes when slots come
//! from a recording while entries are filled and cleared as ever; the table is what goes with them
//! after that. `it` is such a ring without invalidation: in both orders the allocator is taken away
//! before the table. A ring is asked for no find.
//!
//! Where a host keeps the table, what it does for a request is part of the table, its invalidations
//! included: the layer has none of its own, so that `at` is `ati` and `i` is `full`.
//!
//! The split of a component between map and unmap comes from a second set of replicas that reads
//! the clock where runs of maps and runs of unmaps meet; only the ratio is taken from there.

mod ablations;
mod clock;
mod components;
mod dyn_replay;
mod queue;
mod ring_stubs;
mod rtc;
mod stubs;
mod timed_replay;
mod tsc;

pub(crate) use ablations::{AblationSet, TIMED_REPLAYS};
pub use ablations::{Ablations, CONFIG_NAMES, Meter};
pub use clock::Clock;
pub use components::{AblationOrders, Components, Cycles, SecondAblation};
pub(crate) use dyn_replay::{
    DynTimedReplay, free_invalidator, host_platform, invalidation_queue, timed_platform,
};
pub use queue::InvalidationQueue;
pub use ring_stubs::{FlushForRings, ReplayRing, ReplayedRings};
pub use stubs::{
    AllocTrace, FreeInvalidator, NoFind, NullTable, ReplayAlloc, ReplayedAlloc, StaticStubs,
};
pub(crate) use timed_replay::PlanResources;
pub use timed_replay::{EmptyLoop, TimedPlatform, TimedReplay};
pub use tsc::cycles;

use ringfence_dma::flush::Flush;
use ringfence_dma::space::{IoPageTable, Paged};

/// A flush policy that fits an allocator and a table, real or stubbed.
pub trait FlushFor<A: ReplayAlloc, T: IoPageTable>:
    Flush<Paged<A, T>, u64>
    + Flush<Paged<A::NoFind, T>, u64>
    + Flush<Paged<A::Replayed, T>, u64>
    + Flush<Paged<A::Replayed, NullTable>, u64>
    + Flush<Paged<A, NullTable>, u64>
{
}

impl<A: ReplayAlloc, T: IoPageTable, F> FlushFor<A, T> for F where
    F: Flush<Paged<A, T>, u64>
        + Flush<Paged<A::NoFind, T>, u64>
        + Flush<Paged<A::Replayed, T>, u64>
        + Flush<Paged<A::Replayed, NullTable>, u64>
        + Flush<Paged<A, NullTable>, u64>
{
}
