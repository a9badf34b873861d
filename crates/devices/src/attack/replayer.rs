//! The attacker that goes on using what it was given before (A02 to A05, A27).

use std::collections::{BTreeMap, VecDeque};

use ringfence_types::{IovaRange, PageSize, RequesterId};

use super::{Attacker, DeviceMapping, DmaPort, DriverEvent};

/// How many dead ranges of each device a [`Replayer`] remembers.
pub const DEAD_RANGES: usize = 512;

/// When an address counts as given out again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    /// When its page is: in modes that give out whole pages.
    Page,
    /// When its byte is: in modes where addresses are physical and buffers share pages.
    Byte,
}

/// Touches the first and the last byte of each range as soon as it is unmapped, remembers the last
/// [`DEAD_RANGES`] of each device that it could still reach, and tries the oldest again at every
/// event, until both touches fault or the addresses are given out again.
#[derive(Debug, Clone)]
pub struct Replayer {
    reuse: Reuse,
    devices: BTreeMap<RequesterId, DeadRanges>,
}

impl Replayer {
    /// A replayer that has seen nothing yet.
    pub fn new(reuse: Reuse) -> Self {
        Self {
            reuse,
            devices: BTreeMap::new(),
        }
    }

    /// Dead ranges of all devices still being tried.
    pub fn remembered(&self) -> usize {
        self.devices.values().map(|dead| dead.by_start.len()).sum()
    }

    /// The addresses that must not be given out again for `range` to stay dead.
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
                dead.bury_oldest();
            }
        }
    }
}

impl Attacker for Replayer {
    fn on<P: DmaPort>(&mut self, event: &DriverEvent, port: &mut P) {
        match event {
            // Not an event of its own: the unmap that it announces follows.
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

/// The dead ranges of one device: a queue of the last [`DEAD_RANGES`], and an index over their
/// addresses. The footprints are disjoint: a range that dies replaces what it overlaps.
#[derive(Debug, Clone, Default)]
struct DeadRanges {
    /// Oldest first. `None` where one was forgotten before its turn.
    queue: VecDeque<Option<(DeviceMapping, IovaRange)>>,
    /// Number of the range at the front of the queue.
    first: u64,
    /// First address of each footprint -> its last address, and the number of its range.
    by_start: BTreeMap<u64, (u64, u64)>,
}

impl DeadRanges {
    /// The oldest one remembered. Those forgotten before it leave the queue.
    fn oldest(&mut self) -> Option<DeviceMapping> {
        while let Some(front) = self.queue.front() {
            if let Some((mapping, _)) = front {
                return Some(*mapping);
            }
            self.pop();
        }
        None
    }

    fn bury_oldest(&mut self) {
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
        // Disjoint ranges end in the order in which they start, so the overlapping ones are the
        // last that start at or below the end of `range`, back to the first that ends before it.
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
    fn what_faults_at_once_is_not_tried_again() {
        let mut replayer = Replayer::new(Reuse::Page);
        let mut port = Script::new(|_| true);
        replayer.on(&DriverEvent::Mapped(at(1)), &mut port);
        replayer.on(&DriverEvent::Unmapping(at(1)), &mut port);
        assert!(port.take().is_empty());
        replayer.on(&DriverEvent::Unmapped(at(1)), &mut port);
        assert_eq!(port.take(), [(0x1000, 1), (0x10ff, 1)]);
        replayer.on(&DriverEvent::Other, &mut port);
        assert!(port.take().is_empty());
        // A single byte is touched once.
        replayer.on(&DriverEvent::Unmapped(mapping(0x5000, 1)), &mut port);
        assert_eq!(port.take(), [(0x5000, 1)]);
    }

    #[test]
    fn the_oldest_is_tried_until_both_ends_fault() {
        let mut replayer = Replayer::new(Reuse::Page);
        let flushed = Cell::new(0_u64);
        // Pages below `flushed` fault, and of the page itself the first byte.
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
        // The same page, other bytes: given out again where pages are, not where bytes are.
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
        // Another device's addresses are its own.
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
        // One mapping over all of them.
        replayer.on(
            &DriverEvent::Mapped(mapping(0, (more + 1) << 12)),
            &mut port,
        );
        assert_eq!(replayer.remembered(), 0);
    }

    /// Against a list that is searched from end to end.
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
                    // Those forgotten in front have left the queue only if somebody asked for the
                    // oldest.
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
                    graveyard.bury_oldest();
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
