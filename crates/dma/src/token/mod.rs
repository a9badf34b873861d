//! Tokens of mappings: who owns a buffer, and what a device may still reach.
//!
//! These types are the states of a mapping (docs/ARCHITECTURE.md). They import no other module of
//! the crate; every other module may import them.
//!
//! | file | one concept |
//! |---|---|
//! | `attachment.rs` | a device in a domain, and the limits of its addresses |
//! | `mapping.rs` | live mappings |
//! | `unmap_states.rs` | mappings from their unmap to the return of the buffer |

mod attachment;
mod mapping;
mod unmap_states;

pub use attachment::{AddressLimits, Attachment};
pub use mapping::{BounceSlot, DmaSegment, MapResult, Mapping};
pub use unmap_states::{
    BurstKey, ClearedRange, NotInvalidated, Outcome, PendingUnmap, Released, ReleasedOrWithheld,
    ReleasedStale, StillMapped, Withheld,
};

pub(crate) use attachment::DomainHandle;
pub(crate) use mapping::{HeldBuffer, LiveMapping};
