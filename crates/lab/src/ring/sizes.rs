//! How many slots the rings of a replay have.

use ringfence_trace::DeviceIndex;

use super::RINGS;

/// The slots of each ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RingSizes {
    /// As many in every ring.
    Every(u32),
    /// By device and [place](super::ring_index), as a [`RingUsage`](super::RingUsage) advises.
    Counted(Vec<[u32; RINGS]>),
}

impl RingSizes {
    /// The most slots that a replay gives a ring of its own accord: half of what an address can
    /// name.
    pub const MAX_SLOTS: u32 = 1 << 17;

    /// The power of two that is at least twice `live`, within [`MAX_SLOTS`](Self::MAX_SLOTS).
    pub fn twice(live: u64) -> u32 {
        let wanted = live.saturating_mul(2).clamp(1, u64::from(Self::MAX_SLOTS));
        wanted.next_power_of_two() as u32
    }

    /// The slots of the rings of `device`, by place. A device that was not counted maps nothing.
    pub fn of(&self, device: DeviceIndex) -> [u32; RINGS] {
        match self {
            Self::Every(slots) => [*slots; RINGS],
            Self::Counted(devices) => devices.get(device.index()).copied().unwrap_or([1; RINGS]),
        }
    }
}

impl Default for RingSizes {
    /// For a replay of a trace that nobody has counted: enough for what a queue of a network card
    /// keeps mapped.
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
