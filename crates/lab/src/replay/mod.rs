//! Replays under the oracle.

mod eye;
mod held;
mod judged;

pub use held::Held;
pub use judged::{Judged, MakeSpace, Nobody, Outcomes};
