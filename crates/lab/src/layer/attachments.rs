//! The attachments of a device.
//!
//! In a replay, each (device, direction) has one ring, so the direction determines the ring number
//! ([`ring_of`]). Decision 0012 gives the reason.

use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::Space;
use ringfence_dma::{Attachment, Dma};
use ringfence_types::{Direction, RingId};

/// Number of rings of a device in a replay.
pub const RINGS: usize = Direction::ALL.len();

/// Returns the index of the ring for the buffers of a direction, among a device's rings.
#[inline]
pub const fn ring_index(direction: Direction) -> usize {
    match direction {
        Direction::ToDevice => 0,
        Direction::FromDevice => 1,
        Direction::Bidirectional => 2,
    }
}

/// Returns the ring ID for the buffers of a direction.
#[inline]
pub const fn ring_of(direction: Direction) -> RingId {
    RingId::new(ring_index(direction) as u16)
}

/// The attachments of a device, one for each direction. Without rings, all are the same.
#[derive(Debug, Clone, Copy)]
pub struct Attachments([Attachment; RINGS]);

impl Attachments {
    /// Returns the attachments of `device`.
    #[inline(never)]
    pub fn new<S: Space, F: FlushPolicy<S, B>, B>(dma: &Dma<S, F, B>, device: Attachment) -> Self {
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
