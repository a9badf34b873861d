//! The spaces of modes that copy small buffers only: a pool of copies, and large buffers mapped
//! themselves, with or without the pages that they share.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::{
    FromDevice, HybridPolicy, HybridSpace, ShadowDepot, SharedPages, SplitTable, Thresholds,
};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, PhysAddr};

use crate::components::{
    LeafCachedRadix, MagazineAlloc, MakeTable, ReplayTable, ThreadCell, leaf_cached_radix,
};
use crate::copy_threshold::{copy_threshold, transmit_threshold};
use crate::error::LabError;
use crate::modes::{Alloc, FlushKind, Mode};
use crate::profile::Profile;
use crate::shadow::{CopyParts, paged, pool};
use crate::withholds::Withholds;

/// A space with hybrid copying.
pub type ReplayHybridSpace =
    HybridSpace<MagazineAlloc, LeafCachedRadix, ThreadCell<ShadowDepot>, ThreadCell<SplitTable>>;

/// The constructors of a mode with hybrid copying.
#[derive(Debug)]
pub struct HybridParts<F> {
    policy: HybridPolicy,
    /// True if transmit buffers share invalidations.
    batches: bool,
    flush: fn() -> F,
    table: MakeTable<LeafCachedRadix>,
}

impl<F> Clone for HybridParts<F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for HybridParts<F> {}

impl<F> HybridParts<F> {
    /// Returns the constructors of `mode`, which copies every buffer until it has
    /// [thresholds](CopyParts::with_thresholds).
    pub(crate) fn new(mode: &Mode, flush: fn() -> F) -> Self {
        Self {
            policy: HybridPolicy {
                // Devices of a replay fill their buffers.
                from_device: FromDevice::Unspecified,
                thresholds: Thresholds::both(u64::MAX),
                shared_pages: shared_pages(mode),
            },
            batches: has_batches(mode),
            flush,
            table: LeafCachedRadix::with_page_size(leaf_cached_radix, mode.page_size),
        }
    }
}

/// Returns the sizes from which `mode` maps a buffer on the machine of `profile`; `None` if it does
/// not choose by size.
pub(crate) fn thresholds(mode: &Mode, profile: &Profile) -> Option<Thresholds> {
    let hybrid = matches!(mode.alloc, Alloc::ShadowHybrid | Alloc::ShadowOrMap);
    hybrid.then(|| thresholds_of(shared_pages(mode), has_batches(mode), profile))
}

fn thresholds_of(shared_pages: SharedPages, batches: bool, profile: &Profile) -> Thresholds {
    let receive = copy_threshold(profile, shared_pages);
    Thresholds {
        receive,
        transmit: match batches {
            true => transmit_threshold(profile, shared_pages),
            false => receive,
        },
    }
}

/// Returns the treatment of the pages that a large buffer shares with other data.
pub(crate) fn shared_pages(mode: &Mode) -> SharedPages {
    match mode.alloc {
        Alloc::ShadowOrMap => SharedPages::Mapped,
        _ => SharedPages::Copied,
    }
}

fn has_batches(mode: &Mode) -> bool {
    mode.flush == FlushKind::TransmitBatch
}

/// Returns the buffers that the descriptors of `mode` withhold on the machine of `profile`; `None`
/// if its driver has no descriptors.
///
/// In a batch with copies, the driver has a copied buffer back at its unmap, so it counts the
/// others alone. A mode that copies parts of pages counts all buffers.
pub fn withholds(mode: &Mode, profile: &Profile) -> Option<Withholds> {
    let counts_mapped = has_batches(mode) && mode.alloc == Alloc::ShadowOrMap;
    mode.has_descriptors().then(|| match counts_mapped {
        true => Withholds::TransmitFrom(transmit_threshold(profile, SharedPages::Mapped)),
        false => Withholds::All,
    })
}

impl<F: FlushPolicy<ReplayHybridSpace, u64> + 'static> CopyParts for HybridParts<F> {
    type Table = LeafCachedRadix;
    type Space = ReplayHybridSpace;
    type Flush = F;

    fn with_thresholds(self, thresholds: Thresholds) -> Self {
        let policy = HybridPolicy {
            thresholds,
            ..self.policy
        };
        Self { policy, ..self }
    }

    fn with_costs(self, profile: &Profile) -> Self {
        let shared_pages = self.policy.shared_pages;
        self.with_thresholds(thresholds_of(shared_pages, self.batches, profile))
    }

    fn withholds(self) -> Withholds {
        match (self.batches, self.policy.shared_pages) {
            (true, SharedPages::Mapped) => Withholds::TransmitFrom(self.policy.thresholds.transmit),
            _ => Withholds::All,
        }
    }

    fn flush(self) -> F {
        (self.flush)()
    }

    fn space(
        self,
        domain: DomainId,
        coherency: Coherency,
        memory: &Rc<Arena>,
        frames: &Frames<Rc<Arena>>,
        _: Option<&()>,
    ) -> Result<(ReplayHybridSpace, PhysAddr), LabError> {
        let table = (self.table)(domain, coherency, memory, frames, None)?;
        let (paged, root) = paged(table, memory, frames)?;
        let space = HybridSpace::new(paged, pool(domain)?, self.policy, RefCell::new);
        Ok((space, root))
    }
}
