//! Table formats, one a file, with the bits as the hardware documents them.

mod calgary_tce;
mod vtd_second_stage;

pub use calgary_tce::CalgaryTce;
pub use vtd_second_stage::{Levels, SecondStage, Snoop};
