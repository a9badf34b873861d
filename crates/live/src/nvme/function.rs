//! The controller as a PCI function: configuration space, registers, interrupts.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_nvme_device::{
    CommandKind, Config, Controller, Executed, NvmeStatus, Step, register,
};
use ringfence_vfio_user::SetIrqs;
use vm_memory::GuestMemoryMmap;

use super::FileMedium;
use super::memory::TurnMemory;
use crate::counters::DeviceCounters;
use crate::delay_timer::DelayTimer;
use crate::dma::{Dma, MemoryInUse};
use crate::event::PollSource;
use crate::irq::Vectors;
use crate::pci::{BusMasterGate, ConfigSpace, PlainIdentity};
use crate::server::PolledFunction;
use crate::session::{CONFIG_REGION, Function, FunctionError, Region};
use crate::virtio::{DmaInjector, QUANTUM_BYTES};

/// PCI device ID. No registry assigns it; the driver recognises the class.
const DEVICE_ID: u16 = 0x10f8;
/// Mass storage, non-volatile memory controller, NVM Express (base specification, section 2.1.5).
const CLASS: [u8; 3] = [0x01, 0x08, 0x02];
/// MSI-X table, which the client emulates, and pending bit array; both behind the doorbells.
const MSIX_TABLE: u32 = 0x2000;
const MSIX_PBA: u32 = 0x3000;
const BAR_BYTES: u32 = 0x4000;
/// Vectors of which the controller reports interrupts, a bit each.
const REPORTED_VECTORS: u16 = u32::BITS as u16;
/// Commands after which a turn ends.
const QUANTUM_COMMANDS: u32 = 256;

/// The PCI function. `A` is its access to memory.
#[derive(Debug)]
pub struct NvmeFunction<A> {
    controller: Controller,
    medium: FileMedium,
    injector: Option<DmaInjector>,
    /// Delays the work after a doorbell.
    timer: Option<DelayTimer>,
    /// True from a doorbell until the timer expires. The function then executes no commands.
    is_delayed: bool,
    dma: BusMasterGate<A>,
    config: ConfigSpace,
    vectors: Vectors,
    /// True if the last turn left work for which the driver will not ring a doorbell.
    has_work: bool,
    failure: Option<Box<dyn Error + Send + Sync>>,
    counters: Arc<DeviceCounters>,
}

impl<A: Dma> NvmeFunction<A> {
    /// Creates the function in its state after power-on.
    pub fn new(config: &Config, medium: FileMedium, dma: A, counters: Arc<DeviceCounters>) -> Self {
        let controller = Controller::new(config);
        Self {
            config: config_space(&controller),
            vectors: Vectors::new(controller.config().vectors()),
            controller,
            medium,
            injector: None,
            timer: None,
            is_delayed: false,
            dma: BusMasterGate::new(dma),
            has_work: false,
            failure: None,
            counters,
        }
    }

    /// Makes the device inject DMA accesses, to test the protection.
    pub fn inject_dma(&mut self, injector: DmaInjector) {
        self.injector = Some(injector);
    }

    /// Makes the device begin to work only `delay` after a doorbell.
    ///
    /// # Errors
    /// The host has no free descriptors.
    pub fn delay(&mut self, delay: Duration) -> io::Result<()> {
        self.timer = Some(DelayTimer::new(delay)?);
        Ok(())
    }

    /// Writes configuration space registers. Between two messages no command is in progress, so
    /// the function accesses no memory when this returns after Bus Master Enable was cleared.
    fn configure(&mut self, offset: usize, data: &[u8]) {
        let was_master = self.config.bus_master().is_some();
        self.config.write(offset, data);
        if !was_master {
            // A driver that rang while the bit was clear does not ring again.
            self.work();
        }
    }

    fn read_register(&self, offset: u32, data: &mut [u8]) {
        data.fill(0);
        if offset >= MSIX_TABLE {
            return;
        }
        let value = self.controller.read(offset.into(), data.len() as u64);
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
    }

    fn write_register(&mut self, offset: u32, data: &[u8]) {
        let mut value = [0; 8];
        let Some(low) = value.get_mut(..data.len()) else {
            return;
        };
        low.copy_from_slice(data);
        if offset >= MSIX_TABLE {
            return;
        }
        let (offset, bytes) = (u64::from(offset), data.len() as u64);
        let value = u64::from_le_bytes(value);
        self.controller
            .write(offset, bytes, value, &mut self.medium);
        let is_doorbell = offset >= register::DOORBELLS;
        if is_doorbell {
            self.counters.doorbells.add(1);
            self.begin_delay();
        }
        self.work();
    }

