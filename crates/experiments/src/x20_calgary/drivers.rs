//! Remedies that change the driver: persistent allocation (CG08), and `dma_map_multi` with
//! `dma_unmap_multi` (CG10). The driver runs step by step, so that crossings, flushes and the
//! device's accesses to returned buffers are counted. No cycles are measured.

use std::collections::VecDeque;

use ringfence_devices::{DmaRequest, Observer};
use ringfence_lab::LabError;
use ringfence_lab::compare::{CompareOptions, testbed};
use ringfence_lab::layer::{MappingToken, OpKey};
use ringfence_lab::testbed::Testbed;
use ringfence_trace::DeviceIndex;
use ringfence_types::{
    Access, Direction, Fault, Iova, IovaRange, PhysAddr, PhysRange, RequesterId,
};

use super::modes::{ACKS, GROUP, RING, mode};

/// The driver's use of the DMA API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Driver {
    /// Maps all buffers when it opens the device, and uses them in turn.
    Persistent,
    /// Maps and unmaps all buffers of an interrupt in one call.
    Batches,
}

/// Counts of a driver.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Counts {
    /// Crossings before the first frame.
    pub(super) at_open: u64,
    /// Maps and unmaps at run time, or uses of a persistent mapping.
    pub(super) pairs: u64,
    /// Crossings at run time.
    pub(super) crossings: u64,
    /// Flushes at run time.
    pub(super) flushes: u64,
    /// Buffers that the driver has back and the device still reaches.
    pub(super) reached: u64,
}

impl Counts {
    pub(super) fn per_pair(&self, number: u64) -> f64 {
        number as f64 / self.pairs.max(1) as f64
    }
}

/// The result of one access.
#[derive(Default)]
struct Reached(bool);

impl Observer for Reached {
    fn allowed(&mut self, _: &DmaRequest, _: &[PhysRange]) {
        self.0 = true;
    }

    fn faulted(&mut self, _: &DmaRequest, _: &Fault) {}
}

/// A mapped buffer.
type Held = (MappingToken, IovaRange);

/// A driver with one device.
struct Bench {
    bed: Testbed,
    device: RequesterId,
    counts: Counts,
}

impl Bench {
    fn new(name: &str) -> Result<Self, LabError> {
        let mut bed = testbed(&mode(name)?, &CompareOptions::new())?;
        bed.layer.reserve(1, 1)?;
        let device = bed.machine.requester(0, RequesterId::new(0x1000))?;
        let (domain, target) = bed.layer.attach(DeviceIndex(0), device)?;
        bed.machine.attach(device, domain, target)?;
        Ok(Self {
            bed,
            device,
            counts: Counts::default(),
        })
    }

    fn crossings(&self) -> u64 {
        let traffic = self.bed.machine.traffic();
        traffic.kicks_in_maps + traffic.kicks_in_unmaps
    }

    /// Maps `number` buffers from page `first` on in one call. The device uses each.
    fn map(&mut self, key: OpKey, first: u64, number: u64) -> Result<Vec<Held>, LabError> {
        let failed = || LabError::Internal("a batch of maps");
        let page = |page: u64| PhysRange::new(PhysAddr::new((page + 512) << 12), 2048);
        let buffers: Option<Vec<_>> = (first..first + number)
            .map(|name| Some((name, page(name)?)))
            .collect();
        let mapped = self.bed.layer.map_multi(key, &buffers.ok_or_else(failed)?);
        self.bed.layer.sync_map(key);
        let mut held = Vec::new();
        for token in mapped.map_err(|_| failed())? {
            let range = token.range().ok_or_else(failed)?;
            if !self.access(key, range) {
                return Err(LabError::Internal("a device could not access its buffers"));
            }
            held.push((token, range));
        }
        Ok(held)
    }

    /// Unmaps buffers in one call. The device then tries to use each.
    fn unmap(&mut self, key: OpKey, held: Vec<Held>) -> Result<(), LabError> {
        let (tokens, ranges): (Vec<_>, Vec<_>) = held.into_iter().unzip();
        let mut back = Vec::new();
        if !self.bed.layer.unmap_multi(key, tokens, &mut back) || back.len() != ranges.len() {
            return Err(LabError::Internal("a batch of unmaps"));
        }
        self.returned(key, ranges);
        Ok(())
    }

