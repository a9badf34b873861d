//! Statistics from the operations.

use std::collections::BTreeMap;

use super::bursts::{FlowKey, flow_of};
use super::flow::FlowState;
use super::pages::PageSet;
use super::{DeviceInfo, Info};
use crate::op::{Chunk, DeviceIndex, MapClass, Op, OpKind};
use crate::summary::Summary;

/// A live mapping: its flow and its serial number there.
type LiveMapping = Option<(FlowKey, u64)>;

/// Statistics from the operations.
#[derive(Debug, Default)]
pub(super) struct Flows {
    flows: BTreeMap<FlowKey, FlowState>,
    live: Vec<LiveMapping>,
    /// By device: pages, live mappings, maximum of live mappings.
    devices: BTreeMap<DeviceIndex, (PageSet, u64, u64)>,
    pages: PageSet,
    dma_live: u64,
    dma_max: u64,
}

impl Flows {
    pub(super) fn add(&mut self, op: &Op, chunk: &Chunk) {
        match op.kind {
            OpKind::Map {
                id,
                direction,
                class,
                segments,
                ..
            } => {
                let Some(key) = flow_of(op.device, direction, class) else {
                    return;
                };
                let iommu_only = key.2;
                let state = self.flows.entry(key).or_default();
                state.close_burst(op.cpu);
                let serial = state.base + state.live.len() as u64;
                state.live.push_back(true);
                state.flow.maps += 1;
                state.flow.scatterlists += u64::from(class == MapClass::Sg);
                let device = self.devices.entry(op.device).or_default();
                let mut bytes = 0u64;
                for &segment in chunk.segments_of(segments) {
                    state.flow.segments += 1;
                    bytes = bytes.saturating_add(segment.bytes());
                    device.0.add(segment);
                    self.pages.add(segment);
                }
                *state.sizes.entry(bytes).or_default() += 1;
                device.1 += 1;
                device.2 = device.2.max(device.1);
                if !iommu_only {
                    self.dma_live += 1;
                    self.dma_max = self.dma_max.max(self.dma_live);
                }
                if self.live.len() <= id.index() {
                    self.live.resize(id.index() + 1, None);
                }
                if let Some(slot) = self.live.get_mut(id.index()) {
                    *slot = Some((key, serial));
                }
            }
            OpKind::Unmap { id } => {
                let Some((key, serial)) = self.live.get_mut(id.index()).and_then(Option::take)
                else {
                    return;
                };
                if !key.2 {
                    self.dma_live -= 1;
                }
                if let Some(device) = self.devices.get_mut(&key.0) {
                    device.1 -= 1;
                }
                let Some(state) = self.flows.get_mut(&key) else {
                    return;
                };
                if op.lines > 0 {
                    state.unmap(serial, op.cpu, op.time.0);
                    return;
                }
                // A replaced mapping has no unmap by the driver, so it does not count for order or
                // bursts.
                let index = serial.wrapping_sub(state.base) as usize;
                if let Some(alive) = state.live.get_mut(index) {
                    *alive = false;
                }
                while state.live.front() == Some(&false) {
                    state.live.pop_front();
                    state.base += 1;
                }
            }
        }
    }

    pub(super) fn finish(self, info: &mut Info, names: Vec<String>, summary: &Summary) {
        info.pages = self.pages.counts();
        info.max_live = self.dma_max;
        info.live_at_end = self.dma_live;
        info.devices = names
            .into_iter()
            .map(|name| DeviceInfo {
                name,
                ..DeviceInfo::default()
            })
            .collect();
        for (index, device) in info.devices.iter_mut().enumerate() {
            let counts = summary.devices.get(index);
            device.skips_unmaps = counts.is_some_and(|counts| counts.skips_unmaps());
        }
        for (index, (pages, live, most)) in self.devices {
            if let Some(device) = info.devices.get_mut(index.index()) {
                device.pages = pages.counts();
                device.live_at_end = live;
                device.max_live = most;
            }
        }
        for ((device, direction, iommu_only), state) in self.flows {
            if let Some(device) = info.devices.get_mut(device.index()) {
                let mut flow = state.finish();
                flow.direction = direction.to_string();
                flow.iommu_only = iommu_only;
                device.flows.push(flow);
            }
        }
    }
}
