//! Ring sizes of a replay.

use ringfence_trace::DeviceIndex;

use super::RINGS;

/// The number of slots of each ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RingSizes {
    /// The same number for every ring.
    Every(u32),
    /// Numbers by device and [ring](super::ring_index), from a [`RingUsage`](super::RingUsage).
    Counted(Vec<[u32; RINGS]>),
}

impl RingSizes {
    /// The largest size that a replay chooses by itself: half of the entries that an address can
    /// name.
    pub const MAX_SLOTS: u32 = 1 << 17;

    /// Returns the smallest power of two that is at least twice `live`, but at most
    /// [`MAX_SLOTS`](Self::MAX_SLOTS).
    pub fn twice(live: u64) -> u32 {
        let wanted = live.saturating_mul(2).clamp(1, u64::from(Self::MAX_SLOTS));
        wanted.next_power_of_two() as u32
    }

    /// Returns the sizes of the rings of `device`. A device without a count maps nothing and gets
    /// rings of one slot.
    pub fn of(&self, device: DeviceIndex) -> [u32; RINGS] {
        match self {
            Self::Every(slots) => [*slots; RINGS],
            Self::Counted(devices) => devices.get(device.index()).copied().unwrap_or([1; RINGS]),
        }
    }
}

impl Default for RingSizes {
    /// The size for a trace without a count: enough for the buffers that a network-card queue keeps
    /// mapped.
    fn default() -> Self {
        Self::Every(4096)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_from_twice_the_live_maximum_on() {
        let cases = [
            (0, 1),
            (1, 2),
            (2, 4),
            (3, 8),
            (370, 1024),
            (1 << 15, 1 << 16),
            ((1 << 16) - 1, 1 << 17),
            (1 << 16, 1 << 17),
            (u64::MAX, 1 << 17),
        ];
        for (live, slots) in cases {
            assert_eq!(RingSizes::twice(live), slots, "{live}");
        }
    }
}
