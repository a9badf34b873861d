//! The mapping layer against fakes that punish misuse: no hardware here, which it never meets but
//! in memory.

mod bad_input;
mod batches;
mod bounce;
mod coherent;
mod custody;
mod detach;
mod directions;
mod invalidations;
mod lists;
mod masks;
mod premapped;
mod rig;
mod roll_back;
mod units;
