//! The para-virtual IOMMU of Tang et al., frontend and backend (`docs/PVIOMMU.md`). A map waits for
//! its completion, a list kicks once, and an unmap completes before its buffer is returned.
//!
//! A guest has one queue. Each device has its own I/O page table, which the host creates when the
//! guest attaches the device.

use std::cell::RefCell;
use std::rc::Rc;

use ringfence_dma::Platform;
use ringfence_dma::space::IoPageTable;
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{
    Coherency, Context, Levels, MapError, MapRequest, SecondStage, TranslationType, UnmapError,
};
use ringfence_pviommu::backend::{
    Backend, BackendLimits, DeviceSlot, DeviceState, HardwareTables, IoError, IoTables,
    TablesHandle,
};
use ringfence_pviommu::frontend::{
    Channel, ChannelOptions, Queue, QueueFull, RemoteTable, RequestId, SharedChannel,
    UnmapCompletions, Used,
};
use ringfence_pviommu::loopback::Loopback;
use ringfence_pviommu::wire::{
    Config, DEVICES_LIMIT, Devid, MigrationStream, PAGES_LIMIT, Status, encode_unmap,
};
use ringfence_types::{
    CachedLevels, Direction, DomainId, Invalidation, InvalidationError, Invalidator, Iova,
    IovaRange, PfnRange, PhysAddr, Ticket, Unmapped,
};

use super::second_stage::{GuestMemory, HostFrames, guest_memory, lookups};
use super::{
    FrameLookup, FrameRmap, HostBackend, HostHardware, HostUnit, KickCause, QueueStats, SharedHost,
};
use crate::components::{HostOf, MakeTable, ReplayTable};
use crate::error::LabError;
use crate::hardware::Vtd;
use crate::modes::Owner;

/// Devices of a guest, numbered from 1 like their domains.
const DEVICES: u32 = DEVICES_LIMIT as u32;
/// Requests that can wait, as in the module's queue of 256 descriptors.
const CHAINS: u16 = 128;

/// The unit, as the tables of the devices invalidate it.
#[derive(Debug, Clone)]
struct SharedUnit(Rc<RefCell<HostUnit>>);

impl Invalidator for SharedUnit {
    #[inline]
    fn submit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.0.borrow_mut().submit(request)
    }

    #[inline]
    fn poll(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.0.borrow_mut().poll(ticket)
    }
}

type DeviceTable = HardwareTables<Rc<Arena>, HostFrames, SharedUnit>;

/// The tables of the attached devices.
#[derive(Debug, Default)]
struct DeviceTables(Vec<Option<DeviceTable>>);

/// The only slot of each device's own table set.
const FIRST_SLOT: DeviceSlot = DeviceSlot::new(0);

impl DeviceTables {
    #[inline]
    fn of(&mut self, device: DeviceSlot) -> Result<&mut DeviceTable, IoError> {
        let table = self.0.get_mut(device.index());
        table.and_then(Option::as_mut).ok_or(IoError::Failed)
    }
}

impl TablesHandle for DeviceTables {
    type Handle<'t> = &'t mut Self;

    fn handle(&mut self) -> &mut Self {
        self
    }
}

impl IoTables for DeviceTables {
    #[inline]
    fn map(
        &mut self,
        device: DeviceSlot,
        giova: Iova,
        frame: PhysAddr,
        direction: Direction,
    ) -> Result<(), IoError> {
        self.of(device)?.map(FIRST_SLOT, giova, frame, direction)
    }

    #[inline]
    fn unmap(&mut self, device: DeviceSlot, giova: Iova) -> Result<(), IoError> {
        self.of(device)?.unmap(FIRST_SLOT, giova)
    }

    #[inline]
    fn commit(&mut self, device: DeviceSlot) -> Result<(), IoError> {
        self.of(device)?.commit(FIRST_SLOT)
    }
}

/// The queue of a guest with its backend. It counts the requests.
#[derive(Debug)]
pub struct PviommuQueue {
    device: Loopback<GuestMemory, DeviceTables>,
    /// True if a map waits for the next kick.
    maps: bool,
    traffic: QueueStats,
}

impl Queue for PviommuQueue {
    fn add(&mut self, request: &[u8]) -> Result<RequestId, QueueFull> {
        let id = self.device.add(request)?;
        self.traffic.requests += 1;
        // Field `type`; 0 is a map.
        self.maps |= request.get(8) == Some(&0);
        Ok(id)
    }

    fn kick(&mut self) {
        self.traffic.kick(if self.maps {
            KickCause::Map
        } else {
            KickCause::Unmap
        });
        self.maps = false;
        self.device.kick();
    }

    fn poll(&mut self) -> Option<Used> {
        self.device.poll()
    }
}

type GuestLink = SharedChannel<PviommuQueue, RefCell<Channel<PviommuQueue>>>;

/// A para-virtual IOMMU's backend, and the guest's end of its queue.
pub struct PviommuHost {
    link: Rc<GuestLink>,
    answers: UnmapCompletions<Rc<GuestLink>, PviommuQueue, RefCell<Channel<PviommuQueue>>>,
    unit: Rc<RefCell<HostUnit>>,
    memory: Rc<Arena>,
    frames: HostFrames,
    coherency: Coherency,
    side: FrameLookup,
    occupants: Rc<FrameRmap>,
}

