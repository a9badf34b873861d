//! Counts the ring slots that a trace needs, in one pass before the replay.

use std::io::Read;

use ringfence_trace::{DeviceIndex, Operations};
use ringfence_types::Direction;

use super::{RINGS, RingSizes, ring_index};
use crate::error::LabError;
use crate::limits::ReplayLimits;
use crate::plan::{Plan, Planner, Step, each_plan};

/// The ring usage of a trace.
#[derive(Debug, Clone, Default)]
pub struct RingUsage {
    /// Counts by device and [ring](ring_index).
    devices: Vec<[SlotCount; RINGS]>,
    /// Number of slots of each live mapping, with its device and direction.
    live: Vec<Option<(DeviceIndex, Direction, u32)>>,
}

/// Live slots of one ring, now and at most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct SlotCount {
    live: u64,
    most: u64,
}

impl RingUsage {
    /// Adds the steps of `plan`.
    pub fn add(&mut self, plan: &Plan) {
        for timed in &plan.steps {
            match timed.step {
                Step::Map {
                    id,
                    device,
                    direction,
                    count,
                    ..
                } => {
                    let slot = id.index();
                    if self.live.len() <= slot {
                        self.live.resize(slot + 1, None);
                    }
                    self.live[slot] = Some((device, direction, count));
                    let ring = self.ring(device, direction);
                    ring.live += u64::from(count);
                    ring.most = ring.most.max(ring.live);
                }
                Step::Unmap { id, .. } => {
                    let held = self.live.get_mut(id.index()).and_then(Option::take);
                    if let Some((device, direction, count)) = held {
                        self.ring(device, direction).live -= u64::from(count);
                    }
                }
                Step::EndBurst { .. }
                | Step::Doorbell { .. }
                | Step::EndDescriptor { .. }
                | Step::Tick => {}
            }
        }
    }

    fn ring(&mut self, device: DeviceIndex, direction: Direction) -> &mut SlotCount {
        if self.devices.len() <= device.index() {
            self.devices
                .resize(device.index() + 1, [SlotCount::default(); RINGS]);
        }
        &mut self.devices[device.index()][ring_index(direction)]
    }

    /// Returns the peak number of mapped slots of a ring. Each segment of a scatterlist takes a
    /// slot.
    pub fn live_max(&self, device: DeviceIndex, direction: Direction) -> u64 {
        let device = self.devices.get(device.index());
        device.map_or(0, |rings| rings[ring_index(direction)].most)
    }

    /// Returns ring sizes of at least twice the peak number of mapped slots.
    pub fn sizes(&self) -> RingSizes {
        let twice = |rings: &[SlotCount; RINGS]| rings.map(|ring| RingSizes::twice(ring.most));
        RingSizes::Counted(self.devices.iter().map(twice).collect())
    }
}

/// Reads a trace to its end and counts the operations of `devices`, or of all devices.
///
/// # Errors
/// The trace is malformed or exceeds a limit.
pub fn count_ring_usage<R: Read>(
    mut operations: Operations<R>,
    devices: Option<&[String]>,
    limits: ReplayLimits,
) -> Result<RingUsage, LabError> {
    let mut usage = RingUsage::default();
    each_plan(
        &mut operations,
        &mut Planner::new().with_limits(limits),
        devices,
        |_, plan, _| {
            usage.add(plan);
            Ok(())
        },
    )?;
    Ok(usage)
}
