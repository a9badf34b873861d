//! The mapping layer against fakes that detect misuse. The tests use no IOMMU model, because the
//! layer and the unit communicate only through memory and the invalidation port.

mod bad_input;
mod batches;
mod bounce;
mod buffer_ownership;
mod caching;
mod coherent;
mod descriptors;
mod detach;
mod directions;
mod dma_ops_choice;
mod flush_queues;
mod hybrid;
mod invalidations;
mod link;
mod lists;
mod machine;
mod masks;
mod premapped;
mod retention;
mod rig;
mod roll_back;
mod shadow;
mod timers;
mod units;
