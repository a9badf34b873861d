//! An attacker that reuses addresses of earlier mappings.

use std::collections::{BTreeMap, VecDeque};

use ringfence_types::{IovaRange, PageSize, RequesterId};

use super::{Attacker, DeviceMapping, DmaPort, DriverEvent};

/// Number of unmapped ranges per device that a [`Replayer`] remembers.
pub const DEAD_RANGES: usize = 512;

/// Condition for an address to count as reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    /// Its page is mapped again, for modes that allocate whole pages.
    Page,
    /// Its byte is mapped again, for modes with physical addresses, where buffers share pages.
    Byte,
}

/// Accesses the first and the last byte of each range as soon as it is unmapped. Remembers the last
/// [`DEAD_RANGES`] of each device that were still accessible. Retries the oldest at every event,
/// until both accesses fault or the addresses are reused.
#[derive(Debug, Clone)]
pub struct Replayer {
    reuse: Reuse,
    devices: BTreeMap<RequesterId, DeadRanges>,
}

impl Replayer {
    /// Creates a replayer without remembered ranges.
    pub fn new(reuse: Reuse) -> Self {
        Self {
            reuse,
            devices: BTreeMap::new(),
        }
    }

    /// Returns the number of remembered ranges of all devices.
    pub fn remembered(&self) -> usize {
        self.devices.values().map(|dead| dead.by_start.len()).sum()
    }

    /// Returns the addresses whose reuse ends the attack on `range`.
    #[inline]
    fn footprint(&self, range: &IovaRange) -> IovaRange {
        match self.reuse {
            Reuse::Page => range.to_pages(PageSize::Size4K),
            Reuse::Byte => *range,
        }
    }

    fn retry_oldest<P: DmaPort>(&mut self, port: &mut P) {
        for dead in self.devices.values_mut() {
            if let Some(oldest) = dead.oldest()
                && !oldest.touch_ends(port)
            {
                dead.discard_oldest();
            }
        }
    }
}

impl Attacker for Replayer {
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        match event {
            // The unmap itself follows as another event.
            DriverEvent::Unmapping(_) => {}
            DriverEvent::Other => self.retry_oldest(port),
            DriverEvent::Mapped(mapping) => {
                let footprint = self.footprint(&mapping.range);
                if let Some(dead) = self.devices.get_mut(&mapping.device) {
                    dead.forget_overlapping(&footprint);
                }
                self.retry_oldest(port);
            }
            DriverEvent::Unmapped(mapping) => {
                self.retry_oldest(port);
                if mapping.touch_ends(port) {
                    let footprint = self.footprint(&mapping.range);
                    self.devices
                        .entry(mapping.device)
                        .or_default()
                        .push(*mapping, footprint);
                }
            }
        }
    }
}

/// The unmapped ranges of one device: a queue of the last [`DEAD_RANGES`], and an index by address.
/// The footprints are disjoint, because a new range replaces those that it overlaps.
#[derive(Debug, Clone, Default)]
struct DeadRanges {
    /// Oldest first. `None` for a range that was removed before its turn.
    queue: VecDeque<Option<(DeviceMapping, IovaRange)>>,
    /// Number of the range at the front of the queue.
    first: u64,
    /// First address of each footprint -> its last address and the number of its range.
    by_start: BTreeMap<u64, (u64, u64)>,
}

impl DeadRanges {
    /// Returns the oldest remembered range. Pops removed ranges before it from the queue.
    fn oldest(&mut self) -> Option<DeviceMapping> {
        while let Some(front) = self.queue.front() {
            if let Some((mapping, _)) = front {
                return Some(*mapping);
            }
            self.pop();
        }
        None
    }

    fn discard_oldest(&mut self) {
        if self.oldest().is_some() {
            self.pop();
        }
    }

    fn pop(&mut self) {
        if let Some(front) = self.queue.pop_front() {
            self.first += 1;
            if let Some((_, footprint)) = front {
                self.by_start.remove(&footprint.start().get());
            }
        }
    }

    fn push(&mut self, mapping: DeviceMapping, footprint: IovaRange) {
        self.forget_overlapping(&footprint);
        if self.queue.len() >= DEAD_RANGES {
            self.pop();
        }
        let number = self.first + self.queue.len() as u64;
        self.by_start
            .insert(footprint.start().get(), (footprint.last().get(), number));
        self.queue.push_back(Some((mapping, footprint)));
    }

