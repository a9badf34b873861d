//! The ring IOMMU as a PCI function: configuration space, registers, interrupt.

use ringfence_riommu_device::{InvalidateScope, InvalidateWord, register};
use ringfence_vfio_user::SetIrqs;
use vm_memory::GuestMemoryMmap;

use super::{Model, RingIommu};
use crate::event::PollSource;
use crate::irq::Vectors;
use crate::pci::{CONFIG_BYTES, ConfigSpace};
use crate::server::PolledFunction;
use crate::session::{CONFIG_REGION, ERROR_IRQ, Function, FunctionError, MSIX_IRQ, Region};

/// PCI device ID. No registry assigns it.
const DEVICE_ID: u16 = 0x10f7;
/// Other system peripheral.
const CLASS: [u8; 3] = [0x08, 0x80, 0x00];
/// Region of the registers.
const BAR: u32 = 0;
/// MSI-X table, which the client emulates, and pending bit array; both behind the registers.
const MSIX_TABLE: u32 = 0x1000;
const MSIX_PBA: u32 = 0x2000;
const BAR_BYTES: u32 = 0x4000;
/// The only vector.
const VECTOR: u16 = 0;

/// The PCI function.
#[derive(Debug)]
pub struct RiommuFunction {
    iommu: RingIommu,
    config: ConfigSpace,
    vectors: Vectors,
    /// An interrupt that came without Bus Master Enable. It is sent when the bit is set.
    is_due: bool,
}

impl RiommuFunction {
    /// Creates the function in its state after power-on.
    pub fn new(iommu: RingIommu) -> Self {
        Self {
            iommu,
            config: config(),
            vectors: Vectors::new(1),
            is_due: false,
        }
    }

    /// Writes configuration space registers. When it returns after Bus Master Enable was cleared,
    /// no access that used the tables is in progress. When the bit is set, no entry is cached.
    fn configure(&mut self, offset: usize, data: &[u8]) {
        self.config.write(offset, data);
        let is_master = self.config.bus_master().is_some();
        let mut model = self.iommu.model();
        if is_master && !model.is_master {
            drop_caches(&mut model);
        }
        model.is_master = is_master;
        drop(model);
        if std::mem::take(&mut self.is_due) {
            self.raise();
        }
    }

    fn write_register(&mut self, offset: u64, data: &[u8]) {
        let mut value = [0; 8];
        let Some(low) = value.get_mut(..data.len()) else {
            return;
        };
        low.copy_from_slice(data);
        let bytes = data.len() as u64;
        if (offset, bytes) == (register::INV, 8) {
            let counters = &self.iommu.shared.counters;
            counters.unit_invalidations.add(1);
        }
        let mut model = self.iommu.model();
        model.device.write(offset, bytes, u64::from_le_bytes(value));
        let due = model.device.take_interrupt();
        drop(model);
        if due {
            self.raise();
        }
    }

    /// Sends the interrupt. It is a memory write, so it waits for Bus Master Enable.
    fn raise(&mut self) {
        match self.config.bus_master() {
            Some(mastery) => {
                self.iommu.shared.counters.interrupts.add(1);
                self.vectors.signal(VECTOR, mastery);
            }
            None => self.is_due = true,
        }
    }
}

fn drop_caches(model: &mut Model) {
    let all = InvalidateWord::new(InvalidateScope::All);
    model.device.write(register::INV, 8, all.get());
}

fn config() -> ConfigSpace {
    ConfigSpace::plain(DEVICE_ID, CLASS, BAR_BYTES, [MSIX_TABLE, MSIX_PBA])
}

impl Function for RiommuFunction {
    fn region(&self, index: u32) -> Region {
        let bytes = match index {
            CONFIG_REGION => CONFIG_BYTES as u64,
            BAR => BAR_BYTES.into(),
            _ => 0,
        };
        Region { bytes }
    }

    fn vectors(&self, index: u32) -> u32 {
        match index {
            MSIX_IRQ => self.vectors.count(),
            ERROR_IRQ => 1,
            _ => 0,
        }
    }

    fn read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> Result<(), FunctionError> {
        let place = self.region(region).check(region, offset, data.len())?;
        if region == CONFIG_REGION {
            self.config.read(place as usize, data);
            return Ok(());
        }
        let value = self.iommu.model().device.read(offset, data.len() as u64);
        data.fill(0);
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
        Ok(())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), FunctionError> {
        let place = self.region(region).check(region, offset, data.len())?;
        if region == CONFIG_REGION {
            self.configure(place as usize, data);
        } else {
            self.write_register(offset, data);
        }
        Ok(())
    }

    fn set_irqs(&mut self, request: SetIrqs) -> Result<(), FunctionError> {
        self.vectors.set(request)
    }

    /// Takes the lock, so no access uses the old memory, or entries read from it, when it returns.
    fn memory_changed(&mut self, memory: &GuestMemoryMmap) -> Result<(), FunctionError> {
        let mut model = self.iommu.model();
        model.guest = memory.clone();
        drop_caches(&mut model);
        Ok(())
    }

    fn complete_memory_change(&mut self) -> Result<(), FunctionError> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), FunctionError> {
        self.config = config();
        self.vectors = Vectors::new(1);
        self.is_due = false;
        let mut model = self.iommu.model();
        model.is_master = false;
        model.device.reset();
        drop(model);
        // A fault before the reset may have woken the thread.
        self.iommu.clear_interrupts();
        Ok(())
    }
}

impl PolledFunction for RiommuFunction {
    fn waits_for(&self) -> Option<PollSource<'_>> {
        Some(PollSource::readable(self.iommu.interrupts()))
    }

    fn on_ready(&mut self) {
        self.iommu.clear_interrupts();
        self.raise();
    }
}