impl std::fmt::Debug for PviommuHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PviommuHost")
            .field("line", &self.link)
            .finish_non_exhaustive()
    }
}

impl HostBackend for PviommuHost {
    type Unit = Vtd;

    fn new(
        memory: &Rc<Arena>,
        frames: &Rc<Frames<Rc<Arena>>>,
        coherency: Coherency,
        unit: HostUnit,
    ) -> Result<Self, LabError> {
        let refused = LabError::Internal("the host refused its configuration");
        let window = IovaRange::inclusive(Iova::new(0x1000), Iova::new((1 << 48) - 1));
        let Some(window) = window else {
            return Err(refused);
        };
        let Ok(config) = Config::new(window, PAGES_LIMIT, 1..=DEVICES) else {
            return Err(refused);
        };
        // The trace determines the mappings; only frames limit them.
        let limits = BackendLimits {
            mappings: u64::MAX,
            leaves: u64::MAX,
        };
        let (side, occupants) = (FrameLookup::Plain, Rc::default());
        let backing = guest_memory(side, &occupants)?;
        let backend = Backend::new(config, limits, backing, DeviceTables::default());
        let queue = PviommuQueue {
            device: Loopback::new(backend, CHAINS),
            maps: false,
            traffic: QueueStats::default(),
        };
        // The host completes a request at the first poll.
        let options = ChannelOptions {
            pages_max: PAGES_LIMIT,
            max_empty_polls: 16,
        };
        let line = Rc::new(SharedChannel::new(
            Channel::new(queue, options),
            RefCell::new,
        ));
        Ok(Self {
            answers: UnmapCompletions::new(Rc::clone(&line)),
            link: line,
            unit: Rc::new(RefCell::new(unit)),
            memory: Rc::clone(memory),
            frames: HostFrames::Tables(Rc::clone(frames)),
            coherency,
            side,
            occupants,
        })
    }

    #[inline]
    fn with_unit<R>(&mut self, act: impl FnOnce(&mut HostUnit) -> R) -> R {
        act(&mut self.unit.borrow_mut())
    }

    /// The host owns the context entries, so a guest that detaches a device only waits for its
    /// earlier requests.
    #[inline]
    fn commit(&mut self, request: Invalidation) -> Result<Ticket, InvalidationError> {
        self.answers.submit(match request {
            Invalidation::Context(_) => Invalidation::Global,
            request => request,
        })
    }

    #[inline]
    fn is_completed(&mut self, ticket: Ticket) -> Result<bool, InvalidationError> {
        self.answers.poll(ticket)
    }

    fn traffic(&self) -> QueueStats {
        let invalidations = self.unit.borrow().invalidations();
        self.link.with(|channel| {
            let queue = channel.queue();
            QueueStats {
                invalidations,
                lookups: lookups(queue.device.backend().backing()),
                ..queue.traffic
            }
        })
    }

    fn frame_rmap(&self) -> Option<Rc<FrameRmap>> {
        Some(Rc::clone(&self.occupants))
    }
}

/// Returns the root of a device's table.
fn root_of(table: &DeviceTable) -> Result<PhysAddr, LabError> {
    match table.context(FIRST_SLOT) {
        Some(Context {
            translation: TranslationType::Table { root, .. },
            ..
        }) => Ok(root),
        _ => Err(LabError::Internal("a device without a table")),
    }
}

impl PviommuHost {
    /// Creates the table of the device of `domain` and returns its root. All devices of a guest use
    /// the same frame lookup `side`. The first device chooses it, before anything is mapped.
    ///
    /// A device whose driver is bound again keeps its table. The guest first has the host unmap
    /// what the driver before has left.
    fn attach(&mut self, domain: DomainId, side: FrameLookup) -> Result<PhysAddr, LabError> {
        if self.side != side {
            let memory = guest_memory(side, &self.occupants)?;
            let unused = self.link.with(|channel| {
                let queue = channel.queue();
                let unused = queue.device.backend().tables().0.is_empty();
                if unused {
                    *queue.device.backend().backing() = memory;
                }
                unused
            });
            if !unused {
                return Err(LabError::Internal("a guest with two hosts"));
            }
            self.side = side;
        }
        let number = usize::from(domain.get());
        if number == 0 || number > DEVICES_LIMIT {
            return Err(LabError::UnlistedDevice {
                limit: DEVICES_LIMIT,
            });
        }
        let existing = self.link.with(|channel| {
            let table = channel.queue().device.backend().tables().0.get(number - 1);
            table.and_then(Option::as_ref).map(root_of)
        });
        if let Some(root) = existing {
            self.unmap_left(Devid::new(domain.get().into()))?;
            return root;
        }
        let made = HardwareTables::new(
            Rc::clone(&self.memory),
            self.frames.clone(),
            SharedUnit(Rc::clone(&self.unit)),
            SecondStage::new(Levels::Four),
            self.coherency,
            &[domain],
        )?;
        let root = root_of(&made)?;
        self.link.with(|channel| {
            let tables = &mut channel.queue().device.backend().tables().0;
            if tables.len() < number {
                tables.resize_with(number, || None);
            }
            tables[number - 1] = Some(made);
        });
        Ok(root)
    }

