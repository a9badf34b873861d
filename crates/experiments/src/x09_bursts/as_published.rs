//! Overflow of the rings of rIOMMU Fig. 11, which free a slot at its unmap.

use std::collections::HashMap;

use ringfence_dma::MapReason;
use ringfence_lab::LabError;
use ringfence_lab::plan::Step;
use ringfence_memory::Arena;
use ringfence_papers::RingAsPublished;
use ringfence_trace::MappingId;
use ringfence_types::RingIova;

use super::super::capture::Run;
use super::super::owned::{ARENA, LOST, empty_rings};

/// Counts of a run on the rings as published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Overflow {
    /// Maps of the run.
    maps: u64,
    /// Maps that each ring refused because it was full, in the order of the rings' first use.
    refused: Vec<u64>,
    /// Maps into the entry of a live mapping, which the figure accepts (erratum 7).
    pub(super) overwritten: u64,
}

impl Overflow {
    /// Maps that a ring refused.
    pub(super) fn refused(&self) -> u64 {
        self.refused.iter().sum()
    }

    /// Rings that refused one map or more.
    pub(super) fn rings_that_refuse(&self) -> usize {
        self.refused.iter().filter(|maps| **maps > 0).count()
    }

    /// Share of the maps that a ring refused.
    pub(super) fn share(&self) -> f64 {
        self.refused() as f64 / self.maps.max(1) as f64
    }
}

/// A ring with the addresses that its driver holds.
struct DriverRing {
    ring: RingAsPublished,
    /// Addresses by the id of their mapping.
    live: HashMap<MappingId, RingIova>,
    /// Live mappings of each address: more than one after an entry was overwritten.
    uses: HashMap<RingIova, u32>,
}

/// Makes the calls of `run` on rings as published that are empty at the start. `slots` has the size
/// of each ring, in the order of first use. A refused map is skipped together with its unmap.
///
/// # Errors
/// Memory is exhausted, or a ring refused a call for another reason.
pub(super) fn overflow(run: &Run, slots: &[u32]) -> Result<Overflow, LabError> {
    let plan = run.by_ring();
    let memory = Arena::new(ARENA)?;
    let rings = empty_rings(&memory, slots)?.into_iter();
    let mut rings: Vec<_> = rings
        .map(|ring| DriverRing {
            ring: ring.into(),
            live: HashMap::new(),
            uses: HashMap::new(),
        })
        .collect();
    let mut found = Overflow {
        maps: plan.maps,
        refused: vec![0; rings.len()],
        overwritten: 0,
    };
    for timed in &plan.steps {
        match timed.step {
            Step::Map {
                id,
                device,
                direction,
                first,
                count,
                ..
            } => {
                let [piece] = plan.segments(first, count) else {
                    return Err(LOST);
                };
                let driver = rings.get_mut(device.index()).ok_or(LOST)?;
                let refused = found.refused.get_mut(device.index()).ok_or(LOST)?;
                match driver.ring.map(&memory, piece, direction.permissions()) {
                    Ok(iova) => {
                        let uses = driver.uses.entry(iova).or_default();
                        found.overwritten += u64::from(*uses > 0);
                        *uses += 1;
                        driver.live.insert(id, iova);
                    }
                    Err(MapReason::RingFull(_)) => *refused += 1,
                    Err(_) => return Err(LOST),
                }
            }
            Step::Unmap { id, device, .. } => {
                let driver = rings.get_mut(device.index()).ok_or(LOST)?;
                if let Some(iova) = driver.live.remove(&id) {
                    driver.ring.unmap(&memory, iova).map_err(|_| LOST)?;
                    if let Some(uses) = driver.uses.get_mut(&iova) {
                        *uses = uses.saturating_sub(1);
                    }
                }
            }
            // The end of a burst frees no slot.
            Step::EndBurst { .. }
            | Step::Doorbell { .. }
            | Step::EndDescriptor { .. }
            | Step::Tick => {}
        }
    }
    Ok(found)
}
