//! The unit, and the guest's memory behind the frames.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_hw::{Geometry, IommuStats, UnitConfig, VtdUnit};
use ringfence_pgtable::{Coherency, Context, ContextTables};
use ringfence_types::{Invalidation, InvalidationError, Invalidator, RequesterId, Ticket};
use vm_memory::GuestMemoryMmap;

use crate::counters::DeviceCounters;
use crate::host::Host;

/// Sets and ways of the IOTLB, and entries of the walk caches and of the context cache: those of
/// the profile `r210-2015`.
const IOTLB: (u32, u32) = (16, 4);
const WALK_CACHES: [u32; 3] = [32, 16, 4];
const CONTEXTS: u32 = 64;

/// What an access holds from its translation to its last byte.
#[derive(Debug)]
pub(super) struct IommuModel {
    pub(super) unit: VtdUnit,
    /// The guest's memory as its client shares it.
    pub(super) guest: GuestMemoryMmap,
    contexts: ContextTables,
}

/// The host's hardware, of one guest.
#[derive(Debug)]
pub(crate) struct Hardware {
    host: Arc<Host>,
    /// One piece of hardware: an access holds it while it lasts, so that an invalidation has waited
    /// for all accesses before it when it has the unit.
    model: Mutex<IommuModel>,
}

impl Hardware {
    /// Hardware that stops every device. Its tables are in the memory of `host`.
    ///
    /// # Errors
    /// If there is none left of that.
    pub(crate) fn new(host: Arc<Host>) -> io::Result<Self> {
        let contexts = ContextTables::new(Coherency::Coherent, host.memory(), host.contexts());
        let contexts = contexts.map_err(io::Error::other)?;
        let mut unit = VtdUnit::vtd(&config().map_err(io::Error::other)?);
        unit.set_root_table(contexts.root());
        unit.enable();
        Ok(Self {
            host,
            model: Mutex::new(IommuModel {
                unit,
                guest: GuestMemoryMmap::default(),
                contexts,
            }),
        })
    }

    /// Where its tables are, and what stands behind the frames that they lead to.
    pub(crate) fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// The unit. Whoever panicked while he held it has left it whole: it is changed by
    /// invalidations only, and filled with what the tables say.
    pub(super) fn model(&self) -> MutexGuard<'_, IommuModel> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When it returns, no access reaches anything of the memory before.
    pub(crate) fn set_memory(&self, memory: &GuestMemoryMmap) {
        self.model().guest = memory.clone();
    }

    /// The accesses of `device` are translated by `context`; without one it reaches nothing. When
    /// it returns, none that began before is under way. If there is no frame for a table of
    /// contexts, it reaches nothing either.
    pub(super) fn set_context(&self, device: RequesterId, context: Option<&Context>) {
        let mut silicon = self.model();
        let IommuModel { unit, contexts, .. } = &mut *silicon;
        contexts.detach(self.host.memory(), device);
        if let Some(context) = context {
            let _ = contexts.attach(self.host.memory(), self.host.contexts(), device, context);
        }
        unit.invalidate(&Invalidation::Context(device));
    }
}

fn config() -> Result<UnitConfig, ringfence_hw::GeometryError> {
    let [one, two, three] = WALK_CACHES.map(|entries| Geometry::new(1, entries));
    Ok(UnitConfig {
        iotlb: Geometry::new(IOTLB.0, IOTLB.1)?,
        walk_caches: [one?, two?, three?],
        contexts: Geometry::new(CONTEXTS, 1)?,
        ..UnitConfig::UNCACHED
    })
}

/// The port to which tables send their invalidations.
#[derive(Debug, Clone)]
pub(crate) struct InvalidationPort(pub(super) Arc<Hardware>);

impl Invalidator for InvalidationPort {
    /// Whoever holds the unit is an access; so none that began before is under way.
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        let Self(hardware) = self;
        hardware.host.counters().unit_invalidations.add(1);
        hardware.model().unit.submit(request)
    }

    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.0.model().unit.poll(ticket)
    }
}

impl DeviceCounters {
    /// Adds what the unit has done for a device since `before`.
    pub(super) fn add_unit(&self, before: &IommuStats, now: &IommuStats) {
        let more = |count: fn(&IommuStats) -> u64| count(now).wrapping_sub(count(before));
        self.unit_hits.add(more(|stats| stats.iotlb_hits));
        self.unit_walks.add(more(|stats| stats.iotlb_misses));
        self.unit_reads.add(more(|stats| stats.walk_references));
    }
}
