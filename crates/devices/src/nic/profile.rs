//! Driver shapes (OS16). Numbers and their sources: decision 0011.

use ringfence_types::Direction;

use crate::api::Ring;
use crate::ring::RingSize;

/// Rings of one lane of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rings {
    /// How many.
    pub count: u16,
    /// Descriptors of each.
    pub size: RingSize,
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
    };

    /// Broadcom BCM57810: one buffer a packet, about 3K addresses.
    pub const BRCM: Self = Self {
        name: "brcm",
        buffers_per_packet: 1,
        receive: const { rings(2, 1024) },
        transmit: const { rings(2, 512) },
    };

    /// The port's rings as the DMA API names them, each with the number of buffers that are mapped when it is full: L of rIOMMU section 4.
    /// A ring's table of descriptors holds two mappings more, of descriptors and of completions.
    pub fn api_rings(&self) -> impl Iterator<Item = (Ring, u32)> + use<> {
        let per_packet = self.buffers_per_packet as u32;
        [
            (self.receive, Direction::FromDevice),
            (self.transmit, Direction::ToDevice),
        ]
        .into_iter()
        .flat_map(move |(rings, direction)| {
            (0..rings.count).map(move |queue| {
                let ring = Ring { queue, direction };
                (ring, rings.size.entries() * per_packet)
            })
        })
    }

    /// How many target buffers are mapped when every ring is full.
    pub const fn live_at_most(&self) -> u64 {
        let receive = self.receive.count as u64 * self.receive.size.entries() as u64;
        let transmit = self.transmit.count as u64 * self.transmit.size.entries() as u64;
        (receive + transmit) * self.buffers_per_packet as u64
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
