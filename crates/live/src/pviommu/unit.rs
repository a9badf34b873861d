//! Requests against the software IOMMU.

use std::collections::{BTreeMap, VecDeque};

use ringfence_pviommu::wire::{Config, Devid, Event, Gpa, Map, PAGE_BYTES, Request, Status, Unmap};
use ringfence_softiommu::{Domain, IommuError, Limits, MapReason, Reader, SoftIommu};
use ringfence_types::{Access, DeviceId, Direction, DomainId, Iova, IovaRange, PhysAddr};
use vm_memory::{Address, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

/// The page at 0 is never mapped: drivers take its address for none. What the software IOMMU's tables can map ends the window.
const WINDOW: (u64, u64) = (PAGE_BYTES, (1 << 48) - 1);
/// Most pages of one request: 64 KiB of a map.
const PAGES_MAX: u32 = 4096;
/// Mappings of one endpoint.
const MAPPINGS_MAX: usize = 1 << 20;
/// Events that wait for a buffer of the driver's.
const EVENTS_MAX: usize = 64;
/// Mappings that are remembered after they are gone, so that an access to them is counted as stale.
const REMEMBERED: usize = 4096;

/// The IOMMU behind its lock.
pub(crate) struct Unit {
    iommu: SoftIommu<GuestMemoryMmap>,
    memory: GuestMemoryMmap,
    endpoints: BTreeMap<DeviceId, Endpoint>,
    running: bool,
    events: VecDeque<Event>,
    gone: VecDeque<(DeviceId, Iova)>,
}

struct Endpoint {
    domain: DomainId,
    pages: BTreeMap<Iova, Direction>,
}

/// The requester id of `device`.
pub(super) fn devid(device: DeviceId) -> Devid {
    Devid::new(device.get().into())
}

fn page(giova: Iova) -> Option<IovaRange> {
    IovaRange::new(giova, PAGE_BYTES)
}

impl Unit {
    pub(super) fn new() -> Self {
        Self {
            iommu: SoftIommu::new(Limits::default(), GuestMemoryMmap::default()),
            memory: GuestMemoryMmap::default(),
            endpoints: BTreeMap::new(),
            running: false,
            events: VecDeque::new(),
            gone: VecDeque::new(),
        }
    }

    pub(super) fn add_endpoint(&mut self, device: DeviceId) -> Result<(), IommuError> {
        self.iommu.add_endpoint(device)?;
        let number = u16::try_from(self.endpoints.len()).unwrap_or(u16::MAX);
        let endpoint = Endpoint {
            domain: DomainId::new(number),
            pages: BTreeMap::new(),
        };
        self.endpoints.insert(device, endpoint);
        Ok(())
    }

    pub(super) fn reader(&self, device: DeviceId) -> Result<Reader<GuestMemoryMmap>, IommuError> {
        self.iommu.reader(device)
    }

    /// When it returns, no endpoint holds anything of the memory before.
    pub(super) fn set_memory(&mut self, memory: &GuestMemoryMmap) {
        self.memory = memory.clone();
        // Whoever calls is no reader, so it is not refused.
        let _ = self.iommu.set_memory(memory.clone());
    }

    /// What the driver is told: for which devices, which addresses, how many pages at once.
    pub(crate) fn config(&self) -> Option<Config> {
        let (first, last) = WINDOW;
        let window = IovaRange::inclusive(Iova::new(first), Iova::new(last))?;
        let id = |device: Option<(&DeviceId, _)>| device.map_or(0, |(id, _)| u32::from(id.get()));
        let (low, high) = (
            self.endpoints.first_key_value(),
            self.endpoints.last_key_value(),
        );
        Config::new(window, PAGES_MAX, id(low), id(high)).ok()
    }

    /// The driver begins: what it maps is what endpoints reach.
    pub(crate) fn start(&mut self) -> Result<(), IommuError> {
        for (device, endpoint) in &self.endpoints {
            self.iommu.create_domain(endpoint.domain)?;
            self.iommu.attach(*device, endpoint.domain)?;
        }
        self.running = true;
        Ok(())
    }

    /// When it returns, endpoints reach nothing and no mapping is left.
    pub(crate) fn reset(&mut self) {
        for (device, endpoint) in &mut self.endpoints {
            // Neither can be refused: it is there, and whoever calls is no reader.
            let _ = self.iommu.detach(*device);
            let _ = self.iommu.remove_domain(endpoint.domain);
            endpoint.pages.clear();
        }
        self.running = false;
        self.events.clear();
        self.gone.clear();
    }

    /// Does what `request` asks, as a whole or not at all.
    pub(crate) fn handle(&mut self, request: &[u8]) -> Status {
        let done = match Request::decode(request, PAGES_MAX) {
            Err(_) => Err(Status::Malformed),
            Ok(_) if !self.running => Err(Status::NoDevice),
            Ok(Request::Map(map)) => self.map(&map),
            Ok(Request::Unmap(unmap)) => self.unmap(&unmap),
        };
        done.err().unwrap_or(Status::Ok)
    }

    fn map(&mut self, map: &Map<'_>) -> Result<(), Status> {
        let (endpoint, domain) = open(&mut self.endpoints, &mut self.iommu, map.device)?;
        let ranges = pages_of(map.giovas.iter())?;
        if !map.gpas.iter().all(|gpa| is_memory(&self.memory, gpa)) {
            return Err(Status::BadGpa);
        }
        if !distinct(&ranges)
            || ranges
                .iter()
                .any(|r| endpoint.pages.contains_key(&r.start()))
        {
            return Err(Status::Mapped);
        }
        if endpoint.pages.len().saturating_add(ranges.len()) > MAPPINGS_MAX {
            return Err(Status::NoRoom);
        }
        let permissions = map.direction.permissions();
        for (done, (range, gpa)) in ranges.iter().zip(map.gpas).enumerate() {
            if let Err(error) = domain.map(*range, PhysAddr::new(gpa.get()), permissions) {
                // Nobody is told of the others, so nobody has used them.
                let _ = domain.unmap_all(ranges.iter().take(done).copied());
                return Err(match error.reason {
                    MapReason::OutOfTables => Status::NoRoom,
                    _ => Status::Failed,
                });
            }
        }
        let pages = ranges.iter().map(|range| (range.start(), map.direction));
        endpoint.pages.extend(pages);
        Ok(())
    }

    fn unmap(&mut self, unmap: &Unmap<'_>) -> Result<(), Status> {
        let (endpoint, domain) = open(&mut self.endpoints, &mut self.iommu, unmap.device)?;
        let ranges = pages_of(unmap.giovas.iter())?;
        let known = |range: &IovaRange| endpoint.pages.contains_key(&range.start());
        if !distinct(&ranges) || !ranges.iter().all(known) {
            return Err(Status::NotMapped);
        }
        // One wait for all of them.
        let cleared = domain.unmap_all(ranges.iter().copied());
        cleared.map_err(|_| Status::Failed)?;
        let device = DeviceId::new(u16::try_from(unmap.device.get()).unwrap_or(u16::MAX));
        for range in ranges {
            endpoint.pages.remove(&range.start());
            if self.gone.len() >= REMEMBERED {
                self.gone.pop_front();
            }
            self.gone.push_back((device, range.start()));
        }
        Ok(())
    }

    /// Whether the page at `iova` is mapped for such an access.
    pub(super) fn reaches(&self, device: DeviceId, iova: Iova, access: Access) -> bool {
        let mapped = |endpoint: &Endpoint| endpoint.pages.get(&start(iova)).copied();
        let direction = self.endpoints.get(&device).and_then(mapped);
        direction.is_some_and(|direction| direction.permissions().allows(access))
    }

    /// Whether the page at `iova` is among those that were unmapped last.
    pub(super) fn was_mapped(&self, device: DeviceId, iova: Iova) -> bool {
        self.gone.contains(&(device, start(iova)))
    }

    /// Keeps `event` for the driver. How many are dropped is what the counters of faults say.
    pub(super) fn report(&mut self, event: Event) {
        if self.running && self.events.len() < EVENTS_MAX {
            self.events.push_back(event);
        }
    }

    /// The next event that the driver has not been told of.
    pub(crate) fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether there is one.
    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }
}

