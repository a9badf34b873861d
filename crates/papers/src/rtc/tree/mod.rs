//! The PVIOMMU paper's adaptive radix tree: six sizes of nodes, inner and leaf, with keys of 4 bits
//! in the root and 8 bits below it.
//!
//! Source: Tang et al., section 4.5, Table 6, Figures 7 to 9. [`Tree`] is the fixed tree,
//! [`TreeAsPublished`] the published one.

mod arena;
mod as_published;
mod fixed;
mod kind;
mod node;

pub use arena::{NodeCounts, NodeId};
pub use as_published::{Inserted, TreeAsPublished};
pub use fixed::{Tree, TreeError};
pub use kind::NodeKind;
