//! Lookup of a requester ID in one entry for each device: AMD-Vi's device table, SMMUv3's stream
//! table, RISC-V's device directory.

use alloc::vec::Vec;

use ringfence_pgtable::Format;
use ringfence_types::{FaultReason, PhysMemory, RequesterId};

use crate::{ContextEntry, ContextLookup, Iommu};

/// The entries of a unit's devices, by requester ID. DMA of a device without one is denied.
///
/// The drivers of these units and their tests hold the layouts of the entries in memory. Here an
/// entry is a register: a replay does not measure attachments.
#[derive(Debug, Clone)]
pub struct DeviceTable<F> {
    entries: Vec<(RequesterId, ContextEntry<F>)>,
}

impl<F> DeviceTable<F> {
    /// Creates a table without entries.
    pub const fn new() -> Self {
        Self {
            entries: Vec::new(),
        }
    }

    fn remove(&mut self, device: RequesterId) {
        self.entries.retain(|(of, _)| *of != device);
    }
}

impl<F> Default for DeviceTable<F> {
    fn default() -> Self {
        Self::new()
    }
}

impl<F: Format> ContextLookup for DeviceTable<F> {
    type Format = F;

    fn find<M: PhysMemory + ?Sized>(
        &self,
        _mem: &M,
        device: RequesterId,
    ) -> Result<ContextEntry<F>, FaultReason> {
        let mut entries = self.entries.iter();
        let found = entries.find(|(of, _)| *of == device);
        found.map_or(Err(FaultReason::Blocked), |(_, entry)| Ok(*entry))
    }
}

impl<F: Format> Iommu<DeviceTable<F>> {
    /// Programs the entry of `device` and drops its cached copy.
    pub fn set_device(&mut self, device: RequesterId, entry: ContextEntry<F>) {
        self.context_lookup.remove(device);
        self.context_lookup.entries.push((device, entry));
        self.contexts.remove(device);
    }

    /// Removes the entry of `device` and drops its cached copy. Translations of its domain stay
    /// cached.
    pub fn clear_device(&mut self, device: RequesterId) {
        self.context_lookup.remove(device);
        self.contexts.remove(device);
    }
}

#[cfg(test)]
mod tests {
    use ringfence_memory::Arena;
    use ringfence_pgtable::{AmdV1, Level};
    use ringfence_types::{Access, DomainId, Iova, PhysAddr};

    use super::*;
    use crate::{DeviceTlbPermission, TableRoot, UnitConfig};

    #[test]
    fn a_device_has_its_own_entry_or_none() {
        let memory = Arena::new(4096).unwrap();
        let format = AmdV1::new(Level::new(4).unwrap());
        let mut unit = Iommu::new(&UnitConfig::UNCACHED, DeviceTable::new());
        unit.enable();
        let (one, two) = (RequesterId::new(8), RequesterId::new(16));
        let entry = |domain| {
            ContextEntry::Translated(TableRoot {
                domain: DomainId::new(domain),
                format,
                root: PhysAddr::ZERO,
                device_tlb: DeviceTlbPermission::Blocked,
            })
        };
        unit.set_device(one, entry(1));
        unit.set_device(two, entry(2));
        unit.set_device(one, entry(3));
        let find = |unit: &Iommu<DeviceTable<AmdV1>>, device| {
            let found = unit.context_lookup.find(&memory, device);
            found.map(|entry| entry.domain().get())
        };
        assert_eq!((find(&unit, one), find(&unit, two)), (Ok(3), Ok(2)));
        unit.clear_device(one);
        assert_eq!(find(&unit, one), Err(FaultReason::Blocked));
        assert_eq!(find(&unit, two), Ok(2));
        let fault = unit.translate(&memory, one, Iova::ZERO, 4, Access::Read);
        assert_eq!(fault.unwrap_err().reason, FaultReason::Blocked);
    }
}
