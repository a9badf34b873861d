//! Hybrid copying under a hostile device: the division of buffers, their slots, and failures.

mod boundaries;
mod failures;
mod machine;
mod model;
mod slots;
mod transmit_batch;
