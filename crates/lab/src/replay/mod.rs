//! Replays that the oracle checks.

mod attachments;
mod bus;
mod checked;
mod mapping_token;
mod oracle_observer;
mod outcomes;
mod stalled;

pub use attachments::{AttachInfo, Attachments};
pub use checked::{CheckedReplay, MakeSpace, NoAttacker};
pub use mapping_token::MappingToken;
pub use outcomes::{Exposure, Outcomes, RingOutcomes};
pub use stalled::{StalledMap, StalledMaps};
