//! A short run of each core crate; `None` if the result is wrong.

use core::cell::RefCell;

use ringfence_dma::flush::Strict;
use ringfence_dma::space::{IoPageTable, Paged, PlainTable, Rounding};
use ringfence_dma::{Dma, Platform, Released};
use ringfence_firmware::Viot;
use ringfence_hw::{Iommu, UnitConfig, VtdUnit};
use ringfence_iova::{AllocRequest, CachedRbTree, CachedTree, IovaAllocator};
use ringfence_nvme_device::Controller;
use ringfence_pgtable::{
    Coherency, Context, ContextTables, Levels, MapRequest, SecondStage, Table, TranslationType,
};
use ringfence_pviommu::backend::{
    Backend, BackendLimits, FixedLastTable, HardwareTables, OnDemand,
};
use ringfence_pviommu::frontend::{
    Channel, ChannelOptions, RemoteTable, SharedChannel, UnmapCompletions,
};
use ringfence_pviommu::loopback::Loopback;
use ringfence_pviommu::wire::{Config, Devid, Gpa};
use ringfence_riommu_device::{RiommuDevice, register};
use ringfence_types::{
    Access, AddressRange, Direction, DomainId, Invalidation, Invalidator, Iova, IovaRange, Nanos,
    PageSize, Pending, Permissions, Pfn, PfnRange, PhysAddr, PhysRange, RequesterId,
};
use ringfence_virtio_iommu::{Device, EndpointId, Options};
use ringfence_virtio_iommu_driver::{LocalDevice, Unit};

use crate::ram::Ram;

/// One part per crate, in the order of the layers.
pub(crate) const ALL: &[fn() -> Option<()>] = &[
    types,
    iova,
    pgtable,
    hw,
    dma,
    virtio_iommu,
    nvme_device,
    firmware,
    virtio_iommu_driver,
    pviommu,
    riommu_device,
];

const DEVICE: RequesterId = RequesterId::new(0x18);
const LAST_PAGE: Pfn = Pfn::new(0xf_ffff);

fn ensure(condition: bool) -> Option<()> {
    condition.then_some(())
}

fn types() -> Option<()> {
    let range = PfnRange::new(Pfn::new(1), 2)?;
    ensure(range.iovas().bytes() == 2 * PageSize::Size4K.bytes())
}

fn allocator() -> Option<CachedRbTree<RefCell<CachedTree>>> {
    let space = PfnRange::inclusive(Pfn::new(1), LAST_PAGE)?;
    Some(CachedRbTree::new(CachedTree::new(space), RefCell::new))
}

fn iova() -> Option<()> {
    let found = allocator()?
        .alloc(&mut (), &AllocRequest::new(1, LAST_PAGE))
        .ok()?;
    ensure(found.range.hi() == LAST_PAGE)
}

fn table(ram: &Ram, domain: DomainId) -> Option<Table<SecondStage>> {
    let format = SecondStage::new(Levels::Four);
    Table::new(format, domain, Coherency::Coherent, ram, ram).ok()
}

fn pgtable() -> Option<()> {
    let ram = Ram::new(16);
    let table = table(&ram, DomainId::new(1))?;
    let request = MapRequest {
        iova: Iova::new(0x1000),
        pa: PhysAddr::new(0x7000),
        pages: 1,
        permissions: Permissions::READ,
    };
    table.map(&ram, &ram, request).ok()?;
    let leaf = table.lookup(&ram, Iova::new(0x1234))?;
    ensure(leaf.translate(Iova::new(0x1234)) == PhysAddr::new(0x7234))
}

fn hw() -> Option<()> {
    let mut unit: VtdUnit = Iommu::vtd(&UnitConfig::UNCACHED);
    unit.enable();
    let denied = unit
        .translate(&Ram::new(1), DEVICE, Iova::new(0), 8, Access::Read)
        .is_err();
    ensure(denied)
}

