//! A04: an address that belongs to a new buffer still reaches the old one.
//!
//! Only an access at an address that an earlier buffer had is an attempt. A next-fit allocator
//! returns to such addresses when its search has passed the whole space.

use std::collections::HashSet;

use ringfence_lab::LabError;
use ringfence_lab::modes::{FlushKind, Mode};
use ringfence_types::{Access, Direction, Iova, Nanos, PageSize};

use super::ScenarioResult;
use crate::bench::{Bench, MapId, PAGES_32_BIT, SLOTS, memory};
use crate::evidence::{Evidence, Executed, Found};

const DIRECTION: Direction = Direction::ToDevice;
/// Pages of the buffers that advance the search of an allocator.
const LARGE: u64 = 256;
/// Buffers whose addresses the allocator is to give out again.
const OLD: u64 = 64;

const PAGE: u64 = PageSize::Size4K.bytes();
/// Time between two buffers.
const PAUSE: Nanos = Nanos(1_000);
/// A pause of 50 s, in which flush timers and cache periods expire.
const LONG_PAUSE: Nanos = Nanos(50_000_000_000);
/// Buffers between two long pauses.
const LONG_PAUSE_INTERVAL: u64 = 100;
/// Buffers that follow each other in a ring of one slot.
const SAME_SLOT_ROUNDS: u64 = 100;
/// Most buffers of one page that a search for the old addresses maps: twice the pages that the
/// driver unmapped before the live ones.
const SEARCH_BOUND: u64 = 2 * (LARGE + OLD);

/// Number of buffers that the driver maps one after the other. It exceeds the slots of a ring, so
/// that slots come back.
const ROUNDS: u64 = SLOTS as u64 + OLD;

/// Maps buffers until addresses of earlier ones come back, and lets the device read at these
/// addresses. A read is a success of the attack if it reaches memory of an earlier buffer, and a
/// false fault if the hardware stops it.
///
/// The device reads each address twice, because the second read hits the IOTLB entry of the first.
/// In a ring of one slot it reads each address once.
pub(crate) fn recycled_address(mode: &Mode) -> ScenarioResult {
    if !mode.translates() {
        return Ok(Found::NotApplicable(
            "addresses are physical: none is given to another buffer",
        ));
    }
    let mut driver = Driver::new(Bench::new(mode)?);
    let mut executed = Executed::default();
    if mode.alloc.is_next_fit() {
        reuse_after_wrap(&mut driver, &mut executed)?;
    } else {
        let mut evidence = reuse_soon(&mut driver, mode)?;
        driver.bench.take_false_faults(&mut evidence);
        executed.trial("new buffer at an old address", evidence);
    }
    if mode.has_rings() {
        executed.trial("same slot within a burst", same_slot(mode)?);
    }
    Ok(Found::Executed(executed))
}

/// A driver that maps new memory for each buffer.
struct Driver {
    bench: Bench,
    /// First addresses of all buffers so far.
    used: HashSet<Iova>,
    /// Start of the memory of the next buffer.
    next: u64,
}

impl Driver {
    fn new(bench: Bench) -> Self {
        Self {
            bench,
            used: HashSet::new(),
            next: 0x10_0000,
        }
    }

    fn map(&mut self, pages: u64) -> Result<(MapId, Iova), LabError> {
        let id = self
            .bench
            .map(0, memory(self.next, pages * PAGE)?, DIRECTION)?;
        self.next += pages * PAGE;
        Ok((id, self.bench.range(id)?.start()))
    }

    /// Maps a page, and lets the device use it. Counts the accesses if an earlier buffer had the
    /// address.
    fn map_page(&mut self, evidence: &mut Evidence) -> Result<MapId, LabError> {
        self.map_and_use(1, evidence)
    }

    /// As [`map_page`](Self::map_page), with a buffer of `pages` pages.
    fn map_and_use(&mut self, pages: u64, evidence: &mut Evidence) -> Result<MapId, LabError> {
        let (id, iova) = self.map(pages)?;
        if self.used.insert(iova) {
            self.bench.use_buffer(id)?;
        } else {
            for _ in 0..2 {
                self.bench.attack(evidence, 0, iova, 64, Access::Read)?;
            }
        }
        Ok(id)
    }

    /// Maps and unmaps pages until one has the address `last`, or a later one.
    ///
    /// # Errors
    /// Also if the search does not reach `last`.
    fn reuse_up_to(&mut self, last: Iova) -> Result<Evidence, LabError> {
        let mut evidence = Evidence::default();
        for _ in 0..SEARCH_BOUND {
            let id = self.map_page(&mut evidence)?;
            let passed = self.bench.range(id)?.start() >= last;
            self.bench.release(id)?;
            if passed {
                self.bench.take_false_faults(&mut evidence);
                return Ok(evidence);
            }
        }
        Err(LabError::Internal(
            "the search did not reach the old addresses",
        ))
    }

    /// Maps and unmaps large buffers that the device does not use, until an address is lower than
    /// the previous one.
    fn wrap(&mut self) -> Result<(), LabError> {
        let mut previous = Iova::new(0);
        // The addresses differ, the memory need not.
        let start = self.next;
        for _ in 0..PAGES_32_BIT / LARGE + 2 {
            self.next = start;
            let (id, iova) = self.map(LARGE)?;
            self.bench.release(id)?;
            if iova < previous {
                return Ok(());
            }
            previous = iova;
        }
        Err(LabError::Internal("the allocator did not wrap"))
    }
}

