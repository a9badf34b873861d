//! Calgary's lookup of a requester ID: one flat table per PCI host bridge.

use alloc::vec::Vec;

use ringfence_pgtable::CalgaryTce;
use ringfence_types::{DomainId, FaultReason, PhysAddr, PhysMemory, RequesterId};

use crate::{ContextEntry, ContextLookup, DeviceTlbPermission, TableRoot};

/// One host bridge: its buses and its table address register. All devices below the bridge share
/// one address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostBridge {
    /// First bus below the bridge.
    pub first_bus: u8,
    /// Last bus below the bridge, inclusive.
    pub last_bus: u8,
    /// Domain-id, the tag of cached translations of the bridge.
    pub domain: DomainId,
    /// Format of the table, which includes its number of entries.
    pub format: CalgaryTce,
    /// Physical address of the table.
    pub table: PhysAddr,
}

/// The host bridges of a unit. DMA of a device below none of them is denied.
#[derive(Debug, Clone, Default)]
pub struct HostBridges {
    bridges: Vec<HostBridge>,
}

impl HostBridges {
    /// Creates a lookup without bridges.
    pub const fn new() -> Self {
        Self {
            bridges: Vec::new(),
        }
    }

    pub(crate) fn program(&mut self, bridge: HostBridge) {
        self.bridges
            .retain(|old| old.last_bus < bridge.first_bus || bridge.last_bus < old.first_bus);
        self.bridges.push(bridge);
    }

    pub(crate) fn remove(&mut self, bus: u8) {
        self.bridges
            .retain(|bridge| !(bridge.first_bus..=bridge.last_bus).contains(&bus));
    }
}

impl ContextLookup for HostBridges {
    type Format = CalgaryTce;

    fn find<M: PhysMemory + ?Sized>(
        &self,
        _mem: &M,
        device: RequesterId,
    ) -> Result<ContextEntry<CalgaryTce>, FaultReason> {
        let bridge = self
            .bridges
            .iter()
            .find(|bridge| (bridge.first_bus..=bridge.last_bus).contains(&device.bus()))
            .ok_or(FaultReason::Blocked)?;
        Ok(ContextEntry::Translated(TableRoot {
            domain: bridge.domain,
            format: bridge.format,
            root: bridge.table,
            device_tlb: DeviceTlbPermission::Blocked,
        }))
    }
}
