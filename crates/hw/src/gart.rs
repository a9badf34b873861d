//! GART: one flat table for an aperture of the physical addresses, for all devices (CG04; BIOS and
//! Kernel Developer's Guide for AMD Athlon 64 and AMD Opteron Processors, "Graphics Aperture
//! Remapping Table").

use ringfence_pgtable::Gart;
use ringfence_types::{
    Access, DomainId, Fault, FaultReason, Invalidation, InvalidationError, Invalidator, Iova,
    PhysAddr, PhysMemory, PhysRange, RequesterId, Ticket,
};

use crate::{
    ContextEntry, ContextLookup, DeviceTlbPermission, FaultLog, Iommu, TableRoot, Translate,
    Translation, UnitConfig,
};

/// The table base register of a GART.
#[derive(Debug, Clone, Copy)]
struct TableBase(TableRoot<Gart>);

impl ContextLookup for TableBase {
    type Format = Gart;

    fn find<M: PhysMemory + ?Sized>(
        &self,
        _mem: &M,
        _device: RequesterId,
    ) -> Result<ContextEntry<Gart>, FaultReason> {
        Ok(ContextEntry::Translated(self.0))
    }
}

/// An aperture with the unit that walks its table.
#[derive(Debug, Clone)]
struct Aperture {
    base: PhysAddr,
    format: Gart,
    unit: Iommu<TableBase>,
}

impl Aperture {
    /// Returns the address in the table of an access; `None` if no byte is in the aperture.
    ///
    /// # Errors
    /// The access crosses an end of the aperture.
    fn offset(&self, range: &PhysRange) -> Result<Option<Iova>, FaultReason> {
        let inside = |at: PhysAddr| self.format.in_aperture(self.base, Iova::new(at.get()));
        match (inside(range.start()), inside(range.last())) {
            (Some(offset), Some(_)) => Ok(Some(offset)),
            (None, None) if !range.contains_address(self.base) => Ok(None),
            _ => Err(FaultReason::AddressBeyondWidth),
        }
    }
}

/// A GART. A device reaches all memory outside the aperture by its physical address, so the unit
/// isolates nothing: it lets a device with 32 address bits reach memory above 4 GiB.
#[derive(Debug, Clone)]
pub struct GartUnit {
    config: UnitConfig,
    aperture: Option<Aperture>,
    faults: FaultLog,
    /// Sequence number of the last invalidation.
    last_ticket: u64,
}

impl GartUnit {
    /// Creates a GART without an aperture: it translates nothing.
    pub fn new(config: &UnitConfig) -> Self {
        Self {
            // The unit behind the aperture knows offsets only, so the faults are recorded here.
            config: UnitConfig {
                fault_log: 0,
                ..*config
            },
            aperture: None,
            faults: FaultLog::new(config.fault_log),
            last_ticket: 0,
        }
    }

    /// Programs the aperture, which begins at the physical address `base`, and its table at `root`.
    /// Drops all cached entries.
    pub fn set_aperture(&mut self, base: PhysAddr, domain: DomainId, format: Gart, root: PhysAddr) {
        let table = TableRoot {
            domain,
            format,
            root,
            device_tlb: DeviceTlbPermission::Blocked,
        };
        let mut unit = Iommu::new(&self.config, TableBase(table));
        unit.enable();
        self.aperture = Some(Aperture { base, format, unit });
    }

    /// Returns the faults of accesses to the aperture, by their bus addresses.
    pub fn faults(&mut self) -> &mut FaultLog {
        &mut self.faults
    }
}

impl Translate for GartUnit {
    fn translate<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        device: RequesterId,
        iova: Iova,
        bytes: u64,
        access: Access,
    ) -> Result<Translation<'_>, Fault> {
        let fault = |iova, reason| Fault {
            device,
            iova,
            access,
            reason,
        };
        let faults = &mut self.faults;
        let mut record = |fault: Fault| {
            faults.record(&fault);
            fault
        };
        let Some(range) = PhysRange::new(PhysAddr::new(iova.get()), bytes) else {
            return Err(record(fault(iova, FaultReason::BadLength)));
        };
        let Some(aperture) = &mut self.aperture else {
            return Ok(Translation::one(range));
        };
        match aperture.offset(&range) {
            Ok(None) => Ok(Translation::one(range)),
            Ok(Some(offset)) => {
                let base = aperture.base.get();
                match aperture.unit.translate(mem, device, offset, bytes, access) {
                    Ok(translation) => Ok(translation),
                    Err(inner) => Err(record(fault(inner.iova.wrapping_add(base), inner.reason))),
                }
            }
            Err(reason) => Err(record(fault(iova, reason))),
        }
    }
}

impl Invalidator for GartUnit {
    /// Drops all cached entries: a GART invalidates its whole cache (`InvGart`).
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        if matches!(request, Invalidation::Ring { .. }) {
            return Err(InvalidationError::Unsupported);
        }
        if let Some(aperture) = &mut self.aperture {
            aperture.unit.submit(Invalidation::Global)?;
        }
        self.last_ticket = self.last_ticket.wrapping_add(1);
        Ok(Ticket::new(self.last_ticket))
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if ticket.get() > self.last_ticket {
            return Err(InvalidationError::Failed);
        }
        Ok(true)
    }
}
