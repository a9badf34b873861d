//! The port `Platform`: what the mapping layer uses of this kernel.

use ringfence_dma::Platform;
use ringfence_types::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, Nanos, Pending, PfnRange,
    Ticket,
};
use ringfence_vtd::{Unit, UnitError};

use crate::memory::{RAM, Ram};
use crate::mmio::Mmio;

/// The driver of the VT-d unit, over the ports of this program.
pub(crate) type VtdUnit = Unit<Mmio, &'static Ram, &'static Ram>;

/// The services of this kernel on its only CPU.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) unit: VtdUnit,
    /// Report invalidations as complete and make none. The write after unmap then lands, so the
    /// third verdict depends on the invalidation.
    forgets_invalidations: bool,
}

impl Platform for Kernel {
    type Memory = Ram;
    type Frames = Ram;
    type Invalidator = Self;

    fn memory(&self) -> &Ram {
        &RAM
    }

    fn frames(&self) -> &Ram {
        &RAM
    }

    fn invalidator(&mut self) -> &mut Self {
        self
    }

    /// Only deferred policies use the time.
    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

impl Invalidator for Kernel {
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        if self.forgets_invalidations {
            return Ok(Ticket::new(0));
        }
        self.unit.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        if self.forgets_invalidations {
            return Ok(true);
        }
        self.unit.poll(ticket)
    }
}

impl Kernel {
    pub(crate) fn new(unit: VtdUnit, forgets_invalidations: bool) -> Self {
        Self {
            unit,
            forgets_invalidations,
        }
    }

    /// Makes newly mapped pages visible to a unit that caches entries that are not present, or that
    /// has a write buffer. Most units need neither.
    pub(crate) fn publish(&mut self, domain: DomainId, range: PfnRange) -> Result<(), UnitError> {
        if !self.unit.invalidates_after_map() {
            return self.unit.flush_write_buffer();
        }
        let levels = CachedLevels::All;
        let request = Invalidation::Pages {
            domain,
            range,
            levels,
        };
        let pending = Pending::submit(&mut self.unit, request, ()).map_err(|(_, error)| error)?;
        let flushed = pending.wait(&mut self.unit).map_err(|(_, error)| error)?;
        flushed.into_batch();
        Ok(())
    }
}