/// A driver attaches its only endpoint and detaches it again.
fn virtio_iommu() -> Option<()> {
    let mut device = Device::new(Options::default(), ()).ok()?;
    device.add_endpoint(EndpointId::new(8), &[]).ok()?;
    device.accept_features(device.features());
    let mut request = [1, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut reply = [0xff; 4];
    device.handle(&request, &mut reply).ok()?;
    ensure(reply == [0; 4] && device.domains() == 1)?;
    request[0] = 2;
    device.handle(&request, &mut reply).ok()?;
    ensure(reply == [0; 4] && device.domains() == 0)
}

/// A table names the unit of a device: the virtio-iommu at 00:04.0 translates all of bus 0.
fn firmware() -> Option<()> {
    let mut table = [0; 88];
    table.get_mut(..10)?.copy_from_slice(b"VIOT\x58\0\0\0\0\0");
    table.get_mut(36..40)?.copy_from_slice(&[2, 0, 48, 0]);
    table
        .get_mut(48..56)?
        .copy_from_slice(&[3, 0, 16, 0, 0, 0, 0x20, 0]);
    let range = [1, 0, 24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0, 48];
    table.get_mut(64..81)?.copy_from_slice(&range);
    let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_sub(*byte));
    *table.get_mut(9)? = sum;
    let endpoint = Viot::new(&table).ok()?.unit_of(0, DEVICE).ok()??;
    ensure(endpoint.id == u32::from(DEVICE.get()))
}

/// The driver attaches an endpoint through its queue, maps a page and unmaps it again.
fn virtio_iommu_driver() -> Option<()> {
    let ram = Ram::new(16);
    let mut device = Device::new(Options::default(), ()).ok()?;
    device.add_endpoint(EndpointId::new(0x18), &[]).ok()?;
    let device = LocalDevice::new(device, &ram);
    let options = ringfence_virtio_iommu_driver::Options {
        first_endpoint: 0,
        poll_limit: 100,
    };
    let mut unit = Unit::new(&device, &ram, &ram, &options).ok()?;
    let domain = DomainId::new(1);
    unit.attach(DEVICE, domain).ok()?;
    let request = MapRequest {
        iova: Iova::new(0x5000),
        pa: PhysAddr::new(0x7000),
        pages: 1,
        permissions: Permissions::WRITE,
    };
    unit.map(domain, request).ok()?;
    ensure(device.mappings() == 1)?;
    let cleared = unit.unmap(domain, PfnRange::new(Pfn::new(5), 1)?).ok()?;
    let invalidation = Invalidation::Domain(cleared.domain());
    let pending = Pending::submit(&mut unit, invalidation, cleared).ok()?;
    let _ = pending.wait(&mut unit).ok()?;
    ensure(device.mappings() == 0)?;
    unit.detach(DEVICE).ok()?;
    unit.disable().ok()
}

struct Machine<'a> {
    ram: &'a Ram,
    unit: VtdUnit,
}

impl Platform for Machine<'_> {
    type Memory = Ram;
    type Frames = Ram;
    type Invalidator = VtdUnit;

    fn memory(&self) -> &Ram {
        self.ram
    }

    fn frames(&self) -> &Ram {
        self.ram
    }

    fn invalidator(&mut self) -> &mut VtdUnit {
        &mut self.unit
    }

    fn now(&self) -> Nanos {
        Nanos(0)
    }
}

