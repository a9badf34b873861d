//! The document's adaptive radix tree: six sizes of node, inner and leaf, keys of 4 bits in the
//! root and 8 below it.
//!
//! Source: Tang et al., section 4.5, Table 6, Figures 7 to 9. [`Tree`] is the repaired one,
//! [`TreeAsPublished`] what is printed.

mod arena;
mod as_published;
mod fixed;
mod kind;
mod node;

pub use arena::{Census, NodeId};
pub use as_published::{Inserted, TreeAsPublished};
pub use fixed::{Tree, TreeError};
pub use kind::NodeKind;
