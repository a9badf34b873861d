//! A virtio device as a PCI function.

use std::error::Error;
use std::io;
use std::time::Instant;

use ringfence_vfio_user::SetIrqs;
use vm_memory::GuestMemoryMmap;

use super::common::{Common, Effect};
use super::{
    BusMasterStuck, Device, F_ACCESS_PLATFORM, F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1,
    PollSource, QueueBroken, ResetPending,
};
use super::{DeviceState, VirtioState};
use crate::counters::DeviceCounters;
use crate::dma::{Dma, MemoryInUse};
use crate::irq::Vectors;
use crate::pci::{BusMasterGate, ConfigSpace, Identity, WINDOW_DATA, layout};
use crate::saved_state::{HandOverBlocker, StateError};
use crate::server::PolledFunction;
use crate::session::{CONFIG_REGION, Function, FunctionError, Region};

const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// Most queues processed without a doorbell before the server handles messages again.
const MAX_QUEUES_PER_QUANTUM: usize = 64;

/// Returns true if a write at `offset` of BAR `region` is a doorbell.
pub fn is_doorbell(region: u32, offset: u64) -> bool {
    let doorbells = layout::NOTIFY..layout::NOTIFY + layout::NOTIFY_BYTES;
    region == u32::from(layout::BAR)
        && u32::try_from(offset).is_ok_and(|at| doorbells.contains(&at))
}

/// Addresses that the driver gives to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaAddresses {
    /// Addresses of the guest's memory, which nothing translates.
    GuestPhysical,
    /// Addresses that an IOMMU translates. The function requires `VIRTIO_F_ACCESS_PLATFORM`.
    Translated,
}

/// A PCI function with device `D`, which accesses memory through `A`.
#[derive(Debug)]
pub struct VirtioPci<D, A> {
    device: D,
    dma: BusMasterGate<A>,
    config: ConfigSpace,
    identity: Identity,
    common: Common,
    vectors: Vectors,
    isr: u8,
    broken: Option<QueueBroken>,
    counters: std::sync::Arc<DeviceCounters>,
}

impl<D: Device, A: Dma> VirtioPci<D, A> {
    /// Creates the function in its state after power-on.
    pub fn new(
        device: D,
        dma: A,
        addresses: DmaAddresses,
        counters: std::sync::Arc<DeviceCounters>,
    ) -> Self {
        let mut features = device.features() | F_VERSION_1 | F_EVENT_IDX | F_INDIRECT_DESC;
        if addresses == DmaAddresses::Translated {
            features |= F_ACCESS_PLATFORM;
        }
        let queues = u16::try_from(device.queue_sizes().len()).unwrap_or(u16::MAX);
        let identity = Identity {
            device: D::TYPE,
            class: D::CLASS,
            // One vector for each queue and one for configuration changes.
            vectors: queues.saturating_add(1),
        };
        Self {
            common: Common::new(features, device.queue_sizes()),
            device,
            dma: BusMasterGate::new(dma),
            config: ConfigSpace::new(&identity),
            identity,
            vectors: Vectors::new(identity.vectors),
            isr: 0,
            broken: None,
            counters,
        }
    }

    /// Returns the device.
    pub fn device(&mut self) -> &mut D {
        &mut self.device
    }

    /// Returns true if the driver has set Bus Master Enable.
    pub fn is_master(&self) -> bool {
        self.config.bus_master().is_some()
    }

    /// Returns the registers and the device's own state, for another process.
    ///
    /// # Errors
    /// [`HandOverBlocker`] if the device cannot be handed over.
    pub(crate) fn save(&self) -> Result<(VirtioState, DeviceState), HandOverBlocker> {
        if self.common.is_resetting() {
            return Err(HandOverBlocker::Unsupported(
                "a device whose reset is incomplete",
            ));
        }
        let registers = VirtioState {
            config: self.config.save(),
            isr: self.isr,
            vectors: self.vectors.save()?,
            common: self.common.save(),
        };
        let mut state = self.device.save()?;
        if self.dma.is_assigned() {
            state.set_assigned()?;
        }
        Ok((registers, state))
    }