    fn forget_overlapping(&mut self, range: &IovaRange) {
        // Disjoint ranges are sorted by their ends as by their starts. The overlapping ones are
        // therefore the last that start at or below the end of `range`, down to the first that ends
        // before it.
        while let Some((&start, &(last, number))) =
            self.by_start.range(..=range.last().get()).next_back()
        {
            if last < range.start().get() {
                return;
            }
            self.by_start.remove(&start);
            if let Some(slot) = usize::try_from(number - self.first)
                .ok()
                .and_then(|at| self.queue.get_mut(at))
            {
                *slot = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Script, mapping};
    use super::*;
    use std::cell::Cell;

    fn at(page: u64) -> DeviceMapping {
        mapping(page << 12, 0x100)
    }

    #[test]
    fn immediate_faults_are_not_retried() {
        let mut replayer = Replayer::new(Reuse::Page);
        let mut port = Script::new(|_| true);
        replayer.on(&DriverEvent::Mapped(at(1)), &mut port);
        replayer.on(&DriverEvent::Unmapping(at(1)), &mut port);
        assert!(port.take().is_empty());
        replayer.on(&DriverEvent::Unmapped(at(1)), &mut port);
        assert_eq!(port.take(), [(0x1000, 1), (0x10ff, 1)]);
        replayer.on(&DriverEvent::Other, &mut port);
        assert!(port.take().is_empty());
        // A single byte is accessed once.
        replayer.on(&DriverEvent::Unmapped(mapping(0x5000, 1)), &mut port);
        assert_eq!(port.take(), [(0x5000, 1)]);
    }

    #[test]
    fn the_oldest_is_tried_until_both_ends_fault() {
        let mut replayer = Replayer::new(Reuse::Page);
        let flushed = Cell::new(0_u64);
        // Pages below `flushed` fault, and so does the first byte of page `flushed`.
        let mut port = Script::new(|request| {
            let iova = request.iova.get();
            iova >> 12 < flushed.get() || iova == flushed.get() << 12
        });
        for page in 1..=3 {
            replayer.on(&DriverEvent::Unmapped(at(page)), &mut port);
        }
        port.take();
        flushed.set(1);
        for _ in 0..3 {
            replayer.on(&DriverEvent::Other, &mut port);
            assert_eq!(
                port.take(),
                [(0x1000, 1), (0x10ff, 1)],
                "one end is still reached"
            );
        }
        flushed.set(2);
        replayer.on(&DriverEvent::Other, &mut port);
        assert_eq!(port.take(), [(0x1000, 1), (0x10ff, 1)]);
        replayer.on(&DriverEvent::Other, &mut port);
        assert_eq!(port.take(), [(0x2000, 1), (0x20ff, 1)]);
        assert_eq!(replayer.remembered(), 2);
    }

    #[test]
    fn either_end_reached_is_worth_another_try() {
        for stopped in [0x1000, 0x10ff] {
            let mut replayer = Replayer::new(Reuse::Page);
            let mut port = Script::new(|request| request.iova.get() == stopped);
            replayer.on(&DriverEvent::Unmapped(at(1)), &mut port);
            assert_eq!(replayer.remembered(), 1, "{stopped:#x} stopped");
        }
    }

    #[test]
    fn addresses_given_out_again_are_left_alone() {
        // Other bytes of the same page: a reuse in modes that allocate pages, not bytes.
        let elsewhere = mapping(0x1800, 0x10);
        for (reuse, tried) in [(Reuse::Page, false), (Reuse::Byte, true)] {
            let mut replayer = Replayer::new(reuse);
            let mut port = Script::new(|_| false);
            replayer.on(&DriverEvent::Unmapped(at(1)), &mut port);
            port.take();
            replayer.on(&DriverEvent::Mapped(elsewhere), &mut port);
            assert_eq!(!port.take().is_empty(), tried, "{reuse:?}");
            replayer.on(&DriverEvent::Mapped(at(1)), &mut port);
            assert!(port.take().is_empty(), "{reuse:?}");
        }
        // Another device has its own addresses.
        let mut replayer = Replayer::new(Reuse::Page);
        let mut port = Script::new(|_| false);
        replayer.on(&DriverEvent::Unmapped(at(1)), &mut port);
        let foreign = DeviceMapping {
            device: RequesterId::new(9),
            ..at(1)
        };
        replayer.on(&DriverEvent::Mapped(foreign), &mut port);
        assert_eq!(replayer.remembered(), 1);
    }

    #[test]
    fn only_the_last_ones_are_remembered() {
        let mut replayer = Replayer::new(Reuse::Page);
        let mut port = Script::new(|_| false);
        let more = DEAD_RANGES as u64 + 10;
        for page in 1..=more {
            replayer.on(&DriverEvent::Unmapped(at(page)), &mut port);
        }
        assert_eq!(replayer.remembered(), DEAD_RANGES);
        port.take();
        replayer.on(&DriverEvent::Other, &mut port);
        assert_eq!(port.take(), [(11 << 12, 1), ((11 << 12) + 0xff, 1)]);
        // One mapping that covers all of them.
        replayer.on(
            &DriverEvent::Mapped(mapping(0, (more + 1) << 12)),
            &mut port,
        );
        assert_eq!(replayer.remembered(), 0);
    }

    /// Compares with a linear list.
    #[test]
    fn graveyard_agrees_with_a_plain_list() {
        let mut seed = 0x2545_f491_4f6c_dd1d_u64;
        let mut random = |below: u64| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            seed % below
        };
        let mut graveyard = DeadRanges::default();
        let mut list: Vec<Option<DeviceMapping>> = Vec::new();
        let forget = |list: &mut Vec<Option<DeviceMapping>>, range: &IovaRange| {
            for slot in list.iter_mut() {
                if slot.is_some_and(|dead| dead.range.overlaps(range)) {
                    *slot = None;
                }
            }
        };
        for _ in 0..40_000 {
            let dead = mapping(random(4096), 1 + random(24));
            match random(8) {
                0..=4 => {
                    graveyard.push(dead, dead.range);
                    forget(&mut list, &dead.range);
                    // Removed ranges at the front leave the queue only in `oldest`.
                    if list.len() >= DEAD_RANGES {
                        list.remove(0);
                    }
                    list.push(Some(dead));
                }
                5..=6 => {
                    graveyard.forget_overlapping(&dead.range);
                    forget(&mut list, &dead.range);
                }
                _ => {
                    while list.first() == Some(&None) {
                        list.remove(0);
                    }
                    assert_eq!(graveyard.oldest(), list.first().copied().flatten());
                    graveyard.discard_oldest();
                    if !list.is_empty() {
                        list.remove(0);
                    }
                }
            }
            assert_eq!(graveyard.by_start.len(), list.iter().flatten().count());
            assert!(graveyard.queue.len() <= DEAD_RANGES);
        }
    }
}
