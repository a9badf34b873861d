//! DART's lookup of a requester ID: every device has the one table.

use ringfence_pgtable::Dart;
use ringfence_types::{DomainId, FaultReason, PhysAddr, PhysMemory, RequesterId};

use crate::{ContextEntry, ContextLookup, DeviceTlbPermission, TableRoot};

/// The table registers of a DART: base and size (`DART_BASE_U4`, `DART_SIZE_U4`). Until they are
/// programmed, DMA is denied.
#[derive(Debug, Clone, Copy, Default)]
pub struct DartRegister {
    table: Option<TableRoot<Dart>>,
}

impl DartRegister {
    /// Creates registers without a table.
    pub const fn new() -> Self {
        Self { table: None }
    }

    pub(crate) fn program(&mut self, domain: DomainId, format: Dart, root: PhysAddr) {
        self.table = Some(TableRoot {
            domain,
            format,
            root,
            device_tlb: DeviceTlbPermission::Blocked,
        });
    }
}

impl ContextLookup for DartRegister {
    type Format = Dart;

    fn find<M: PhysMemory + ?Sized>(
        &self,
        _mem: &M,
        _device: RequesterId,
    ) -> Result<ContextEntry<Dart>, FaultReason> {
        let table = self.table.ok_or(FaultReason::Blocked)?;
        Ok(ContextEntry::Translated(table))
    }
}