    /// Restores the registers of another function of the same kind. The device itself must have
    /// been restored already.
    ///
    /// # Errors
    /// [`StateError`] if the state is invalid; the function must not be used then.
    pub(crate) fn restore(&mut self, state: VirtioState) -> Result<(), StateError> {
        if state.isr & !(ISR_QUEUE | ISR_CONFIG) != 0 {
            return Err(StateError::Register {
                what: "interrupt status",
            });
        }
        let vectors = &self.vectors;
        self.common
            .restore(&state.common, |vector| vectors.has(vector))?;
        self.config.restore(state.config)?;
        self.vectors.restore(state.vectors)?;
        self.isr = state.isr;
        if self.common.begun() {
            self.device.resume(self.common.features());
        }
        if self.is_master() {
            self.device.set_bus_master();
        }
        Ok(())
    }

    /// Lets the device process queue `index` as after a doorbell, if it is bus master.
    pub fn work(&mut self, index: usize) {
        if !self.common.running() {
            return;
        }
        // No doorbell is lost: setting Bus Master Enable marks every queue as unfinished.
        let Some(mastery) = self.config.bus_master() else {
            return;
        };
        let Some(slot) = self.common.slots.get_mut(index) else {
            return;
        };
        slot.unfinished = false;
        if !virtio_queue::QueueT::ready(&slot.queue) {
            return;
        }
        let dma = self.dma.open(mastery);
        match self.device.process(index, &mut slot.queue, dma) {
            Ok(turn) => {
                slot.unfinished = turn.more;
                if turn.interrupt {
                    self.isr |= ISR_QUEUE;
                    self.counters.interrupts.add(1);
                    self.vectors.signal(slot.vector, mastery);
                }
            }
            // The rings are unusable; ask the driver for a reset (virtio 1.2, section 2.1.2).
            Err(broken) => {
                self.broken = Some(broken);
                self.counters.broken_queues.add(1);
                self.common.needs_reset();
                self.isr |= ISR_CONFIG;
                self.vectors.signal(self.common.config_vector(), mastery);
            }
        }
    }

    /// Processes queues that are due without a doorbell, for one turn.
    fn work_on_due(&mut self) {
        for _ in 0..MAX_QUEUES_PER_QUANTUM {
            // Queues that are due stay due.
            if !self.is_master() {
                break;
            }
            let Some(index) = self.device.due() else {
                break;
            };
            self.work(index);
        }
    }

    /// Writes configuration space registers. When it returns `Ok` after Bus Master Enable was
    /// cleared, the function accesses no memory.
    fn configure(&mut self, offset: usize, data: &[u8]) -> Result<(), FunctionError> {
        let mut after = self.config.clone();
        after.write(offset, data);
        let (was, is) = (self.is_master(), after.bus_master().is_some());
        if was && !is {
            let left = self.device.clear_bus_master();
            left.map_err(|BusMasterStuck| FunctionError::StillMaster)?;
            // Collect the result of the last turn, which ran before the bit was cleared.
            self.work_on_due();
        }
        self.config = after;
        if is && !was {
            self.device.set_bus_master();
            // A driver that rang while the bit was clear does not ring again.
            self.common.look_at_all();
        }
        Ok(())
    }

    /// Resets the device. Until it succeeds, `device_status` does not read 0.
    fn reset_device(&mut self) -> Result<(), ResetPending> {
        self.common.reset();
        self.isr = 0;
        let reset = self.device.reset();
        reset.inspect_err(|ResetPending| self.common.delay_reset())
    }

    fn read_bar(&mut self, offset: u32, data: &mut [u8]) {
        data.fill(0);
        let page = offset & !0xfff;
        let within = (offset - page) as usize;
        match page {
            layout::COMMON => {
                // The driver polls `device_status` until the reset is complete.
                if self.common.is_resetting() {
                    let _ = self.reset_device();
                }
                self.common.read(within, data);
            }
            // Reading clears the register (virtio 1.2, section 4.1.4.5).
            layout::ISR if within == 0 => {
                if let Some(first) = data.first_mut() {
                    *first = std::mem::take(&mut self.isr);
                }
            }
            layout::DEVICE => self.device.read_config(within, data),
            _ => {}
        }
    }

    fn write_bar(&mut self, offset: u32, data: &[u8]) {
        let page = offset & !0xfff;
        let within = (offset - page) as usize;
        match page {
            layout::COMMON => {
                let vectors = &self.vectors;
                match self
                    .common
                    .write(within, data, |vector| vectors.has(vector))
                {
                    Effect::None => {}
                    Effect::Begin => self.device.activate(self.common.features()),
                    // If the reset is incomplete, device_status says so.
                    Effect::Reset => {
                        let _ = self.reset_device();
                    }
                }
            }
            layout::DEVICE => self.device.write_config(within, data),
            // The offset identifies the queue; the written value repeats its number.
            layout::NOTIFY if within.is_multiple_of(layout::NOTIFY_STRIDE as usize) => {
                self.counters.doorbells.add(1);
                self.work(within / layout::NOTIFY_STRIDE as usize);
                self.work_on_due();
            }
            _ => {}
        }
    }
}

