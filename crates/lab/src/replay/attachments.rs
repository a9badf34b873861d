//! A device of a replay and its attachments.

use ringfence_dma::flush::Flush;
use ringfence_dma::space::Space;
use ringfence_dma::{Attachment, Dma};
use ringfence_trace::DeviceIndex;
use ringfence_types::{Direction, DomainId, RequesterId};

use crate::ring::{RINGS, ring_index, ring_of};

/// A device that maps for the first time, for which a space is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachInfo {
    /// The domain that its translations are tagged with.
    pub domain: DomainId,
    /// Under which requester ID it makes its accesses.
    pub device: RequesterId,
    /// Its row among the trace's devices.
    pub index: DeviceIndex,
}

/// The attachments of a device, one a direction: in spaces without rings they are all the same.
#[derive(Debug, Clone, Copy)]
pub struct Attachments([Attachment; RINGS]);

impl Attachments {
    /// Those of `device`.
    #[inline(never)]
    pub fn new<S: Space, F: Flush<S, B>, B>(dma: &Dma<S, F, B>, device: Attachment) -> Self {
        let mut all = [device; RINGS];
        for direction in Direction::ALL {
            if let Some(ring) = dma.on_ring(&device, ring_of(direction)) {
                all[ring_index(direction)] = ring;
            }
        }
        Self(all)
    }

    /// The one for buffers of `direction`.
    #[inline]
    pub fn for_direction(&self, direction: Direction) -> &Attachment {
        &self.0[ring_index(direction)]
    }
}
