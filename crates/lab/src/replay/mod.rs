//! Replays under the oracle.

mod attached;
mod bus;
mod eye;
mod held;
mod judged;
mod outcomes;
mod stalled;

pub use attached::{Attached, Newcomer};
pub use held::Held;
pub use judged::{Judged, MakeSpace, Nobody};
pub use outcomes::{Exposure, Outcomes, RingOutcomes};
pub use stalled::{Stalled, Waiting};
