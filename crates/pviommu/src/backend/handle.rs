//! The backend: requests, their validation and its order.

use alloc::vec::Vec;
use core::fmt;

use ringfence_types::{Access, Direction, Iova};

use super::device::BackendDevice;
use super::events::Events;
use super::{DeviceSlot, GuestBacking, IoTables, TablesHandle};
use crate::wire::{
    Config, Devid, Event, EventReason, Giovas, Gpa, Map, PAGE_BYTES, Request, Status, Unmap,
};

/// Limits of one guest's use of host memory, except frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackendLimits {
    /// Maximum number of mapped pages of each device.
    pub mappings: u64,
    /// Maximum number of 2 MiB regions of a device's addresses with mappings. Each takes 4 to 6 KiB
    /// of host memory.
    pub leaves: u64,
}

impl Default for BackendLimits {
    /// A million pages and 16 to 24 MiB of host memory for each device.
    fn default() -> Self {
        Self {
            mappings: 1 << 20,
            leaves: 4096,
        }
    }
}

/// Counters of a backend since its creation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests by status.
    pub statuses: [u64; Status::ALL.len()],
    /// Pages in successful map requests.
    pub mapped: u64,
    /// Pages in successful unmap requests.
    pub unmapped: u64,
}

/// Error: a device may still access unmapped pages. The backend refuses its requests until a commit
/// succeeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CommitFailed(pub Devid);

impl fmt::Display for CommitFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "commit failed: device {} may still reach unmapped pages",
            self.0
        )
    }
}

impl core::error::Error for CommitFailed {}

/// The backend of one guest.
#[derive(Debug)]
pub struct Backend<B, T> {
    pub(super) config: Config,
    pub(super) limits: BackendLimits,
    pub(super) backing: B,
    pub(super) tables: T,
    /// In ascending order of ids.
    pub(super) devices: Vec<BackendDevice>,
    /// Sorted GIOVAs of a request.
    scratch: Vec<u64>,
    events: Events,
    counts: Counts,
}

impl<B: GuestBacking, T: IoTables> Backend<B, T> {
    /// Creates a backend without mappings for the devices of `config`. A device's [`DeviceSlot`] is
    /// its index in `config`.
    pub fn new(config: Config, limits: BackendLimits, backing: B, tables: T) -> Self {
        let ids = config.devices().zip(0..);
        let devices =
            ids.map(|(id, index)| BackendDevice::new(id, DeviceSlot::new(index), limits.leaves));
        let devices = devices.collect();
        Self {
            config,
            limits,
            backing,
            tables,
            devices,
            scratch: Vec::new(),
            events: Events::default(),
            counts: Counts::default(),
        }
    }

    /// Executes a request as a whole or not at all, and returns its status. The tables are
    /// committed when this returns.
    #[inline]
    pub fn handle(&mut self, request: &[u8]) -> Status {
        let outcome = match Request::decode(request, self.config.pages_max()) {
            Ok(Request::Map(map)) => self.map(&map),
            Ok(Request::Unmap(unmap)) => self.unmap(&unmap),
            Err(_) => Err(Status::Malformed),
        };
        let status = match outcome {
            Ok(()) => Status::Ok,
            Err(status) => status,
        };
        if let Some(count) = self.counts.statuses.get_mut(usize::from(status.raw())) {
            *count = count.saturating_add(1);
        }
        status
    }

    /// Section 4.3 of the PVIOMMU paper, steps 4 to 7. Checks in the order of the statuses.
    fn map(&mut self, map: &Map<'_>) -> Result<(), Status> {
        let Self {
            config,
            devices,
            backing,
            tables,
            ..
        } = self;
        let device = find(devices, map.device).ok_or(Status::NoDevice)?;
        if !map.giovas.iter().all(|giova| config.can_map(giova)) {
            return Err(Status::BadGiova);
        }
        let sound = |gpa: crate::wire::Gpa| gpa.is_aligned(PAGE_BYTES) && backing.contains(gpa);
        if !map.gpas.iter().all(sound) {
            return Err(Status::BadGpa);
        }
        let mut giovas = map.giovas.iter();
        if giovas.any(|giova| device.mappings.get(giova).is_some())
            || repeats(&mut self.scratch, map.giovas)
        {
            return Err(Status::Mapped);
        }
        let pages = map.giovas.len() as u64;
        if pages > self.limits.mappings.saturating_sub(device.mappings.live()) {
            return Err(Status::NoRoom);
        }
        device.recover(backing, tables)?;
        device.map(backing, tables, map.direction, map.pairs())?;
        self.counts.mapped = self.counts.mapped.saturating_add(pages);
        Ok(())
    }

