//! A device of a replay and its attachments.

use ringfence_dma::flush::Flush;
use ringfence_dma::space::Space;
use ringfence_dma::{Attachment, Dma};
use ringfence_trace::DeviceIndex;
use ringfence_types::{Direction, DomainId, RequesterId};

use crate::ring::{RINGS, ring_index, ring_of};

/// A device that maps for the first time and needs a space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachInfo {
    /// Domain that tags its translations.
    pub domain: DomainId,
    /// Requester ID of its accesses.
    pub device: RequesterId,
    /// Index in the trace's device list.
    pub index: DeviceIndex,
}

/// The attachments of a device, one for each direction. Without rings, all are the same.
#[derive(Debug, Clone, Copy)]
pub struct Attachments([Attachment; RINGS]);

impl Attachments {
    /// Returns the attachments of `device`.
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

    /// Returns the attachment for buffers of `direction`.
    #[inline]
    pub fn for_direction(&self, direction: Direction) -> &Attachment {
        &self.0[ring_index(direction)]
    }
}