    /// Counts buffers that the driver has back, and tries to access them.
    fn returned(&mut self, key: OpKey, ranges: Vec<IovaRange>) {
        for range in ranges {
            self.counts.pairs += 1;
            self.counts.reached += u64::from(self.access(key, range));
        }
    }

    fn access(&mut self, key: OpKey, range: IovaRange) -> bool {
        let iova: Iova = range.start();
        let access = match key.direction {
            Direction::ToDevice => Access::Read,
            _ => Access::Write,
        };
        let request = DmaRequest {
            device: self.device,
            iova,
            bytes: 1,
            access,
        };
        let mut seen = Reached::default();
        let _ = self.bed.machine.probe(&request, &mut seen);
        seen.0
    }
}

/// A ring of buffers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ring {
    pub(super) direction: Direction,
    /// First page of its memory.
    pub(super) first: u64,
    /// Pages that it uses in turn.
    pub(super) pages: u64,
    pub(super) in_flight: u64,
    /// Buffers of an interrupt; divides the other numbers.
    pub(super) group: u64,
    /// Buffers that complete.
    pub(super) completed: u64,
}

/// Runs `frames` received frames and their acknowledgements in a mode.
///
/// # Errors
/// The mode is not built in, or the layer refused a call.
pub(super) fn run(driver: Driver, name: &str, frames: u64) -> Result<Counts, LabError> {
    let receive = Ring {
        direction: Direction::FromDevice,
        first: 0,
        pages: 2 * RING,
        in_flight: RING,
        group: GROUP,
        completed: frames,
    };
    let acknowledge = Ring {
        direction: Direction::ToDevice,
        first: 2 * RING,
        pages: 64,
        in_flight: ACKS,
        group: GROUP / 2,
        completed: frames / 2,
    };
    run_rings(driver, name, &[receive, acknowledge])
}

/// Runs one ring after the other in a mode.
///
/// # Errors
/// As for [`run`].
pub(super) fn run_rings(driver: Driver, name: &str, rings: &[Ring]) -> Result<Counts, LabError> {
    let mut bench = Bench::new(name)?;
    for ring in rings {
        let key = OpKey::new(DeviceIndex(0), 0, ring.direction);
        let mut held = VecDeque::new();
        let before = bench.crossings();
        let mapped_at_open = match driver {
            Driver::Persistent => ring.pages,
            Driver::Batches => ring.in_flight,
        };
        for page in (0..mapped_at_open).step_by(ring.group as usize) {
            held.push_back(bench.map(key, ring.first + page, ring.group)?);
        }
        let opened = bench.crossings();
        let flushed = bench.bed.machine.invalidations();
        let mut page = mapped_at_open % ring.pages;
        for _ in 0..ring.completed / ring.group {
            let Some(done) = held.pop_front() else {
                return Err(LabError::Internal("an empty ring"));
            };
            match driver {
                Driver::Persistent => {
                    bench.returned(key, done.iter().map(|(_, range)| *range).collect());
                    held.push_back(done);
                }
                Driver::Batches => {
                    bench.unmap(key, done)?;
                    held.push_back(bench.map(key, ring.first + page, ring.group)?);
                    page = (page + ring.group) % ring.pages;
                }
            }
        }
        bench.counts.crossings += bench.crossings() - opened;
        bench.counts.at_open += opened - before;
        bench.counts.flushes += bench.bed.machine.invalidations() - flushed;
    }
    Ok(bench.counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_exposure_of_each_driver() {
        use Driver::{Batches, Persistent};
        // 512 frames in groups of 16, and 256 acknowledgements in groups of 8.
        let (pairs, groups) = (512 + 256, 32 + 32);
        for (driver, name, at_open, crossings, flushes, reached) in [
            (Persistent, "xen", 512 + 64, 0, 0, pairs),
            (Persistent, "xen-multicall", 512 / 16 + 64 / 8, 0, 0, pairs),
            // Each buffer crosses by itself, and a group shares its flush.
            (Batches, "xen", 256 + 8, 2 * pairs, groups, 0),
            (
                Batches,
                "xen-multicall",
                256 / 16 + 1,
                2 * groups,
                groups,
                0,
            ),
        ] {
            let found = run(driver, name, 512).unwrap();
            let expected = Counts {
                at_open,
                pairs,
                crossings,
                flushes,
                reached,
            };
            assert_eq!(found, expected, "{driver:?} {name}");
        }
    }
}