fn start(iova: Iova) -> Iova {
    Iova::new(iova.get() & !(PAGE_BYTES - 1))
}

/// The endpoint that a request names, and its domain.
fn open<'a>(
    endpoints: &'a mut BTreeMap<DeviceId, Endpoint>,
    iommu: &'a mut SoftIommu<GuestMemoryMmap>,
    device: Devid,
) -> Result<(&'a mut Endpoint, &'a mut Domain<GuestMemoryMmap>), Status> {
    let device = u16::try_from(device.get()).map(DeviceId::new);
    let endpoint = device.ok().and_then(|device| endpoints.get_mut(&device));
    let endpoint = endpoint.ok_or(Status::NoDevice)?;
    let domain = iommu.domain(endpoint.domain).map_err(|_| Status::Failed)?;
    Ok((endpoint, domain))
}

fn pages_of(giovas: impl Iterator<Item = Iova>) -> Result<Vec<IovaRange>, Status> {
    let (first, last) = WINDOW;
    let inside = |giova: &Iova| (first..=last).contains(&giova.get());
    let pages = giovas.map(|giova| {
        let giova = Some(giova).filter(|g| inside(g) && g.is_aligned(PAGE_BYTES));
        giova.and_then(page).ok_or(Status::BadGiova)
    });
    pages.collect()
}

fn is_memory(memory: &GuestMemoryMmap, gpa: Gpa) -> bool {
    let start = GuestAddress(gpa.get());
    gpa.is_aligned(PAGE_BYTES)
        && start.checked_add(PAGE_BYTES - 1).is_some()
        && memory.check_range(start, PAGE_BYTES as usize, Permissions::ReadWrite)
}

/// Whether no page stands there twice.
fn distinct(ranges: &[IovaRange]) -> bool {
    let mut starts: Vec<Iova> = ranges.iter().map(IovaRange::start).collect();
    starts.sort_unstable();
    starts.windows(2).all(|two| two.first() != two.last())
}
