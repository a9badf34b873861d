//! The spaces of modes with hybrid copying: a pool of copies, and the whole pages of large buffers
//! mapped themselves.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::{FromDevice, HybridPolicy, HybridSpace, ShadowDepot, SplitTable};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::Coherency;
use ringfence_types::{DomainId, PhysAddr};

use crate::components::{LeafCachedRadix, MagazineAlloc, ThreadCell, leaf_cached_radix};
use crate::error::LabError;
use crate::shadow::{CopyParts, paged, pool};

/// A space with hybrid copying.
pub type ReplayHybridSpace =
    HybridSpace<MagazineAlloc, LeafCachedRadix, ThreadCell<ShadowDepot>, ThreadCell<SplitTable>>;

/// The constructors of a mode with hybrid copying.
#[derive(Debug)]
pub struct HybridParts<F> {
    policy: HybridPolicy,
    flush: fn() -> F,
}

impl<F> Clone for HybridParts<F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for HybridParts<F> {}

impl<F> HybridParts<F> {
    /// Returns the constructors of a mode that copies every buffer until it has a
    /// [threshold](CopyParts::with_threshold).
    pub(crate) fn new(flush: fn() -> F) -> Self {
        Self {
            policy: HybridPolicy {
                // Devices of a replay fill their buffers.
                from_device: FromDevice::Unspecified,
                threshold: u64::MAX,
            },
            flush,
        }
    }
}

impl<F: FlushPolicy<ReplayHybridSpace, u64> + 'static> CopyParts for HybridParts<F> {
    type Table = LeafCachedRadix;
    type Space = ReplayHybridSpace;
    type Flush = F;

    fn with_threshold(self, bytes: u64) -> Self {
        let policy = HybridPolicy {
            threshold: bytes,
            ..self.policy
        };
        Self { policy, ..self }
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
        let table = leaf_cached_radix(domain, coherency, memory, frames, None)?;
        let (paged, root) = paged(table, memory, frames)?;
        let space = HybridSpace::new(paged, pool(domain)?, self.policy, RefCell::new);
        Ok((space, root))
    }
}
