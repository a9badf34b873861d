//! Facts about each device learned so far.

use super::{Addressing, Resolver};
use crate::op::DeviceIndex;
use crate::summary::DeviceSummary;

impl Resolver {
    pub(super) fn count(&mut self, device: DeviceIndex, count: impl FnOnce(&mut DeviceSummary)) {
        let devices = &mut self.summary.devices;
        let index = device.index();
        if devices.len() <= index {
            devices.resize_with(index + 1, DeviceSummary::default);
        }
        if let Some(counts) = devices.get_mut(index) {
            count(counts);
        }
    }

    #[inline]
    pub(super) fn note_event(&mut self, device: DeviceIndex) {
        if self.seen.get(device.index()) == Some(&true) {
            return;
        }
        if self.seen.len() <= device.index() {
            self.seen.resize(device.index() + 1, false);
        }
        if let Some(seen) = self.seen.get_mut(device.index()) {
            *seen = true;
        }
        self.named += 1;
        self.only_named = (self.named == 1).then_some(device);
    }

    pub(super) fn addressing(&self, device: DeviceIndex) -> Addressing {
        self.addressing
            .get(device.index())
            .copied()
            .unwrap_or_default()
    }

    pub(super) fn note_addressing(&mut self, device: DeviceIndex, direct: bool) {
        if self.addressing.len() <= device.index() {
            self.addressing
                .resize(device.index() + 1, Addressing::Unknown);
        }
        if let Some(addressing) = self.addressing.get_mut(device.index()) {
            *addressing = match direct {
                true if *addressing != Addressing::Translated => Addressing::Direct,
                _ => Addressing::Translated,
            };
        }
    }
}