/// Maps a buffer, checks that the device reaches it, unmaps it, and checks that the device is
/// stopped.
fn dma() -> Option<()> {
    let ram = Ram::new(32);
    let mut dma = Dma::new(Strict);
    let at = dma
        .attach(DEVICE, Iova::new(u64::from(u32::MAX)), |domain| {
            let table = table(&ram, domain).ok_or(())?;
            let allocator = allocator().ok_or(())?;
            Ok::<_, ()>(Paged::new(allocator, PlainTable(table), Rounding::Exact))
        })
        .ok()?;
    let mut contexts = ContextTables::new(Coherency::Coherent, &ram, &ram).ok()?;
    let context = Context {
        domain: at.domain(),
        translation: TranslationType::Table {
            root: dma.space(&at)?.table().0.root(),
            levels: Levels::Four,
        },
    };
    contexts.attach(&ram, &ram, DEVICE, &context).ok()?;
    let mut machine = Machine {
        ram: &ram,
        unit: Iommu::vtd(&UnitConfig::UNCACHED),
    };
    machine.unit.set_root_table(contexts.root());
    machine.unit.enable();

    let mut cpu = dma.cpu();
    let memory = PhysRange::new(PhysAddr::new(0x5_0040), 1500)?;
    let (mapping, _) = dma
        .map_single(
            &mut cpu,
            &mut machine,
            &at,
            (),
            memory,
            Direction::FromDevice,
        )
        .ok()?;
    let iova = mapping.iova();
    let access = |machine: &mut Machine<'_>| {
        machine
            .unit
            .translate(&ram, DEVICE, iova, 1500, Access::Write)
            .map(|reached| reached.first().start())
    };
    ensure(access(&mut machine) == Ok(memory.start()))?;
    let Released(()) = dma
        .unmap_single(&mut cpu, &mut machine, &at, mapping)
        .ok()?;
    ensure(access(&mut machine).is_err())
}

/// Maps a page over a queue that is looped back to a backend, and unmaps it.
fn pviommu() -> Option<()> {
    let ram = Ram::new(400);
    let format = SecondStage::new(Levels::Four);
    let memory = AddressRange::new(Gpa::new(0), 1 << 20)?;
    let last = FixedLastTable::default();
    let own = DomainId::new(9);
    let backing = OnDemand::new(&ram, &ram, &ram, format, own, &[memory], last, ()).ok()?;
    let unit = VtdUnit::vtd(&UnitConfig::UNCACHED);
    let domain = DomainId::new(1);
    let tables =
        HardwareTables::new(&ram, &ram, unit, format, Coherency::Coherent, &[domain]).ok()?;
    let window = IovaRange::new(Iova::new(0x1000), 1 << 20)?;
    let config = Config::new(window, 16, [0x18]).ok()?;
    let device = Devid::new(0x18);
    let backend = Backend::new(config, BackendLimits::default(), backing, tables);
    let options = ChannelOptions {
        pages_max: 16,
        max_empty_polls: 100,
    };
    let channel = Channel::new(Loopback::new(backend, 8), options);
    let link = SharedChannel::new(channel, RefCell::new);
    let mapped = || link.with(|channel| channel.queue().backend().mapped_pages(device));
    let table = RemoteTable::new(&link, device, domain);
    let mut machine = Machine {
        ram: &ram,
        unit: VtdUnit::vtd(&UnitConfig::UNCACHED),
    };
    let mut cpu = table.per_cpu();
    let request = MapRequest {
        iova: Iova::new(0x5000),
        pa: PhysAddr::new(0x7000),
        pages: 2,
        permissions: Permissions::WRITE,
    };
    table.map(&mut cpu, &mut machine, request).ok()?;
    ensure(mapped() == 2 && !table.is_empty(&machine))?;
    let range = PfnRange::new(Pfn::new(5), 2)?;
    let (cleared, ..) = table.unmap(&mut cpu, &mut machine, range).ok()?;
    table.sync(&mut cpu, &mut machine);
    let mut answers = UnmapCompletions::new(&link);
    let ticket = answers.submit(Invalidation::Domain(domain)).ok()?;
    ensure(answers.poll(ticket) == Ok(true) && mapped() == 0 && cleared.range() == range)
}

fn nvme_device() -> Option<()> {
    let controller = Controller::new(&ringfence_nvme_device::Config::new(1));
    ensure(controller.read(ringfence_nvme_device::register::VS, 4) == 0x0001_0400)
}

fn riommu_device() -> Option<()> {
    let mut device =
        RiommuDevice::new(&ringfence_riommu_device::Config::default(), &[DEVICE]).ok()?;
    ensure(device.read(register::ID, 4) == u64::from(register::MAGIC))?;
    let blocked = device.translate(&Ram::new(1), DEVICE, Iova::ZERO, 1, Access::Read);
    ensure(blocked.is_err())
}
