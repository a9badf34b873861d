//! Replays under the oracle.

mod attachments;
mod bus;
mod oracle_observer;
mod mapping_token;
mod checked;
mod outcomes;
mod stalled;

pub use attachments::{Attachments, AttachInfo};
pub use mapping_token::MappingToken;
pub use checked::{CheckedReplay, MakeSpace, NoAttacker};
pub use outcomes::{Exposure, Outcomes, RingOutcomes};
pub use stalled::{StalledMaps, StalledMap};
