//! Hand-over of a network device to another process.
//!
//! Between two turns, frames may be in transit. One received frame may wait for a buffer. Frames
//! that the link did not accept are in the driver's rings. The link may hold a partial frame. The
//! state contains all of them, so a hand-over neither loses nor duplicates a frame.

use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::sync::Arc;

use super::steering::Steering;
use super::{F_MQ, FLOWS, HEADER_BYTES, MAX_PAIRS, Net, ReceivedFrame};
use crate::counters::DeviceCounters;
use crate::link::{self, LinkState, MAX_FRAME_BYTES, MIN_FRAME_BYTES, NetLink};
use crate::saved_state::{HandOverBlocker, Reader, SaveState, StateError, Writer, save_fields};

/// State of a network device, without its registers.
#[derive(Debug)]
pub struct NetState {
    /// MAC address, in the order of transmission.
    pub mac: [u8; 6],
    /// Offered queue pairs.
    pub offered: u16,
    /// Queue pairs that the driver uses.
    pub active: u16,
    /// For each class of flows, the pair on which the driver last sent a frame, or
    /// [`NO_PAIR`](super::NO_PAIR).
    pub flows: [u8; FLOWS],
    /// Received frame that waits for a buffer.
    pub pending_frame: Option<PendingFrameState>,
    /// One bit for each pair with frames in the driver's ring that the link did not accept.
    pub waiting: u16,
    /// State of the link.
    pub link: LinkState,
}

/// A received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingFrameState {
    /// Bytes of the frame.
    pub frame: Vec<u8>,
    /// Queue pair that the frame belongs to.
    pub pair: u16,
}

save_fields!(NetState {
    mac,
    offered,
    active,
    flows,
    pending_frame,
    waiting,
    link
});

save_fields!(PendingFrameState {
    frame: blob("frame length", MAX_FRAME_BYTES),
    pair
});

impl<L: NetLink> Net<L> {
    pub(super) fn state(&self) -> Result<NetState, HandOverBlocker> {
        let held = self.received.map(|held| PendingFrameState {
            frame: self.held_frame(held).to_vec(),
            pair: (held.queue / 2) as u16,
        });
        Ok(NetState {
            mac: self.mac,
            offered: self.offered.get(),
            active: self.active.get(),
            flows: self.steering.save(),
            pending_frame: held,
            waiting: self.waiting.iter().fold(0, |all, queue| all | bit(*queue)),
            link: self.link.save()?,
        })
    }

    pub(super) fn held_frame(&self, held: ReceivedFrame) -> &[u8] {
        let end = HEADER_BYTES + held.bytes;
        self.incoming.get(HEADER_BYTES..end).unwrap_or(&[])
    }
}

/// Returns the bit of the queue's pair.
fn bit(queue: usize) -> u16 {
    1 << (queue / 2 % usize::from(MAX_PAIRS))
}

impl Net<Box<dyn NetLink>> {
    /// Restores a device of another process. `begun` are the features that its driver accepted;
    /// `None` if the driver has not set `DRIVER_OK`.
    ///
    /// # Errors
    /// [`StateError`] if no driver or link could have produced the state. No frame was sent or
    /// received.
    pub(crate) fn restore(
        state: NetState,
        begun: Option<u64>,
        counters: Arc<DeviceCounters>,
    ) -> Result<Self, StateError> {
        let register = |what| StateError::Register { what };
        let pairs = |number, most| NonZeroU16::new(number).filter(|pairs| pairs.get() <= most);
        let offered = pairs(state.offered, MAX_PAIRS).ok_or(register("queue pair count"))?;
        let chosen = begun.is_some_and(|features| features & F_MQ != 0);
        let most = if chosen { offered.get() } else { 1 };
        let active = pairs(state.active, most).ok_or(register("active queue pair count"))?;
        let mut net = Self::new(link::restore(state.link)?, state.mac, offered, counters);
        net.active = active;
        net.steering =
            Steering::restore(&state.flows, offered).ok_or(register("queue pair of a flow"))?;
        for pair in 0..u16::BITS as usize {
            if state.waiting >> pair & 1 != 0 {
                net.waiting.insert(pair * 2 + 1);
            }
        }
        if net
            .waiting
            .range(usize::from(offered.get()) * 2..)
            .next()
            .is_some()
        {
            return Err(register("queue waiting for the link"));
        }
        // The waiting queues resume when the link becomes writable.
        net.full = !net.waiting.is_empty();
        if let Some(PendingFrameState { frame, pair }) = state.pending_frame {
            let bytes = frame.len();
            let end = HEADER_BYTES + bytes;
            let destination = net.incoming.get_mut(HEADER_BYTES..end);
            let is_frame = (MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&bytes);
            let fits = is_frame && pair < active.get();
            let destination = destination.filter(|_| fits).ok_or(register("held frame"))?;
            destination.copy_from_slice(&frame);
            net.received = Some(ReceivedFrame {
                bytes,
                queue: usize::from(pair) * 2,
                attempted: true,
            });
        }
        let at_rest = net.received.is_none() && net.waiting == BTreeSet::new();
        if begun.is_none() && !(at_rest && net.steering == Steering::default()) {
            return Err(register("state of a network device without a driver"));
        }
        Ok(net)
    }
}
