//! Common configuration registers (virtio 1.2, section 4.1.4.3) and the rules of the device status
//! field (section 2.1).

use ringfence_vfio_user::fields::{copy_part, u16_at, u32_at};
use virtio_queue::{Queue, QueueT};

use super::{CommonState, F_ACCESS_PLATFORM, F_VERSION_1, QueueSlot};
use crate::irq::NO_VECTOR;
use crate::pci::layout::COMMON_BYTES;
use crate::saved_state::StateError;

/// `ACKNOWLEDGE`: the driver has found the device.
pub(crate) const ACKNOWLEDGE: u8 = 1;
/// `DRIVER`: the driver knows how to drive the device.
pub(crate) const DRIVER: u8 = 2;
/// `DRIVER_OK`: the driver is ready.
pub(crate) const DRIVER_OK: u8 = 4;
/// `FEATURES_OK`: feature negotiation is complete.
pub(crate) const FEATURES_OK: u8 = 8;
/// `DEVICE_NEEDS_RESET`: set by the device only.
pub(crate) const NEEDS_RESET: u8 = 64;
/// `FAILED`: the driver has given up.
pub(crate) const FAILED: u8 = 128;

/// A queue and its MSI-X vector.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) queue: Queue,
    pub(crate) vector: u16,
    /// True if the device's last turn left work for which the driver will not ring the doorbell.
    pub(crate) unfinished: bool,
}

/// Action that a register write requires of the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The transport does nothing further.
    None,
    /// Activate the device.
    Begin,
    /// Reset the device.
    Reset,
}

/// The common configuration registers.
#[derive(Debug)]
pub(crate) struct Common {
    offered: u64,
    accepted: u64,
    offered_select: u32,
    accepted_select: u32,
    config_vector: u16,
    status: u8,
    /// True while a reset is incomplete. `device_status` then reads `DEVICE_NEEDS_RESET`.
    resetting: bool,
    selected: u16,
    pub(crate) slots: Vec<Slot>,
}

impl Common {
    /// `offered` are all offered features; `sizes` are the maximum queue sizes. A size that is not
    /// a power of two creates no queue.
    pub(crate) fn new(offered: u64, sizes: &[u16]) -> Self {
        let slots = sizes.iter().filter_map(|size| {
            Some(Slot {
                queue: Queue::new(*size).ok()?,
                vector: NO_VECTOR,
                unfinished: false,
            })
        });
        Self {
            offered,
            accepted: 0,
            offered_select: 0,
            accepted_select: 0,
            config_vector: NO_VECTOR,
            status: 0,
            resetting: false,
            selected: 0,
            slots: slots.collect(),
        }
    }

    pub(crate) fn reset(&mut self) {
        let offered = self.offered;
        let sizes: Vec<u16> = self.slots.iter().map(|s| s.queue.max_size()).collect();
        *self = Self::new(offered, &sizes);
    }

    /// Keeps `device_status` from reading 0 after [`reset`](Self::reset), until the next reset. The
    /// driver waits for a read of 0 before it uses the device (virtio 1.3, section 4.1.4.3.2), so
    /// all writes except that of a status of 0 are ignored.
    pub(crate) fn delay_reset(&mut self) {
        self.resetting = true;
        self.status = NEEDS_RESET;
    }

    /// Returns true while a reset is incomplete.
    pub(crate) fn is_resetting(&self) -> bool {
        self.resetting
    }

    /// Returns the registers and the ring positions of the queues.
    pub(crate) fn save(&self) -> CommonState {
        let queues = self.slots.iter().map(|slot| QueueSlot {
            queue: slot.queue.state(),
            vector: slot.vector,
            unfinished: slot.unfinished,
        });
        CommonState {
            offered: self.offered,
            accepted: self.accepted,
            offered_select: self.offered_select,
            accepted_select: self.accepted_select,
            config_vector: self.config_vector,
            status: self.status,
            selected: self.selected,
            queues: queues.collect(),
        }
    }