impl<D: Device, A: Dma> Function for VirtioPci<D, A> {
    fn region(&self, index: u32) -> Region {
        self.config.region(index)
    }

    fn vectors(&self, index: u32) -> u32 {
        self.vectors.count(index)
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), FunctionError> {
        let offset = self.region(region).check(region, offset, data.len())?;
        if region != CONFIG_REGION {
            self.read_bar(offset, data);
            return Ok(());
        }
        let offset = offset as usize;
        if offset == WINDOW_DATA
            && let Some(window) = self.config.window()
            && data.len() >= window.bytes as usize
            && window.offset < layout::BAR_BYTES
        {
            data.fill(0);
            if let Some(data) = data.get_mut(..window.bytes as usize) {
                self.read_bar(window.offset, data);
            }
            return Ok(());
        }
        self.config.read(offset, data);
        Ok(())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), FunctionError> {
        let offset = self.region(region).check(region, offset, data.len())?;
        if region != CONFIG_REGION {
            self.write_bar(offset, data);
            return Ok(());
        }
        let offset = offset as usize;
        if offset == WINDOW_DATA
            && let Some(window) = self.config.window()
            && let Some(data) = data.get(..window.bytes as usize)
            && window.offset < layout::BAR_BYTES
        {
            self.write_bar(window.offset, data);
            return Ok(());
        }
        self.configure(offset, data)
    }

    fn set_irqs(&mut self, request: SetIrqs) -> Result<(), FunctionError> {
        self.vectors.set(request)
    }

    fn lock_pinned(&mut self, memory: &GuestMemoryMmap) -> io::Result<()> {
        self.dma.lock_pinned(memory)
    }

    fn memory_changed(&mut self, memory: &GuestMemoryMmap) -> Result<(), FunctionError> {
        let set = self.dma.set_memory(memory);
        set.map_err(|MemoryInUse| FunctionError::MemoryInUse)
    }

    fn complete_memory_change(&mut self) -> Result<(), FunctionError> {
        let completed = self.dma.complete_set_memory();
        completed.map_err(|MemoryInUse| FunctionError::MemoryInUse)
    }

    fn reset(&mut self) -> Result<(), FunctionError> {
        let reset = self.reset_device();
        let left = self.device.clear_bus_master();
        self.config = ConfigSpace::new(&self.identity);
        self.vectors = Vectors::new(self.identity.vectors);
        left.map_err(|BusMasterStuck| FunctionError::StillMaster)?;
        reset.map_err(|ResetPending| FunctionError::ResetPending)
    }
}

impl<D: Device, A: Dma> PolledFunction for VirtioPci<D, A> {
    fn end(&mut self) {
        self.device.end();
    }

    fn pause(&mut self, until: Instant) -> bool {
        let still = self.device.pause(until);
        // Collect the result of the turn that has ended.
        self.work_on_due();
        // A driver that is gone or stopped does not poll for the end of its reset.
        if self.common.is_resetting() {
            let _ = self.reset_device();
        }
        still
    }

    fn release(&mut self) -> bool {
        self.device.release()
    }

    fn completed(&self) -> u64 {
        self.counters.requests.get()
    }

    fn waits_for(&self) -> Option<PollSource<'_>> {
        // A stopped device, or one without bus mastering, cannot store data that arrives.
        let wants = self.common.running() && self.is_master();
        wants.then(|| self.device.waits_for())?
    }

    fn on_ready(&mut self) {
        if self.is_master() {
            self.device.on_ready();
            self.work_on_due();
        }
    }

    fn unfinished(&self) -> bool {
        let slots = &self.common.slots;
        self.common.running()
            && self.is_master()
            && (self.device.busy() || slots.iter().any(|slot| slot.unfinished))
    }

    fn continue_work(&mut self) {
        for index in 0..self.common.slots.len() {
            let slot = self.common.slots.get(index);
            if slot.is_some_and(|slot| slot.unfinished) {
                self.work(index);
            }
        }
        self.work_on_due();
    }

    fn take_failure(&mut self) -> Option<Box<dyn Error + Send + Sync>> {
        self.broken.take().map(Into::into)
    }
}
