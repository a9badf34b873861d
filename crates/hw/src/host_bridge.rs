//! Calgary's way from a requester to its table: one flat table per PCI host bridge (HW05, CG01,
//! CG02).

use alloc::vec::Vec;

use ringfence_pgtable::CalgaryTce;
use ringfence_types::{DomainId, FaultReason, PhysAddr, PhysMemory, RequesterId};

use crate::{ContextEntry, ContextLookup, TableRoot};

/// One host bridge: the buses behind it, and its table address register. All devices behind it
/// share one space (CG02).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostBridge {
    /// First bus behind the bridge.
    pub first_bus: u8,
    /// Last bus behind the bridge, inclusive.
    pub last_bus: u8,
    /// Tags what is cached for the bridge.
    pub domain: DomainId,
    /// The table's format: how many entries it has.
    pub format: CalgaryTce,
    /// The table.
    pub table: PhysAddr,
}

/// The host bridges of a unit. A device behind none of them is denied.
#[derive(Debug, Clone, Default)]
pub struct HostBridges {
    bridges: Vec<HostBridge>,
}

impl HostBridges {
    /// A unit without bridges.
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
        }))
    }
}