    /// Restores the registers of another device of the same kind, if a driver could have produced
    /// them. `has` returns true for a valid MSI-X vector.
    ///
    /// # Errors
    /// [`StateError::Register`] names the first invalid value; nothing has changed.
    pub(crate) fn restore(
        &mut self,
        state: &CommonState,
        has: impl Fn(u16) -> bool,
    ) -> Result<(), StateError> {
        let register = |what| StateError::Register { what };
        let is_vector = |vector: u16| vector == NO_VECTOR || has(vector);
        if state.offered != self.offered || state.accepted & !self.offered != 0 {
            return Err(register("features"));
        }
        let known = ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | NEEDS_RESET | FAILED;
        let agreed = state.status & FEATURES_OK != 0;
        if state.status & !known != 0 || (state.status & DRIVER_OK != 0 && !agreed) {
            return Err(register("status"));
        }
        if !is_vector(state.config_vector) {
            return Err(register("configuration vector"));
        }
        if state.queues.len() != self.slots.len() {
            return Err(register("queue count"));
        }
        let mut slots = Vec::new();
        for (slot, new) in self.slots.iter().zip(&state.queues) {
            if new.queue.max_size != slot.queue.max_size() {
                return Err(register("maximum queue size"));
            }
            if !is_vector(new.vector) {
                return Err(register("queue vector"));
            }
            let event_idx = state.accepted & super::F_EVENT_IDX != 0;
            if new.queue.ready && (!agreed || new.queue.event_idx_enabled != event_idx) {
                return Err(register("queue_enable"));
            }
            slots.push(Slot {
                queue: Queue::try_from(new.queue).map_err(|_| register("queue address"))?,
                vector: new.vector,
                unfinished: new.unfinished,
            });
        }
        let restored = Self {
            offered: state.offered,
            accepted: state.accepted,
            offered_select: state.offered_select,
            accepted_select: state.accepted_select,
            config_vector: state.config_vector,
            status: state.status,
            resetting: false,
            selected: state.selected,
            slots,
        };
        if agreed && !restored.acceptable() {
            return Err(register("accepted features"));
        }
        *self = restored;
        Ok(())
    }

    /// Returns the features that the driver accepted.
    pub(crate) fn features(&self) -> u64 {
        self.accepted
    }

    /// Returns true if the driver has set `DRIVER_OK`.
    pub(crate) fn begun(&self) -> bool {
        self.status & DRIVER_OK != 0
    }

    /// Returns true if the device may work: the driver is ready and neither side has failed.
    pub(crate) fn running(&self) -> bool {
        self.status & DRIVER_OK != 0 && self.status & (NEEDS_RESET | FAILED) == 0
    }

    pub(crate) fn config_vector(&self) -> u16 {
        self.config_vector
    }

    pub(crate) fn needs_reset(&mut self) {
        self.status |= NEEDS_RESET;
    }

    /// Marks every enabled queue as having unfinished work.
    pub(crate) fn look_at_all(&mut self) {
        for slot in &mut self.slots {
            slot.unfinished |= slot.queue.ready();
        }
    }

    fn selected(&self) -> Option<&Slot> {
        self.slots.get(usize::from(self.selected))
    }

    pub(crate) fn read(&self, offset: usize, data: &mut [u8]) {
        let half = |features: u64, select: u32| match select {
            0 => (features & 0xffff_ffff) as u32,
            1 => (features >> 32) as u32,
            _ => 0,
        };
        let mut bytes = Vec::with_capacity(COMMON_BYTES as usize);
        bytes.extend(self.offered_select.to_le_bytes());
        bytes.extend(half(self.offered, self.offered_select).to_le_bytes());
        bytes.extend(self.accepted_select.to_le_bytes());
        bytes.extend(half(self.accepted, self.accepted_select).to_le_bytes());
        bytes.extend(self.config_vector.to_le_bytes());
        let queues = u16::try_from(self.slots.len()).unwrap_or(u16::MAX);
        bytes.extend(queues.to_le_bytes());
        // The generation is always 0: the device configuration never changes.
        bytes.extend([self.status, 0]);
        bytes.extend(self.selected.to_le_bytes());
        // An absent queue reads as size 0.
        if let Some(Slot { queue, vector, .. }) = self.selected() {
            bytes.extend(queue.size().to_le_bytes());
            bytes.extend(vector.to_le_bytes());
            bytes.extend(u16::from(queue.ready()).to_le_bytes());
            bytes.extend(self.selected.to_le_bytes());
            bytes.extend(queue.desc_table().to_le_bytes());
            bytes.extend(queue.avail_ring().to_le_bytes());
            bytes.extend(queue.used_ring().to_le_bytes());
        } else {
            bytes.extend([0; 2]);
            bytes.extend(NO_VECTOR.to_le_bytes());
        }
        copy_part(&bytes, offset, data);
    }

