//! Driver profiles. Decision 0011 has the numbers and their sources.

use ringfence_types::Direction;

use super::layout::{DESCRIPTOR_BYTES, SEGMENT_BYTES};
use crate::ReuseOrder;
use crate::api::DeviceRing;
use crate::ring::RingSize;
use crate::workload::{BURST, PACKETS_PER_RUN};

/// Rings of one direction of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rings {
    /// Number of rings.
    pub count: u16,
    /// Descriptors per ring.
    pub size: RingSize,
}

/// Time at which a receive loop maps the replacement of a completed buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// Before it unmaps the completed buffer. If the map fails, it drops the packet and keeps the
    /// descriptor. Used by Linux 3.4 `mlx4_en` and `bnx2x`, the drivers in the rIOMMU and EIOVAR
    /// papers. Between two packets one address is free.
    BeforeUnmap,
    /// Directly after the unmap, as in EIOVAR section 4. No address is free except between the two
    /// calls.
    AfterUnmap,
}

/// Order in which a port fills its receive rings when it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// One ring after the other (`bnx2x`): the addresses of a ring are adjacent.
    RingByRing,
    /// One descriptor of each ring in turn (`mlx4_en`).
    InTurns,
}

/// Event after which a driver unmaps completed transmissions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TxReclaim {
    /// An interrupt, coalesced like those of receive rings (`bnx2x`). It may fall into a receive
    /// loop.
    Interrupt,
    /// Linux 3.4 `mlx4_en`: the driver polls while it sends, and by a timer. It enables the
    /// interrupt only for a full ring. Neither falls into a receive loop, because all are softirqs
    /// of one CPU.
    Poll {
        /// Sent frames of a ring between two polls (`MLX4_EN_TX_POLL_MODER`); 0 counts as 1.
        moder: u32,
        /// Delay of the timer (`MLX4_EN_TX_POLL_TIMEOUT`), in frames of the port. A frame starts
        /// the timer of its ring unless it runs.
        timeout: u64,
    },
}

/// Differences between the drivers of two adapters (rIOMMU section 5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicProfile {
    /// Name of the profile in the rIOMMU paper.
    pub name: &'static str,
    /// Buffers per packet: 1, or 2 for headers and data.
    pub buffers_per_packet: usize,
    /// Receive rings of the port.
    pub receive: Rings,
    /// Transmit rings of the port.
    pub transmit: Rings,
    /// Time at which a receive loop maps a replacement.
    pub replace: Replace,
    /// Order in which receive rings are filled.
    pub fill: Fill,
    /// Maximum length in bytes of a frame that is copied into its descriptor and not mapped; at
    /// most [`MAX_INLINE`](Self::MAX_INLINE), 0 for none.
    pub inline_thold: u32,
    /// Completions of a receive ring for each interrupt, unless nothing else happens.
    pub rx_frames: u32,
    /// Event after which completed transmissions are unmapped.
    pub tx_reclaim: TxReclaim,
    /// Order in which the driver reuses its buffers.
    pub reuse: ReuseOrder,
}

const fn rings(count: u16, size: u32) -> Rings {
    match RingSize::new(size) {
        Some(size) => Rings { count, size },
        None => panic!("evaluated at compile time"),
    }
}

impl NicProfile {
    /// Upper bound of [`inline_thold`](Self::inline_thold), as in `mlx4_en`: a descriptor of 128
    /// bytes has room for that many bytes of a frame.
    pub const MAX_INLINE: u32 = 104;

    /// Mellanox ConnectX-3: separate headers and data, many rings, about 12K addresses. Linux 3.4
    /// `mlx4_en` inlines small frames, polls transmissions, and takes an interrupt for 44
    /// receptions (`MLX4_EN_RX_COAL_TARGET`).
    pub const MLX: Self = Self {
        name: "mlx",
        buffers_per_packet: 2,
        receive: const { rings(4, 1024) },
        transmit: const { rings(4, 512) },
        replace: Replace::BeforeUnmap,
        fill: Fill::InTurns,
        inline_thold: Self::MAX_INLINE,
        rx_frames: 44,
        tx_reclaim: TxReclaim::Poll {
            moder: 16,
            // 250 ms of a run of 10 s.
            timeout: PACKETS_PER_RUN / 40,
        },
        reuse: ReuseOrder::LastIn,
    };

    /// As [`MLX`](Self::MLX), but every sent frame is mapped, and both directions take an interrupt
    /// for 200 completions.
    pub const MLX_MAPPED: Self = Self {
        inline_thold: 0,
        rx_frames: BURST,
        tx_reclaim: TxReclaim::Interrupt,
        ..Self::MLX
    };

    /// Broadcom BCM57810: one buffer per packet, about 3K addresses.
    pub const BRCM: Self = Self {
        name: "brcm",
        buffers_per_packet: 1,
        receive: const { rings(2, 1024) },
        transmit: const { rings(2, 512) },
        replace: Replace::BeforeUnmap,
        fill: Fill::RingByRing,
        inline_thold: 0,
        rx_frames: BURST,
        tx_reclaim: TxReclaim::Interrupt,
        reuse: ReuseOrder::LastIn,
    };

    /// Returns the maximum length in bytes of an inlined frame; 0 if frames are never inlined.
    pub const fn inline_at_most(&self) -> usize {
        let within = self.inline_thold < Self::MAX_INLINE;
        (if within {
            self.inline_thold
        } else {
            Self::MAX_INLINE
        }) as usize
    }

    /// Returns the size in bytes of a transmit descriptor.
    pub const fn tx_entry_bytes(&self) -> u32 {
        match self.inline_at_most() {
            0 => (self.buffers_per_packet * SEGMENT_BYTES) as u32,
            _ => DESCRIPTOR_BYTES as u32,
        }
    }

    /// Returns the port's rings in the DMA API, each with the number of mapped buffers when it is
    /// full: L of rIOMMU section 4. A ring's table of descriptors holds two more mappings, of
    /// descriptors and of completions.
    pub fn api_rings(&self) -> impl Iterator<Item = (DeviceRing, u32)> + use<> {
        let per_packet = self.buffers_per_packet as u32;
        [
            (self.receive, Direction::FromDevice),
            (self.transmit, Direction::ToDevice),
        ]
        .into_iter()
        .flat_map(move |(rings, direction)| {
            (0..rings.count).map(move |queue| {
                let ring = DeviceRing::new(queue, direction);
                (ring, rings.size.entries() * per_packet)
            })
        })
    }

    /// Returns the number of mapped buffers when every receive ring is full, as after opening the
    /// port.
    pub const fn receive_at_most(&self) -> u64 {
        let descriptors = self.receive.count as u64 * self.receive.size.entries() as u64;
        descriptors * self.buffers_per_packet as u64
    }

    /// Returns the number of mapped buffers when every ring is full.
    pub const fn live_at_most(&self) -> u64 {
        let transmit = self.transmit.count as u64 * self.transmit.size.entries() as u64;
        self.receive_at_most() + transmit * self.buffers_per_packet as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_counts_match_the_papers() {
        assert_eq!(NicProfile::MLX.live_at_most(), 12 << 10);
        assert_eq!(NicProfile::BRCM.live_at_most(), 3 << 10);
        for profile in [NicProfile::MLX, NicProfile::BRCM] {
            let live: u64 = profile.api_rings().map(|(_, live)| u64::from(live)).sum();
            assert_eq!(live, profile.live_at_most());
        }
    }
}
