//! Driver shapes (OS16). Numbers and their sources: decision 0011.

use ringfence_types::Direction;

use crate::api::DeviceRing;
use crate::ring::RingSize;

/// Rings of one lane of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rings {
    /// How many.
    pub count: u16,
    /// Descriptors of each.
    pub size: RingSize,
}

/// When a receive loop maps the buffer that takes a completed one's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// Before the completed buffer is unmapped, so that a packet is dropped rather than a
    /// descriptor lost when there is nothing to map: Linux 3.4 `mlx4_en` and `bnx2x`, the
    /// documents' drivers. Between two packets one address is free.
    BeforeUnmap,
    /// At once behind the unmap, as EIOVAR section 4 words it. Outside a pair of calls no address
    /// is free.
    AfterUnmap,
}

/// In which order a port that is opened fills its receive rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// One after the other (`bnx2x`): a ring's addresses are neighbours.
    RingByRing,
    /// A descriptor of each in turns (`mlx4_en`).
    InTurns,
}

/// What the drivers of two adapters differ in (rIOMMU section 5.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// What the documents call it.
    pub name: &'static str,
    /// Target buffers a packet: 1, or 2 for headers and data.
    pub buffers_per_packet: usize,
    /// Receive rings.
    pub receive: Rings,
    /// Transmit rings.
    pub transmit: Rings,
    /// When a receive loop maps.
    pub replace: Replace,
    /// In which order receive rings are filled.
    pub fill: Fill,
}

const fn rings(count: u16, size: u32) -> Rings {
    match RingSize::new(size) {
        Some(size) => Rings { count, size },
        None => panic!("evaluated at compile time"),
    }
}

impl Profile {
    /// Mellanox ConnectX-3: headers and data apart, many rings, about 12K addresses.
    pub const MLX: Self = Self {
        name: "mlx",
        buffers_per_packet: 2,
        receive: const { rings(4, 1024) },
        transmit: const { rings(4, 512) },
        replace: Replace::BeforeUnmap,
        fill: Fill::InTurns,
    };

    /// Broadcom BCM57810: one buffer a packet, about 3K addresses.
    pub const BRCM: Self = Self {
        name: "brcm",
        buffers_per_packet: 1,
        receive: const { rings(2, 1024) },
        transmit: const { rings(2, 512) },
        replace: Replace::BeforeUnmap,
        fill: Fill::RingByRing,
    };

    /// The port's rings as the DMA API names them, each with the number of buffers that are mapped
    /// when it is full: L of rIOMMU section 4. A ring's table of descriptors holds two mappings
    /// more, of descriptors and of completions.
    pub fn api_rings(&self) -> impl Iterator<Item = (DeviceRing, u32)> + use<> {
        let per_packet = self.buffers_per_packet as u32;
        [
            (self.receive, Direction::FromDevice),
            (self.transmit, Direction::ToDevice),
        ]
        .into_iter()
        .flat_map(move |(rings, direction)| {
            (0..rings.count).map(move |queue| {
                let ring = DeviceRing { queue, direction };
                (ring, rings.size.entries() * per_packet)
            })
        })
    }

    /// How many target buffers are mapped when every receive ring is full: what a port that was
    /// just opened has.
    pub const fn receive_at_most(&self) -> u64 {
        let descriptors = self.receive.count as u64 * self.receive.size.entries() as u64;
        descriptors * self.buffers_per_packet as u64
    }

    /// How many target buffers are mapped when every ring is full.
    pub const fn live_at_most(&self) -> u64 {
        let transmit = self.transmit.count as u64 * self.transmit.size.entries() as u64;
        self.receive_at_most() + transmit * self.buffers_per_packet as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_counts_are_the_documents() {
        assert_eq!(Profile::MLX.live_at_most(), 12 << 10);
        assert_eq!(Profile::BRCM.live_at_most(), 3 << 10);
        for profile in [Profile::MLX, Profile::BRCM] {
            let live: u64 = profile.api_rings().map(|(_, live)| u64::from(live)).sum();
            assert_eq!(live, profile.live_at_most());
        }
    }
}
