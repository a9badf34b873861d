//! The ring IOMMU as a PCI function: configuration space, registers, interrupt.

use ringfence_riommu_device::{InvalidateScope, InvalidateWord, UndefinedBits, register};
use ringfence_vfio_user::SetIrqs;
use vm_memory::GuestMemoryMmap;

use super::{Model, RingIommu, RiommuState};
use crate::event::PollSource;
use crate::irq::Vectors;
use crate::pci::{ConfigSpace, PlainIdentity, PlainState};
use crate::saved_state::{HandOverBlocker, StateError};
use crate::server::PolledFunction;
use crate::session::{CONFIG_REGION, Function, FunctionError, Region};

const IDENTITY: PlainIdentity = PlainIdentity {
    // No registry assigns it.
    device: 0x10f7,
    // Other system peripheral.
    class: [0x08, 0x80, 0x00],
    bar_bytes: 0x4000,
    vectors: 1,
    // Both behind the registers.
    msix_table: 0x1000,
    msix_pba: 0x2000,
};
/// The only vector.
const VECTOR: u16 = 0;

/// The PCI function.
#[derive(Debug)]
pub struct RiommuFunction {
    pub(super) iommu: RingIommu,
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
            config: ConfigSpace::plain(&IDENTITY),
            vectors: Vectors::new(IDENTITY.vectors),
            is_due: false,
        }
    }

    /// Returns the registers for another process. Every device behind the IOMMU must be paused.
    ///
    /// # Errors
    /// The host has no descriptors left.
    pub(crate) fn save(&self) -> Result<(PlainState, RiommuState), HandOverBlocker> {
        let registers = PlainState {
            config: self.config.save(),
            vectors: self.vectors.save()?,
        };
        let state = RiommuState {
            registers: self.iommu.model().device.save(),
            is_due: self.is_due || self.iommu.has_interrupt(),
        };
        Ok((registers, state))
    }

    /// Restores the registers of another process. No entry is cached: the guest's tables hold all
    /// mappings.
    ///
    /// # Errors
    /// [`StateError`] if the state is invalid; the function must not be used then.
    pub(crate) fn restore(
        &mut self,
        registers: PlainState,
        state: &RiommuState,
    ) -> Result<(), StateError> {
        self.config.restore(registers.config)?;
        self.vectors.restore(registers.vectors)?;
        let mut model = self.iommu.model();
        let restored = model.device.restore(&state.registers);
        restored.map_err(|UndefinedBits { register }| StateError::Register { what: register })?;
        model.is_master = self.config.bus_master().is_some();
        drop(model);
        if state.is_due {
            // The thread sends it when it serves the function.
            self.iommu.wake();
        }
        Ok(())
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

impl Function for RiommuFunction {
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
            return Ok(());
        }
        let bytes = data.len() as u64;
        let value = self.iommu.model().device.read(offset.into(), bytes);
        data.fill(0);
        for (to, from) in data.iter_mut().zip(value.to_le_bytes()) {
            *to = from;
        }
        Ok(())
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), FunctionError> {
        let offset = self.region(region).check(region, offset, data.len())?;
        if region == CONFIG_REGION {
            self.configure(offset as usize, data);
        } else {
            self.write_register(offset.into(), data);
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
        self.config = ConfigSpace::plain(&IDENTITY);
        self.vectors = Vectors::new(IDENTITY.vectors);
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