    fn unmap(&mut self, unmap: &Unmap<'_>) -> Result<(), Status> {
        let Self {
            config,
            devices,
            backing,
            tables,
            ..
        } = self;
        let device = find(devices, unmap.device).ok_or(Status::NoDevice)?;
        if !unmap.giovas.iter().all(|giova| config.can_map(giova)) {
            return Err(Status::BadGiova);
        }
        let mut giovas = unmap.giovas.iter();
        if giovas.any(|giova| device.mappings.get(giova).is_none())
            || repeats(&mut self.scratch, unmap.giovas)
        {
            return Err(Status::NotMapped);
        }
        device.recover(backing, tables)?;
        device.unmap(backing, tables, unmap.giovas.iter())?;
        let pages = unmap.giovas.len() as u64;
        self.counts.unmapped = self.counts.unmapped.saturating_add(pages);
        Ok(())
    }

    /// Removes every mapping and all pending events, on a reset by the driver.
    ///
    /// # Errors
    /// Returns the first device whose tables did not commit. Its frames stay pinned. Each later
    /// request of the device retries the commit, and fails with `FAILED` until it succeeds.
    pub fn reset(&mut self) -> Result<(), CommitFailed> {
        self.events.clear();
        for device in &mut self.devices {
            device.reset(&mut self.backing, &mut self.tables);
        }
        match self.devices.iter().find(|device| !device.is_sound()) {
            Some(device) => Err(CommitFailed(device.id)),
            None => Ok(()),
        }
    }

    /// Does work that can wait until after an answer. Call this after an answer, or when the queue
    /// is empty.
    #[inline]
    pub fn maintain(&mut self) {
        self.backing.maintain();
    }

    /// Queues an event for a blocked access of `device`, whose first blocked byte is at `giova`.
    /// Derives the reason from the mappings. Ignores unknown devices.
    pub fn report(&mut self, device: Devid, access: Access, giova: Iova) {
        let page = giova.align_down(PAGE_BYTES);
        let Some(found) = find(&mut self.devices, device) else {
            return;
        };
        let reason = match found.mappings.get(page) {
            Some((_, direction)) if !direction.permissions().allows(access) => {
                EventReason::Direction
            }
            _ => EventReason::NotMapped,
        };
        self.events.push(Event {
            device,
            access,
            reason,
            giova,
        });
    }

    /// Takes the oldest pending event.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop()
    }

    /// Returns the pending events, oldest first.
    pub fn waiting(&self) -> impl Iterator<Item = &Event> {
        self.events.iter()
    }

    /// Queues an event that was pending at the source of a migration.
    pub fn wait(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Returns the number of dropped events.
    pub fn lost_events(&self) -> u64 {
        self.events.dropped()
    }

    /// Returns the GPA and direction of the page at `giova`; `None` if it is unmapped.
    pub fn mapping(&mut self, device: Devid, giova: Iova) -> Option<(Gpa, Direction)> {
        find(&mut self.devices, device)?.mappings.get(giova)
    }

    /// Returns the number of mapped pages of `device`; 0 for an unknown device.
    pub fn mapped_pages(&self, device: Devid) -> u64 {
        let found = self.devices.iter().find(|one| one.id == device);
        found.map_or(0, |device| device.mappings.live())
    }

    /// Returns the counters.
    pub const fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Returns the device's configuration.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The memory behind the guest.
    pub const fn backing(&mut self) -> &mut B {
        &mut self.backing
    }

    /// Returns the embedder's handle to the devices' I/O page tables. The backend keeps the tables
    /// themselves: a caller cannot swap those of two backends.
    /// ```compile_fail,E0614
    /// # use ringfence_pviommu::backend::{Backend, HardwareTables, Resident};
    /// # use ringfence_types::{FrameSource, Invalidator, PhysMemory};
    /// # type Guest<M, S, I> = Backend<Resident, HardwareTables<M, S, I>>;
    /// fn exchange<M: PhysMemory, S: FrameSource, I: Invalidator>(
    ///     a: &mut Guest<M, S, I>,
    ///     b: &mut Guest<M, S, I>,
    /// ) {
    ///     core::mem::swap(&mut *a.tables(), &mut *b.tables());
    /// }
    /// ```
    pub fn tables(&mut self) -> T::Handle<'_>
    where
        T: TablesHandle,
    {
        self.tables.handle()
    }
}

/// Returns the device with this id.
#[inline]
pub(super) fn find(devices: &mut [BackendDevice], id: Devid) -> Option<&mut BackendDevice> {
    let at = devices.binary_search_by_key(&id, |device| device.id).ok()?;
    devices.get_mut(at)
}

/// Returns true if an address occurs twice in `giovas`. Drivers write ascending addresses, which
/// need no sorting.
#[inline]
fn repeats(scratch: &mut Vec<u64>, giovas: Giovas<'_>) -> bool {
    let mut last = None;
    for giova in giovas {
        if last >= Some(giova) {
            return repeats_unsorted(scratch, giovas);
        }
        last = Some(giova);
    }
    false
}

#[cold]
fn repeats_unsorted(scratch: &mut Vec<u64>, giovas: Giovas<'_>) -> bool {
    scratch.clear();
    scratch.extend(giovas.iter().map(|giova| giova.get()));
    scratch.sort_unstable();
    scratch
        .windows(2)
        .any(|pair| matches!(pair, [a, b] if a == b))
}
