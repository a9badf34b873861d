//! Variants of Ringfence's components that are not for use in a product: algorithms as the papers
//! publish them, defects included, and prefetchers from the literature. Replays and experiments run
//! them to show the effect of a defect or the cost of an alternative.
//!
//! | type | paper | defect or purpose |
//! |---|---|---|
//! | [`LogicAsPublished`], [`ByValue`] | rIOMMU Fig. 10 | checks one byte, keeps a stale `next` |
//! | [`RingAsPublished`] | rIOMMU Fig. 11 | the ring driver overwrites live entries |
//! | [`BurstAsPublished`] | rIOMMU Fig. 11 | buffers come back before the burst's invalidation |
//! | [`DescriptorsAsPublished`] | F&S | pages come back before their descriptor's invalidation |
//! | [`BitmapAsPublished`] | Fujita and Moriai 2.3 | a page is reused before its flush |
//! | [`calgary`] | Calgary slides; Linux's driver | a failed TCE shoot-down passes for a flush |
//! | [`DeferredUnmaps`] | Fujita and Moriai Fig. 3 | memory of Linux's 40-byte records |
//! | [`whole_table_pages`] | EIOVAR section 7 | an unmap writes back whole table pages |
//! | [`LastTableAsPublished`] | PVIOMMU section 4.6 | the pointer finds entries of other pages |
//! | [`rtc`] | PVIOMMU section 4.5 | the radix-tree cache, as published and fixed |
//! | [`prefetch`] | Kandiraju and Sivasubramaniam | TLB prefetchers, compared with the rIOTLB |
//!
//! A fixed version of each defect is in a core crate, except for the radix-tree cache and the TCE
//! shoot-down, which have theirs here. No core crate depends on this one. Core traits are the
//! seams: [`RingLogic`](ringfence_hw::RingLogic),
//! [`RingDriver`](ringfence_dma::space::RingDriver),
//! [`ReusesUnflushed`](ringfence_dma::space::ReusesUnflushed),
//! [`LastTable`](ringfence_pviommu::backend::LastTable) and
//! [`ReverseCache`](ringfence_pviommu::rtc::ReverseCache).
//!
//! The as-published unit lets a device read past the end of a buffer:
//!
//! ```
//! use ringfence_hw::{FixedLogic, RingLogic};
//! use ringfence_papers::LogicAsPublished;
//!
//! // 64 bytes that begin at the last byte of a buffer of 64.
//! assert!(LogicAsPublished::is_inside(63, 64, 64));
//! assert!(!FixedLogic::is_inside(63, 64, 64));
//! ```
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod bitmap;
mod burst;
pub mod calgary;
mod deferred_unmaps;
mod descriptors;
mod last_table;
pub mod prefetch;
mod reclaim;
mod ring;
mod ring_entry;
mod ring_logic;
pub mod rtc;

pub use bitmap::{BitmapAsPublished, PublishedBitmapState};
pub use burst::BurstAsPublished;
pub use deferred_unmaps::{DeferredMemory, DeferredUnmaps, RbNode, StructIova};
pub use descriptors::{DescriptorsAsPublished, IncompleteDescriptors};
pub use last_table::LastTableAsPublished;
pub use reclaim::whole_table_pages;
pub use ring::RingAsPublished;
pub use ring_entry::{clear_as_published, store_as_published};
pub use ring_logic::{ByValue, LogicAsPublished};
