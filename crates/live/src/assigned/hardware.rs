//! The IOMMU hardware model, and the guest memory behind the host's frames.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_hw::{Geometry, IommuStats, UnitConfig, VtdUnit};
use ringfence_pgtable::{Coherency, Context, ContextTables};
use ringfence_types::{Invalidation, InvalidationError, Invalidator, RequesterId, Ticket};
use vm_memory::GuestMemoryMmap;

use crate::counters::DeviceCounters;
use crate::host::Host;

/// Sets and ways of the IOTLB, entries of the paging-structure caches, and entries of the context
/// cache, as in the profile `r210-2015`.
const IOTLB: (u32, u32) = (16, 4);
const WALK_CACHES: [u32; 3] = [32, 16, 4];
const CONTEXTS: u32 = 64;

/// State that an access locks from its translation to its last byte.
#[derive(Debug)]
pub(super) struct IommuModel {
    pub(super) unit: VtdUnit,
    /// The guest's memory as its client shares it.
    pub(super) guest: GuestMemoryMmap,
    contexts: ContextTables,
}

/// The host's IOMMU hardware for one guest.
#[derive(Debug)]
pub(crate) struct Hardware {
    host: Arc<Host>,
    /// An access holds this lock until it ends. An invalidation takes the lock, so it waits for all
    /// earlier accesses.
    model: Mutex<IommuModel>,
}

impl Hardware {
    /// Creates hardware that blocks every device. Its tables are in the memory of `host`.
    ///
    /// # Errors
    /// The host has no memory for the tables.
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

    /// Returns the host, which owns the table memory and the frames.
    pub(crate) fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// Locks the hardware. A panic of another thread leaves it consistent: only invalidations and
    /// table walks change it.
    pub(super) fn model(&self) -> MutexGuard<'_, IommuModel> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the guest's memory. When it returns, no access uses the old memory.
    pub(crate) fn set_memory(&self, memory: &GuestMemoryMmap) {
        self.model().guest = memory.clone();
    }

    /// Sets the context entry of `device`; `None` blocks the device. When it returns, no earlier
    /// access is in progress. The device is also blocked if no frame is free for the context table.
    pub(super) fn set_context(&self, device: RequesterId, context: Option<&Context>) {
        let mut model = self.model();
        let IommuModel { unit, contexts, .. } = &mut *model;
        // An entry that is out of reach here is out of the unit's reach too, and blocks the device.
        let _ = contexts.detach(self.host.memory(), device);
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

/// The port to which tables submit their invalidations.
#[derive(Debug, Clone)]
pub(crate) struct InvalidationPort(pub(super) Arc<Hardware>);

impl Invalidator for InvalidationPort {
    /// The lock waits for each access in progress, so none that began earlier remains.
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
    /// Adds the unit's work for a device since `before`.
    pub(super) fn add_unit(&self, before: &IommuStats, now: &IommuStats) {
        let more = |count: fn(&IommuStats) -> u64| count(now).wrapping_sub(count(before));
        self.unit_hits.add(more(|stats| stats.iotlb_hits));
        self.unit_walks.add(more(|stats| stats.iotlb_misses));
        self.unit_reads.add(more(|stats| stats.walk_references));
    }
}