/// Runs two trials after the search has wrapped: addresses unmapped before the wrap, and addresses
/// unmapped after it but still ahead of the search. The flush at the wrap does not cover the
/// latter.
fn reuse_after_wrap(driver: &mut Driver, executed: &mut Executed) -> Result<(), LabError> {
    let mut discarded = Evidence::default();
    // The first large buffer after the wrap takes these addresses, not those of the old buffers.
    let (gap, _) = driver.map(LARGE)?;
    driver.bench.release(gap)?;
    for _ in 0..OLD {
        let id = driver.map_page(&mut discarded)?;
        driver.bench.release(id)?;
    }
    let mut live = Vec::new();
    for _ in 0..OLD {
        live.push(driver.map_page(&mut discarded)?);
    }
    let [first, .., last] = live[..] else {
        return Err(LabError::Internal("no live buffers"));
    };
    let (first, last) = (
        driver.bench.range(first)?.start(),
        driver.bench.range(last)?.start(),
    );
    driver.wrap()?;
    // The pages that were unmapped before the wrap are directly below the live ones.
    let last_unmapped = first.get().checked_sub(PAGE);
    let last_unmapped = last_unmapped.ok_or(LabError::Internal("a live buffer at address 0"))?;
    let evidence = driver.reuse_up_to(Iova::new(last_unmapped))?;
    executed.trial("unmapped before the wrap", evidence);
    for id in live {
        driver.bench.use_buffer(id)?;
        driver.bench.release(id)?;
    }
    executed.trial("unmapped ahead of the search", driver.reuse_up_to(last)?);
    Ok(())
}

/// Exercises the other allocators, which reuse a freed address soon, or when their mapping cache
/// evicts it.
fn reuse_soon(driver: &mut Driver, mode: &Mode) -> Result<Evidence, LabError> {
    let mut evidence = Evidence::default();
    for round in 0..ROUNDS {
        let id = driver.map_page(&mut evidence)?;
        driver.bench.release(id)?;
        let is_long = (round + 1).is_multiple_of(LONG_PAUSE_INTERVAL);
        let pause = if is_long { LONG_PAUSE } else { PAUSE };
        let next = driver.bench.now().0 + pause.0;
        driver.bench.advance_to(Nanos(next));
    }
    if matches!(
        mode.flush,
        FlushKind::MapCache | FlushKind::NeverFree | FlushKind::PagePool
    ) {
        // These modes end mappings only when they have no other address. The device uses the first
        // `OLD` and the last `2 * OLD` buffers: the first fill the IOTLB, the last reuse their
        // addresses.
        for round in 0..PAGES_32_BIT / LARGE + OLD {
            let is_used = !(OLD..PAGES_32_BIT / LARGE - OLD).contains(&round);
            let id = match is_used {
                true => driver.map_and_use(LARGE, &mut evidence)?,
                false => driver.map(LARGE)?.0,
            };
            driver.bench.release(id)?;
        }
    }
    Ok(evidence)
}

/// A ring of one slot gives every buffer the same address. The driver maps the next buffer before
/// the burst ends, if the layer lets it.
fn same_slot(mode: &Mode) -> Result<Evidence, LabError> {
    let mut bench = Bench::with_slots(mode, 1)?;
    let mut evidence = Evidence::default();
    let mut used = HashSet::new();
    for round in 0..SAME_SLOT_ROUNDS {
        let buffer = memory(0x10_0000 + round * PAGE, 64)?;
        let id = match bench.try_map(0, buffer, DIRECTION)? {
            Some(id) => id,
            None => {
                // The burst withholds the slot.
                bench.end_burst(0, DIRECTION)?;
                bench.map(0, buffer, DIRECTION)?
            }
        };
        let iova = bench.range(id)?.start();
        if used.insert(iova) {
            bench.use_buffer(id)?;
        } else {
            bench.attack(&mut evidence, 0, iova, 64, Access::Read)?;
        }
        bench.unmap(id)?;
    }
    bench.take_false_faults(&mut evidence);
    Ok(evidence)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A trial reads the `OLD` addresses twice. The repaired bitmap gives no address ahead of its
    /// search to another buffer before the next wrap; the published one does.
    #[test]
    fn a_next_fit_search_is_tried_before_and_after_its_wrap() {
        for (mode, ahead) in [("bitmap", false), ("bitmap-paper", true)] {
            let Found::Executed(executed) = recycled_address(&Mode::find(mode).unwrap()).unwrap()
            else {
                panic!("not executed");
            };
            let attempts = |name: &str| executed.named(name).unwrap().attempts;
            assert!(attempts("unmapped before the wrap") >= 2 * OLD, "{mode}");
            assert_eq!(
                attempts("unmapped ahead of the search") > 0,
                ahead,
                "{mode}"
            );
        }
    }

    /// No earlier buffer had the address of the first one.
    #[test]
    fn the_first_buffer_of_a_slot_is_no_attempt() {
        let evidence = same_slot(&Mode::find("riommu").unwrap()).unwrap();
        assert_eq!(evidence.attempts, SAME_SLOT_ROUNDS - 1);
    }

    #[test]
    fn a_search_that_does_not_reach_its_end_is_an_error() {
        let mode = Mode::find("strict").unwrap();
        let mut driver = Driver::new(Bench::new(&mode).unwrap());
        let result = driver.reuse_up_to(Iova::new(u64::MAX));
        assert!(matches!(result, Err(LabError::Internal(_))));
    }
}