    /// Starts the timer, if the function has one, at the first doorbell of a delay. If the timer
    /// fails, nothing is delayed.
    fn begin_delay(&mut self) {
        let Some(timer) = self.timer.as_ref().filter(|_| !self.is_delayed) else {
            return;
        };
        match timer.start() {
            Ok(()) => self.is_delayed = true,
            Err(error) => self.failure = Some(format!("cannot delay commands: {error}").into()),
        }
    }

    /// Executes commands for one turn, if the function is bus master and no delay runs.
    fn work(&mut self) {
        if self.is_delayed {
            return;
        }
        let Some(mastery) = self.config.bus_master() else {
            return;
        };
        let mut memory = TurnMemory {
            dma: self.dma.open(mastery),
            injector: self.injector.as_mut(),
        };
        let mut bytes = 0;
        self.has_work = true;
        for _ in 0..QUANTUM_COMMANDS {
            if bytes >= QUANTUM_BYTES {
                break;
            }
            let begun = Instant::now();
            match self.controller.step(&mut memory, &mut self.medium) {
                Step::Idle => {
                    self.has_work = false;
                    break;
                }
                Step::Event => {}
                Step::Executed(executed) => {
                    bytes += executed.bytes;
                    count(&self.counters, &executed, begun);
                }
                Step::Failed(error) => {
                    self.counters.broken_queues.add(1);
                    self.failure = Some(error.into());
                }
            }
        }
        let due = self.controller.take_interrupts();
        for vector in (0..REPORTED_VECTORS).filter(|vector| due & 1 << vector != 0) {
            self.counters.interrupts.add(1);
            self.vectors.signal(vector, mastery);
        }
    }
}

fn count(counters: &DeviceCounters, executed: &Executed, begun: Instant) {
    if executed.kind == CommandKind::Admin {
        return;
    }
    counters.requests.add(1);
    if executed.status != NvmeStatus::Success {
        counters.failed.add(1);
    }
    match executed.kind {
        CommandKind::Read => counters.bytes_read.add(executed.bytes),
        CommandKind::Write => counters.bytes_written.add(executed.bytes),
        _ => {}
    }
    counters.service.record(begun.elapsed());
}

fn config_space(controller: &Controller) -> ConfigSpace {
    ConfigSpace::plain(&PlainIdentity {
        device: DEVICE_ID,
        class: CLASS,
        bar_bytes: BAR_BYTES,
        vectors: controller.config().vectors(),
        msix_table: MSIX_TABLE,
        msix_pba: MSIX_PBA,
    })
}

impl<A: Dma> Function for NvmeFunction<A> {
    fn region(&self, index: u32) -> Region {
        self.config.region(index)
    }

    fn vectors(&self, index: u32) -> u32 {
        self.vectors.count(index)
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), FunctionError> {
        let offset = self.region(region).check(region, offset, data.len())?;
        if region == CONFIG_REGION {
            self.config.read(offset as usize, data);
        } else {
            self.read_register(offset, data);
        }
        Ok(())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), FunctionError> {
        let offset = self.region(region).check(region, offset, data.len())?;
        if region == CONFIG_REGION {
            self.configure(offset as usize, data);
        } else {
            self.write_register(offset, data);
        }
        Ok(())
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
        self.controller.reset();
        self.config = config_space(&self.controller);
        self.vectors = Vectors::new(self.controller.config().vectors());
        (self.has_work, self.is_delayed) = (false, false);
        Ok(())
    }
}

impl<A: Dma> PolledFunction for NvmeFunction<A> {
    fn completed(&self) -> u64 {
        self.counters.requests.get()
    }

    fn waits_for(&self) -> Option<PollSource<'_>> {
        let timer = self.timer.as_ref().filter(|_| self.is_delayed);
        timer.map(DelayTimer::source)
    }

    fn on_ready(&mut self) {
        self.is_delayed = false;
        self.work();
    }

    fn unfinished(&self) -> bool {
        self.has_work && !self.is_delayed && self.config.bus_master().is_some()
    }

    fn continue_work(&mut self) {
        self.work();
    }

    fn take_failure(&mut self) -> Option<Box<dyn Error + Send + Sync>> {
        self.failure.take()
    }
}
