//! Nested translation: a first stage, which a guest owns, over a second stage, which its host owns
//! (VT-d specification, section 3.8; rIOMMU section 2.1).
//!
//! The first stage translates an IOVA to a guest-physical address. All addresses in its tables are
//! guest-physical too, so each of its levels needs a walk of the second stage. With four levels in
//! both, a walk without caches reads 24 words: five walks of the second stage and four entries of
//! the first.
//!
//! | file | content |
//! |---|---|
//! | `view.rs` | the guest's memory as the unit reads it, through the second stage |
//! | `cache.rs` | the IOTLB of combined translations, and a cache of the second stage |
//! | `fault.rs` | faults with the stage that stopped the access |
//! | `invalidation.rs` | invalidations by each stage |
//! | `unit.rs` | [`NestedUnit`] |

mod cache;
mod fault;
mod invalidation;
mod unit;
mod view;

pub use fault::{NestedFault, Stage};
pub use invalidation::NestedInvalidation;
pub use unit::{NestedStats, NestedUnit, NestedUnitConfig};
