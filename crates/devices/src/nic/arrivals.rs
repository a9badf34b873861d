//! Received packets on their way up. A packet goes up once all its buffers are back; until then some may be withheld by the layer.

use std::collections::VecDeque;

use ringfence_types::PhysAddr;

use super::driver::MAX_BUFFERS;
use crate::Buffer;

/// A packet and those of its buffers that are back.
#[derive(Debug)]
pub(super) struct Arrival {
    /// The buffers, in the order of the frame.
    pub(super) buffers: [Option<Buffer>; MAX_BUFFERS],
    /// Bytes of the frame in each.
    pub(super) bytes: [u32; MAX_BUFFERS],
    missing: usize,
}

/// Packets in the order of their completion.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    packets: VecDeque<Arrival>,
    /// Number of the packet in front.
    first: u64,
    /// Buffers that the layer withholds, in the order of their unmap: where, whose, which.
    withheld: VecDeque<(PhysAddr, u64, usize)>,
}

impl Arrivals {
    /// One more packet of `buffers` buffers, with so many bytes of the frame in each; its number.
    pub(super) fn begin(&mut self, buffers: usize, bytes: [u32; MAX_BUFFERS]) -> u64 {
        self.packets.push_back(Arrival {
            buffers: [const { None }; MAX_BUFFERS],
            bytes,
            missing: buffers,
        });
        self.first.wrapping_add(self.packets.len() as u64 - 1)
    }

    /// A buffer of the packet will come later.
    pub(super) fn withhold(&mut self, at: PhysAddr, packet: u64, which: usize) {
        self.withheld.push_back((at, packet, which));
    }

    /// A buffer of the packet is back.
    pub(super) fn back(&mut self, buffer: Buffer, packet: u64, which: usize) {
        let place = packet.wrapping_sub(self.first) as usize;
        if let Some(arrival) = self.packets.get_mut(place)
            && let Some(empty) = arrival.buffers.get_mut(which)
        {
            *empty = Some(buffer);
            arrival.missing = arrival.missing.saturating_sub(1);
        }
    }

    /// A withheld buffer is back.
    ///
    /// # Errors
    /// It belongs to no packet.
    pub(super) fn released(&mut self, buffer: Buffer) -> Result<(), Buffer> {
        // They come back in the order of their unmap, so this looks at the first one only, unless a burst's end had failed.
        let found = self
            .withheld
            .iter()
            .position(|(at, _, _)| *at == buffer.start());
        match found.and_then(|place| self.withheld.remove(place)) {
            Some((_, packet, which)) => {
                self.back(buffer, packet, which);
                Ok(())
            }
            None => Err(buffer),
        }
    }

    /// The next packet, if it is complete.
    pub(super) fn next(&mut self) -> Option<Arrival> {
        if self.packets.front()?.missing > 0 {
            return None;
        }
        self.first = self.first.wrapping_add(1);
        self.packets.pop_front()
    }

    /// Gives up on packets whose buffers never came; `each` receives those that did.
    pub(super) fn abandon(&mut self, each: impl FnMut(Buffer)) {
        self.withheld.clear();
        self.first = self.first.wrapping_add(self.packets.len() as u64);
        self.packets
            .drain(..)
            .flat_map(|arrival| arrival.buffers)
            .flatten()
            .for_each(each);
    }
}
