//! Shadow buffers under a hostile device: what it reads, what reaches the driver, and the bounds of
//! the pool.

mod bad_input;
mod formats;
mod lent;
mod lent_model;
mod machine;
mod model;
mod pool;
mod transfers;
mod two_maps;