    /// Writes a register as a whole, or half of a 64-bit one; ignores other accesses. `has` returns
    /// true for a valid MSI-X vector.
    pub(crate) fn write(
        &mut self,
        offset: usize,
        data: &[u8],
        has: impl Fn(u16) -> bool,
    ) -> Effect {
        let vector = |value: u16| if has(value) { value } else { NO_VECTOR };
        let word = u32_at(data, 0).unwrap_or(0);
        let short = u16_at(data, 0).unwrap_or(0);
        if self.resetting && !matches!((offset, data), (0x14, [0])) {
            return Effect::None;
        }
        match (offset, data.len()) {
            (0x00, 4) => self.offered_select = word,
            (0x08, 4) => self.accepted_select = word,
            (0x0c, 4) => self.accept(word),
            (0x10, 2) => self.config_vector = vector(short),
            (0x14, 1) => return self.set_status(data.first().copied().unwrap_or(0)),
            (0x16, 2) => self.selected = short,
            (0x20..=0x34, 8) if offset.is_multiple_of(8) => {
                self.configure(offset, word);
                self.configure(offset + 4, u32_at(data, 4).unwrap_or(0));
            }
            (0x18 | 0x1c, 2) => self.configure(offset, short.into()),
            (0x1a, 2) => {
                let new = vector(short);
                if let Some(slot) = self.slots.get_mut(usize::from(self.selected)) {
                    slot.vector = new;
                }
            }
            (0x20..=0x34, 4) => self.configure(offset, word),
            _ => {}
        }
        Effect::None
    }

    /// Writes one half of the accepted features. They are fixed once `FEATURES_OK` is set.
    fn accept(&mut self, half: u32) {
        if self.status & FEATURES_OK != 0 {
            return;
        }
        let (keep, new) = match self.accepted_select {
            0 => (!0xffff_ffff, u64::from(half)),
            1 => (0xffff_ffff, u64::from(half) << 32),
            _ => return,
        };
        self.accepted = (self.accepted & keep) | (new & self.offered);
    }

    /// Writes a field of the selected queue. Ignored if the queue is enabled or `FEATURES_OK` is
    /// not set.
    fn configure(&mut self, offset: usize, value: u32) {
        let settled = self.status & FEATURES_OK != 0;
        let event_idx = self.accepted & super::F_EVENT_IDX != 0;
        let Some(slot) = self.slots.get_mut(usize::from(self.selected)) else {
            return;
        };
        let queue = &mut slot.queue;
        if queue.ready() || !settled {
            return;
        }
        match offset {
            0x18 => queue.set_size(u16::try_from(value).unwrap_or(0)),
            0x1c if value == 1 => {
                queue.set_event_idx(event_idx);
                queue.set_ready(true);
            }
            0x20 => queue.set_desc_table_address(Some(value), None),
            0x24 => queue.set_desc_table_address(None, Some(value)),
            0x28 => queue.set_avail_ring_address(Some(value), None),
            0x2c => queue.set_avail_ring_address(None, Some(value)),
            0x30 => queue.set_used_ring_address(Some(value), None),
            0x34 => queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }

    /// Adds the new bits of a status write; a write of 0 resets. `DRIVER_OK` requires
    /// `FEATURES_OK`, which requires acceptable features. `ACKNOWLEDGE` and `DRIVER` have no effect
    /// on the device: their order (section 3.1.1) binds the driver and is not enforced.
    fn set_status(&mut self, new: u8) -> Effect {
        if new == 0 {
            return Effect::Reset;
        }
        let added = new & !self.status & (ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | FAILED);
        self.status |= added & (ACKNOWLEDGE | DRIVER | FAILED);
        if added & FEATURES_OK != 0 && self.acceptable() {
            self.status |= FEATURES_OK;
        }
        if added & DRIVER_OK != 0 && self.status & FEATURES_OK != 0 {
            self.status |= DRIVER_OK;
            return Effect::Begin;
        }
        Effect::None
    }

    /// Returns true if the accepted features include all required ones. A driver that would bypass
    /// the IOMMU is rejected here instead of failing later.
    fn acceptable(&self) -> bool {
        let demanded = F_VERSION_1 | (self.offered & F_ACCESS_PLATFORM);
        self.accepted & demanded == demanded
    }
}

impl CommonState {
    /// Returns the accepted features; `None` if the driver has not set `DRIVER_OK`.
    pub(crate) fn begun(&self) -> Option<u64> {
        (self.status & DRIVER_OK != 0).then_some(self.accepted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_with_an_incomplete_reset_takes_only_another_reset() {
        let mut common = Common::new(F_VERSION_1, &[8]);
        common.delay_reset();
        let before = common.save();
        // Select the upper half of the features, accept version 1, and report DRIVER_OK.
        let one = 1u32.to_le_bytes();
        for (offset, data) in [
            (0x08, &one[..]),
            (0x0c, &one),
            (0x14, &[15]),
            (0x16, &[1, 0]),
        ] {
            assert_eq!(common.write(offset, data, |_| true), Effect::None);
            assert_eq!(common.save(), before, "offset {offset:#x}");
        }
        assert_eq!(common.write(0x14, &[0], |_| true), Effect::Reset);
        common.reset();
        assert_eq!(common.write(0x14, &[1], |_| true), Effect::None);
        assert_eq!(common.save().status, ACKNOWLEDGE);
    }
}
