//! A transmit ring: the driver's record of each sent frame, and its polling.

use super::driver::{MAX_BUFFERS, Packet, check, lengths};
use super::layout::{FrameStatus, NicCompletion};
use crate::ring::{CompletionFault, OrderedRing, RawCompletion};

/// Record of a sent frame (`mlx4_en_tx_info`). It alone tells whether buffers are mapped; the
/// device's completion cannot change it.
#[derive(Debug)]
pub(super) enum TxInfo<H> {
    /// The frame is in its descriptor (`inl`). Nothing is mapped.
    Inline {
        /// Length of the frame in bytes.
        bytes: u32,
    },
    /// The frame is in mapped buffers.
    Mapped(Packet<H>),
}

impl<H> TxInfo<H> {
    fn lengths(&self) -> [u32; MAX_BUFFERS] {
        match self {
            Self::Inline { bytes } => [*bytes, 0],
            Self::Mapped(packet) => lengths(packet),
        }
    }

    /// Validates a completion against the record.
    #[inline]
    pub(super) fn check(
        raw: &RawCompletion,
        head: u32,
        info: &Self,
    ) -> Result<(NicCompletion, FrameStatus), CompletionFault> {
        check(raw, head, info.lengths())
    }
}

/// A transmit ring.
#[derive(Debug)]
pub(super) struct TxRing<H> {
    pub(super) ring: OrderedRing<TxInfo<H>>,
    /// True if a frame was mapped since the last doorbell.
    pub(super) unsynced: bool,
    /// Frames since the ring was allocated, modulo 2^32.
    poll_cnt: u32,
}

impl<H> TxRing<H> {
    pub(super) const fn new(ring: OrderedRing<TxInfo<H>>) -> Self {
        Self {
            ring,
            unsynced: false,
            poll_cnt: 0,
        }
    }

    /// Counts a frame. Returns true at every `moder`-th.
    pub(super) const fn poll_due(&mut self, moder: u32) -> bool {
        self.poll_cnt = self.poll_cnt.wrapping_add(1);
        moder <= 1 || self.poll_cnt.is_multiple_of(moder)
    }
}
