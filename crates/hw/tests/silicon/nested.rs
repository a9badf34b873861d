//! Nested translation: both stages in tables in memory.

mod faults;
mod invalidation;
mod model;
mod walks;

use std::sync::atomic::AtomicU64;

use ringfence_hw::{NestedUnit, NestedUnitConfig, Translate};
use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Coherency, FirstStage, Levels, NestedEntry, SecondStage, Table};
use ringfence_types::{
    Access, GuestPhysAddr, Iova, MemoryError, PageSize, Pasid, Permissions, PhysAddr, PhysMemory,
    PhysRange, RequesterId, TABLE_WORDS,
};

use crate::rig::{A, Seen, pages_at, request, seen};

/// The guest's memory: 64 MiB at host address `HOST`, with neighbouring pages exchanged.
const GUEST: u64 = 64 << 20;
const HOST: u64 = 64 << 20;
/// The host's tables and the entries of devices.
const TABLES: u64 = 160 << 20;
const ENTRIES: u64 = 152 << 20;
/// Guest-physical frames of the guest's tables.
const GUEST_TABLES: u64 = 32 << 20;

const UNCACHED: NestedUnitConfig = NestedUnitConfig {
    iotlb: 0,
    second_stage: 0,
    largest: PageSize::Size2M,
    fault_log: 16,
};
const CACHED: NestedUnitConfig = NestedUnitConfig {
    iotlb: 64,
    second_stage: 64,
    ..UNCACHED
};

fn host_of(guest: u64) -> u64 {
    HOST + (guest ^ 0x1000)
}

/// The memory as the guest's processor addresses it.
#[derive(Clone, Copy)]
struct GuestMemory<'m>(&'m Arena);

impl PhysMemory for GuestMemory<'_> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        self.0.word(PhysAddr::new(host_of(at.get())))
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.0.table(PhysAddr::new(host_of(at.get())))
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.0.words(PhysAddr::new(host_of(at.get())), count)
    }

    fn write_back(&self, _: PhysAddr, _: u64) {}

    fn drain(&self) {}
}

struct Nested<'m> {
    mem: &'m Arena,
    host_frames: Frames<&'m Arena>,
    guest_frames: Frames<GuestMemory<'m>>,
    second: Table<SecondStage>,
    unit: NestedUnit,
}

fn pasid(raw: u32) -> Pasid {
    Pasid::new(raw).unwrap()
}

impl<'m> Nested<'m> {
    /// Creates a machine whose second stage maps the guest's tables and nothing else.
    fn new(mem: &'m Arena, config: &NestedUnitConfig, levels: Levels) -> Self {
        let region = PhysRange::new(PhysAddr::new(TABLES), (256 << 20) - TABLES).unwrap();
        let host_frames = Frames::new(mem, region);
        let tables = PhysRange::new(PhysAddr::new(GUEST_TABLES), GUEST - GUEST_TABLES).unwrap();
        let guest_frames = Frames::new(GuestMemory(mem), tables);
        let format = SecondStage::new(levels).with_pages_up_to(PageSize::Size2M);
        let second = Table::new(format, A, Coherency::Coherent, mem, &host_frames).unwrap();
        let nested = Self {
            mem,
            host_frames,
            guest_frames,
            second,
            unit: NestedUnit::new(config),
        };
        for page in (GUEST_TABLES..GUEST_TABLES + (1 << 20)).step_by(4096) {
            nested.map_second(page, Permissions::READ);
        }
        nested
    }

    fn map_second(&self, guest: u64, permissions: Permissions) {
        let request = request(guest, host_of(guest), 1, permissions);
        self.second
            .map(self.mem, &self.host_frames, request)
            .unwrap();
    }

    fn unmap_second(&self, guest: u64) {
        let _ = self.second.unmap(self.mem, pages_at(guest, 1)).unwrap();
    }

    /// Creates a first stage of the guest.
    fn first(&self, levels: Levels) -> Table<FirstStage> {
        let format = FirstStage::new(levels)
            .unwrap()
            .with_pages_up_to(PageSize::Size2M);
        let memory = GuestMemory(self.mem);
        Table::new(format, A, Coherency::Coherent, &memory, &self.guest_frames).unwrap()
    }

    fn attach(&mut self, device: RequesterId, tag: u32, first: &Table<FirstStage>, levels: Levels) {
        let entry = NestedEntry {
            domain: A,
            first_root: GuestPhysAddr::new(first.root().get()),
            first_levels: levels,
            second_root: self.second.root(),
            second_levels: self.second.format().levels(),
        };
        let at = PhysAddr::new(ENTRIES + u64::from(tag) * NestedEntry::BYTES);
        entry.write(self.mem, at).unwrap();
        self.unit.set_context(device, pasid(tag), at);
    }

    fn map_first(&self, first: &Table<FirstStage>, iova: u64, guest: u64, rights: Permissions) {
        let request = request(iova, guest, 1, rights);
        first
            .map(&GuestMemory(self.mem), &self.guest_frames, request)
            .unwrap();
    }

    fn unmap_first(&self, first: &Table<FirstStage>, iova: u64) {
        let pages = pages_at(iova, 1);
        let _ = first.unmap(&GuestMemory(self.mem), pages).unwrap();
    }

    fn dma(&mut self, device: RequesterId, iova: u64, bytes: u64, access: Access) -> Seen {
        let result = self
            .unit
            .translate(self.mem, device, Iova::new(iova), bytes, access);
        seen(result.map(|translation| translation.to_vec()))
    }
}