    /// Unmaps the pages that an unbound driver of `device` has left, as the kernel module does
    /// (`docs/PVIOMMU.md`, "Mappings that a driver leaves"). The host's records stand for those of
    /// the guest's kernel. These requests do not count as traffic.
    fn unmap_left(&mut self, device: Devid) -> Result<(), LabError> {
        let refused = || LabError::Internal("the host keeps the mappings of an unbound driver");
        let ticket = self.commit(Invalidation::Global);
        let ticket = ticket.map_err(|_| refused())?;
        while !self.is_completed(ticket).map_err(|_| refused())? {}
        self.link.with(|channel| {
            let backend = channel.queue().device.backend();
            let stream = backend.export(|_| DeviceState::Transferred);
            let stream = stream.map_err(|_| refused())?;
            let records = MigrationStream::decode(&stream).map_err(|_| refused())?;
            for record in records.records().filter(|record| record.device == device) {
                let giovas: Vec<Iova> = record.pairs().map(|(giova, _)| giova).collect();
                for pages in giovas.chunks(PAGES_LIMIT as usize) {
                    let mut request = Vec::new();
                    encode_unmap(&mut request, device, pages.iter().copied())
                        .map_err(|_| refused())?;
                    if backend.handle(&request) != Status::Ok {
                        return Err(refused());
                    }
                }
            }
            Ok(())
        })
    }
}

/// The guest's table of a domain: it sends requests to the backend.
pub struct PviommuTable {
    remote: RemoteTable<Rc<GuestLink>, PviommuQueue, RefCell<Channel<PviommuQueue>>>,
    root: PhysAddr,
}

impl PviommuTable {
    /// Creates the table of a device, the only one in a new domain of `host`.
    ///
    /// # Errors
    /// The host is out of memory, or it cannot list the device.
    pub fn new(
        host: &SharedHost<PviommuHost>,
        domain: DomainId,
        side: FrameLookup,
    ) -> Result<Self, LabError> {
        host.with(|host| {
            Ok(Self {
                root: host.attach(domain, side)?,
                remote: RemoteTable::new(
                    Rc::clone(&host.link),
                    Devid::new(domain.get().into()),
                    domain,
                ),
            })
        })
    }
}

/// Creates the table of a domain, which a host with or without optimisations owns.
fn table<const OPTIMISED: bool>(
    domain: DomainId,
    _: Coherency,
    _: &Arena,
    _: &Frames<Rc<Arena>>,
    host: Option<&HostOf<PviommuTable>>,
) -> Result<PviommuTable, LabError> {
    let host = host.ok_or(LabError::Internal("a guest without a host"))?;
    let side = match OPTIMISED {
        false => FrameLookup::Plain,
        true => FrameLookup::Optimised,
    };
    PviommuTable::new(host, domain, side)
}

/// Returns the constructor of tables that a host of the kind `who` owns. A function pointer rather
/// than a type, so that replays are compiled once for both kinds.
pub(crate) fn pviommu(who: Owner) -> MakeTable<PviommuTable> {
    match who {
        Owner::PviommuHopt => table::<true>,
        _ => table::<false>,
    }
}

impl ReplayTable for PviommuTable {
    type Hardware = HostHardware<PviommuHost>;

    /// The root of the host's table. The guest does not know it.
    fn root(&self) -> PhysAddr {
        self.root
    }
}

type Remote = RemoteTable<Rc<GuestLink>, PviommuQueue, RefCell<Channel<PviommuQueue>>>;

impl IoPageTable for PviommuTable {
    type PerCpu = <Remote as IoPageTable>::PerCpu;
    type Pages = ();

    fn per_cpu(&self) -> Self::PerCpu {
        self.remote.per_cpu()
    }

    #[inline]
    fn domain(&self) -> DomainId {
        self.remote.domain()
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.remote.map(cpu, platform, request)
    }

    #[inline]
    fn map_nosync<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        request: MapRequest,
    ) -> Result<(), MapError> {
        self.remote.map_nosync(cpu, platform, request)
    }

    #[inline]
    fn iotlb_sync_map<P: Platform>(
        &self,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(), InvalidationError> {
        self.remote.iotlb_sync_map(platform, range)
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        range: PfnRange,
    ) -> Result<(Unmapped, CachedLevels, ()), UnmapError> {
        self.remote.unmap(cpu, platform, range)
    }

    fn unmap_many<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        ranges: &[PfnRange],
        each: impl FnMut((Unmapped, CachedLevels, ())),
    ) -> Result<(), UnmapError> {
        self.remote.unmap_many(cpu, platform, ranges, each)
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        self.remote.is_empty(platform)
    }

    #[inline]
    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P) {
        self.remote.sync(cpu, platform);
    }
}
