//! Malicious devices, and a well-behaved one: the attackers of the three attack classes, and three
//! that access memory next to a buffer or against its direction.
//!
//! A well-behaved device violates nothing even without an IOMMU, so exposure is measured under
//! attack. An attacker sees the driver's actions and makes accesses through a [`DmaPort`]. It
//! learns only whether each access was blocked.

mod neighbour;
mod passive;
mod racer;
mod replayer;
mod straddler;
mod wrong_direction;

pub use neighbour::Neighbour;
pub use passive::Passive;
pub use racer::{Racer, WARM_MAPPINGS};
pub use replayer::{DEAD_RANGES, Replayer, Reuse};
pub use straddler::Straddler;
pub use wrong_direction::WrongDirection;

use ringfence_types::{Access, Direction, Fault, Iova, IovaRange, PageSize, RequesterId};

use crate::DmaRequest;

/// A mapping from the device's perspective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceMapping {
    /// Device of the mapping.
    pub device: RequesterId,
    /// Bytes of the buffer, as device addresses.
    pub range: IovaRange,
    /// Direction of the mapping.
    pub direction: Direction,
}

impl DeviceMapping {
    /// Returns the access that the mapping is for; a write for a bidirectional mapping.
    #[inline]
    pub const fn access(&self) -> Access {
        match self.direction {
            Direction::ToDevice => Access::Read,
            Direction::FromDevice | Direction::Bidirectional => Access::Write,
        }
    }

    #[inline]
    fn request(&self, iova: Iova, bytes: u64) -> DmaRequest {
        DmaRequest {
            device: self.device,
            iova,
            bytes,
            access: self.access(),
        }
    }

    /// Accesses the first and the last byte. Returns true if any access was allowed.
    #[inline]
    fn touch_ends<P: DmaPort>(&self, port: &mut P) -> bool {
        let (first, last) = (self.range.start(), self.range.last());
        let mut reached = port.access(&self.request(first, 1)).is_ok();
        if last != first {
            reached |= port.access(&self.request(last, 1)).is_ok();
        }
        reached
    }

    /// Returns the part of the buffer on each of its pages, in order.
    fn pages(&self) -> impl Iterator<Item = IovaRange> + use<> {
        let range = self.range;
        let mut next = Some(range.start());
        core::iter::from_fn(move || {
            let start = next?;
            let page_end = start
                .align_down(PageSize::Size4K.bytes())
                .wrapping_add(PageSize::Size4K.bytes() - 1);
            let end = page_end.min(range.last());
            next = (end < range.last()).then(|| end.wrapping_add(1));
            IovaRange::inclusive(start, end)
        })
    }
}

/// A driver's action, as far as its device can notice it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverEvent {
    /// A buffer has been mapped.
    Mapped(DeviceMapping),
    /// The driver is about to unmap a buffer. Last moment at which the device may use it.
    Unmapping(DeviceMapping),
    /// An unmap has returned.
    Unmapped(DeviceMapping),
    /// Another event; time has passed.
    Other,
}

/// Makes a device's accesses.
pub trait DmaPort {
    /// Makes one access.
    ///
    /// # Errors
    /// Returns the fault that blocked it.
    fn access(&mut self, request: &DmaRequest) -> Result<(), Fault>;
}

impl<F: FnMut(&DmaRequest) -> Result<(), Fault>> DmaPort for F {
    #[inline]
    fn access(&mut self, request: &DmaRequest) -> Result<(), Fault> {
        self(request)
    }
}

/// Chooses accesses. Knows the mappings and the results of its accesses, but not the protection
/// mode.
pub trait Attacker {
    /// Reacts to `event` with accesses through `port`.
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P);
}

/// Two attackers, one after the other.
impl<A: Attacker, B: Attacker> Attacker for (A, B) {
    #[inline]
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        self.0.on(event, port);
        self.1.on(event, port);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ringfence_types::FaultReason;

    /// A port that records all accesses and blocks those for which `stopped` returns true.
    pub(crate) struct Script<S> {
        pub(crate) stopped: S,
        pub(crate) seen: Vec<(u64, u64)>,
    }

    impl<S: FnMut(&DmaRequest) -> bool> DmaPort for Script<S> {
        fn access(&mut self, request: &DmaRequest) -> Result<(), Fault> {
            self.seen.push((request.iova.get(), request.bytes));
            if (self.stopped)(request) {
                return Err(Fault {
                    device: request.device,
                    iova: request.iova,
                    access: request.access,
                    reason: FaultReason::NotPresent,
                });
            }
            Ok(())
        }
    }

    impl<S: FnMut(&DmaRequest) -> bool> Script<S> {
        pub(crate) fn new(stopped: S) -> Self {
            Self {
                stopped,
                seen: Vec::new(),
            }
        }

        pub(crate) fn take(&mut self) -> Vec<(u64, u64)> {
            std::mem::take(&mut self.seen)
        }
    }

    pub(crate) fn mapping(iova: u64, bytes: u64) -> DeviceMapping {
        DeviceMapping {
            device: RequesterId::new(8),
            range: IovaRange::new(Iova::new(iova), bytes).unwrap(),
            direction: Direction::FromDevice,
        }
    }

    #[test]
    fn accesses_follow_the_direction() {
        for (direction, access) in [
            (Direction::ToDevice, Access::Read),
            (Direction::FromDevice, Access::Write),
            (Direction::Bidirectional, Access::Write),
        ] {
            let mapping = DeviceMapping {
                direction,
                ..mapping(0, 1)
            };
            assert_eq!(mapping.access(), access);
        }
    }

    #[test]
    fn pages_cover_the_buffer_exactly() {
        const TOP: u64 = u64::MAX - 0xfff;
        // (first byte, bytes) of each piece
        type Pieces = &'static [(u64, u64)];
        let cases: [(u64, u64, Pieces); 5] = [
            (0x1000, 1, &[(0x1000, 1)]),
            (0x1fff, 2, &[(0x1fff, 1), (0x2000, 1)]),
            (0x1000, 0x1000, &[(0x1000, 0x1000)]),
            (
                0x1800,
                0x2000,
                &[(0x1800, 0x800), (0x2000, 0x1000), (0x3000, 0x800)],
            ),
            (TOP - 1, 0x1001, &[(TOP - 1, 1), (TOP, 0x1000)]),
        ];
        for (iova, bytes, expected) in cases {
            let pages: Vec<_> = mapping(iova, bytes)
                .pages()
                .map(|page| (page.start().get(), page.bytes()))
                .collect();
            assert_eq!(pages, expected);
        }
    }
}
