//! Replays of hand-made traces whose counts can be derived by hand. All tests share one binary,
//! because building the layers of every mode takes long.

mod agreement;
mod cache_replays;
mod comparison;
mod composed;
mod copies;
mod descriptors;
mod failures;
mod families;
mod fence_copy;
mod guest_replays;
mod hostile;
mod hybrid;
mod large_entries;
mod machine;
mod placement;
mod plans;
mod pools;
mod recycling;
mod replays;
mod rings;
mod script;
mod sidecore;
mod sizes;
mod stubs;
mod xen;
mod xen_batches;
mod xen_limits;
