//! Bursts of unmaps, one by one.

use std::collections::{BTreeMap, HashMap};

use ringfence_types::Direction;

use crate::op::{DeviceIndex, MapClass, Op, OpKind};

/// Longest gap in ns within a burst of unmaps, as in the replay.
const BURST_GAP_NS: u64 = 50_000;

/// Consecutive unmaps of one flow on one CPU, at most 50 us apart, without a map between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Burst {
    /// CPU that printed the unmaps.
    pub cpu: u16,
    /// Time of the first unmap in ns.
    pub first_ns: u64,
    /// Time of the last unmap in ns.
    pub last_ns: u64,
    /// Number of unmaps.
    pub unmaps: u64,
}

/// The open bursts of one flow, by CPU.
#[derive(Debug, Default)]
pub(super) struct OpenBursts(HashMap<u16, Burst>);

impl OpenBursts {
    /// Ends the burst of `cpu` at a map.
    pub(super) fn map(&mut self, cpu: u16) -> Option<Burst> {
        self.0.remove(&cpu)
    }

    /// Adds an unmap, and returns the burst that it does not continue.
    pub(super) fn unmap(&mut self, cpu: u16, now: u64) -> Option<Burst> {
        if let Some(burst) = self.0.get_mut(&cpu)
            && now.saturating_sub(burst.last_ns) <= BURST_GAP_NS
        {
            burst.last_ns = now;
            burst.unmaps += 1;
            return None;
        }
        let (first_ns, last_ns, unmaps) = (now, now, 1);
        self.0.insert(
            cpu,
            Burst {
                cpu,
                first_ns,
                last_ns,
                unmaps,
            },
        )
    }

    /// Returns the bursts that the end of the trace ends, in order of their CPUs.
    pub(super) fn finish(self) -> Vec<Burst> {
        let mut bursts: Vec<Burst> = self.0.into_values().collect();
        bursts.sort_unstable_by_key(|burst| burst.cpu);
        bursts
    }
}

/// A device, a direction, and true for mappings that only `iommu:*` lines show. Ordered, so that
/// reports are ordered.
pub(super) type FlowKey = (DeviceIndex, Direction, bool);

/// Returns the flow of a map; `None` for a coherent buffer, which belongs to no flow.
pub(super) fn flow_of(
    device: DeviceIndex,
    direction: Direction,
    class: MapClass,
) -> Option<FlowKey> {
    (class != MapClass::Coherent).then_some((device, direction, class == MapClass::IommuOnly))
}

/// A burst and its flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowBurst {
    /// The device of all unmaps.
    pub device: DeviceIndex,
    /// Direction of its mappings.
    pub direction: Direction,
    /// True if only `iommu:*` lines show these mappings.
    pub iommu_only: bool,
    /// The unmaps and their times.
    pub burst: Burst,
}

impl FlowBurst {
    fn new((device, direction, iommu_only): FlowKey, burst: Burst) -> Self {
        Self {
            device,
            direction,
            iommu_only,
            burst,
        }
    }
}

/// Finds the bursts that [`Info`](super::Info) counts, in the order in which they end. Memory grows
/// with the live mappings.
#[derive(Debug, Default)]
pub struct FlowBursts {
    flows: BTreeMap<FlowKey, OpenBursts>,
    /// Flows of the live mappings, by mapping.
    live: Vec<Option<FlowKey>>,
}

impl FlowBursts {
    /// Adds an operation, and returns the burst that it ends.
    pub fn add(&mut self, op: &Op) -> Option<FlowBurst> {
        match op.kind {
            OpKind::Map {
                id,
                direction,
                class,
                ..
            } => {
                let key = flow_of(op.device, direction, class);
                if self.live.len() <= id.index() {
                    self.live.resize(id.index() + 1, None);
                }
                self.live[id.index()] = key;
                let burst = self.flows.entry(key?).or_default().map(op.cpu)?;
                Some(FlowBurst::new(key?, burst))
            }
            // The driver did not unmap a replaced mapping.
            OpKind::Unmap { id } => {
                let key = self.live.get_mut(id.index()).and_then(Option::take)?;
                let flow = self.flows.get_mut(&key).filter(|_| op.lines > 0)?;
                Some(FlowBurst::new(key, flow.unmap(op.cpu, op.time.0)?))
            }
        }
    }

    /// Returns the bursts that the end of the trace ends.
    pub fn finish(self) -> Vec<FlowBurst> {
        let flows = self.flows.into_iter();
        let ended = flows.flat_map(|(key, open)| {
            let bursts = open.finish().into_iter();
            bursts.map(move |burst| FlowBurst::new(key, burst))
        });
        ended.collect()
    }
}
