//! A disk behind the para-virtual IOMMU: it reaches what the driver's requests have mapped for it, and nothing else.

use std::sync::Arc;

use ringfence_live::counters::DeviceCounters;
use ringfence_live::iommu::Translated;
use ringfence_live::pviommu::{PvDma, PvIommu};
use ringfence_live::server::Served;
use ringfence_live::virtio::blk::Blk;
use ringfence_live::virtio::pviommu::PvIommuDevice;
use ringfence_pviommu::wire::{Devid, Gpa, encode_map, encode_unmap};
use ringfence_types::{DeviceId, Direction, Iova};

use crate::guest::{ACCESS_PLATFORM, AWAY, EVENT_QUEUE};
use crate::rig::*;

const DISK: u16 = 0x20;
/// The requests' queue.
const REQUESTS: u64 = 0x4_0000;
/// Requests, a page each, and the bytes for their statuses.
const REQUEST: u64 = 0x6_0000;
const STATUS: u64 = 0x7_1000;
const PAGE: u64 = 4096;

struct Guest {
    iommu: Client<PvIommuDevice, PvDma>,
    disk: Client<Blk, Translated>,
    made: u16,
}

fn map(device: u16, direction: Direction, pages: &[(u64, u64)]) -> Vec<u8> {
    let mut request = Vec::new();
    let pages = pages
        .iter()
        .map(|(giova, gpa)| (Iova::new(*giova), Gpa::new(*gpa)));
    encode_map(&mut request, Devid::new(device.into()), direction, pages).unwrap();
    request
}

fn unmap(giovas: &[u64]) -> Vec<u8> {
    let mut request = Vec::new();
    let giovas = giovas.iter().map(|giova| Iova::new(*giova));
    encode_unmap(&mut request, Devid::new(DISK.into()), giovas).unwrap();
    request
}

impl Guest {
    fn new() -> Self {
        let counters = Arc::new(DeviceCounters::default());
        let id = DeviceId::new(DISK);
        let shared = PvIommu::new(&[id], Arc::clone(&counters)).unwrap();
        let device = PvIommuDevice::new(shared.clone(), Arc::clone(&counters));
        let mut iommu = Client::new(device, shared.memory(), false, counters);
        let own = Arc::new(DeviceCounters::default());
        let blk = Blk::new(disk_file(), false, Arc::clone(&own)).unwrap();
        let mut disk = Client::new(blk, shared.reader(id).unwrap(), true, own);
        disk.ram = iommu.ram.try_clone().unwrap();
        iommu.agree();
        iommu.share_memory();
        disk.agree();
        disk.share_memory();
        Self {
            iommu,
            disk,
            made: 0,
        }
    }

    /// The driver begins, with an event queue.
    fn begin(&mut self) {
        self.made = 0;
        self.iommu.negotiate(1);
        self.iommu.poke(REQUESTS + 0x1000, &[0; 64]);
        self.iommu.enable(0, 16, REQUESTS);
        self.iommu.enable(1, 16, EVENT_QUEUE);
        self.iommu.set(0x14, &[15]);
    }

    /// These requests, with one doorbell for all; their statuses.
    fn ask(&mut self, requests: &[Vec<u8>]) -> Vec<u8> {
        let ram = &self.iommu;
        for (request, slot) in requests.iter().zip(0u64..) {
            let (at, status) = (REQUEST + slot * PAGE, STATUS + slot);
            ram.poke(at, request);
            ram.poke(status, &[0xee]);
            let bytes = request.len() as u32;
            let head = 2 * slot as u16;
            let table = REQUESTS + 32 * slot;
            ram.poke(table, &descriptor(at, bytes, NEXT, head + 1));
            ram.poke(table + 16, &descriptor(status, 1, WRITE, 0));
            let place = u64::from(self.made % 16);
            ram.poke(REQUESTS + 0x1004 + 2 * place, &head.to_le_bytes());
            self.made += 1;
        }
        ram.poke(REQUESTS + 0x1002, &self.made.to_le_bytes());
        self.iommu.ring(0);
        let used = self.iommu.peek(REQUESTS + 0x2002, 2);
        assert_eq!(used, self.made.to_le_bytes(), "all are answered");
        self.iommu.peek(STATUS, requests.len())
    }

    /// Rings, header and status of the disk both ways, and it runs.
    fn ready(mut self) -> Self {
        self.begin();
        let pages: Vec<_> = (QUEUE..0xa000)
            .step_by(PAGE as usize)
            .map(|at| (at + AWAY, at))
            .collect();
        let request = map(DISK, Direction::Bidirectional, &pages);
        assert_eq!(self.ask(&[request]), [0]);
        self.disk.negotiate(ACCESS_PLATFORM);
        self.disk.enable(0, 16, QUEUE + AWAY);
        self.disk.set(0x14, &[15]);
        self
    }

    /// A read of sector 0 into `data`; how it ended, if it did.
    fn read(&mut self, count: u16, data: u64) -> Option<u8> {
        let disk = &mut self.disk;
        disk.poke(0x8000, &request(0, 0));
        disk.poke(0x9000, &[0xee]);
        disk.descriptor(0, 0x8000 + AWAY, 16, NEXT, 1);
        disk.descriptor(1, data, 512, NEXT | WRITE, 2);
        disk.descriptor(2, 0x9000 + AWAY, 1, WRITE, 0);
        disk.offer(0, count);
        (disk.used().0 == count).then(|| disk.peek(0x9000, 1)[0])
    }
}

#[test]
fn what_is_mapped_is_reached_until_it_is_unmapped() {
    let mut guest = Guest::new().ready();
    let data = 0xb000 + AWAY;
    assert_eq!(guest.read(1, data), Some(1), "not mapped yet");
    // In one go: to the disk only, gone again, then from it; twice is refused.
    let from_disk = map(DISK, Direction::FromDevice, &[(data, 0xb000)]);
    let statuses = guest.ask(&[
        map(DISK, Direction::ToDevice, &[(data, 0xb000)]),
        unmap(&[data]),
        from_disk.clone(),
        from_disk,
        map(DISK + 1, Direction::FromDevice, &[(data + PAGE, 0xb000)]),
        map(DISK, Direction::FromDevice, &[(data + PAGE, RAM_BYTES)]),
    ]);
    assert_eq!(statuses, [0, 0, 0, 5, 2, 4]);
    assert_eq!(guest.iommu.counters.doorbells.get(), 2, "one for each call");
    assert_eq!(guest.read(2, data), Some(0));
    assert_ne!(guest.disk.peek(0xb000, 512), vec![0; 512]);
    guest.disk.poke(0xb000, &[0; 512]);
    assert_eq!(guest.ask(&[unmap(&[data])]), [0]);
    assert_eq!(guest.read(3, data), Some(1));
    assert_eq!(guest.disk.peek(0xb000, 512), vec![0; 512], "not a byte");
    assert_eq!(guest.ask(&[unmap(&[data])]), [6]);
}

#[test]
fn nothing_is_reached_before_the_driver_begins_and_after_a_reset() {
    let mut guest = Guest::new();
    guest.disk.negotiate(ACCESS_PLATFORM);
    guest.disk.enable(0, 16, QUEUE);
    guest.disk.set(0x14, &[15]);
    assert_eq!(guest.read(1, 0xb000), None);
    assert_eq!(
        guest.disk.register(0x14, 1) & 64,
        64,
        "its rings are out of reach"
    );

    let mut guest = Guest::new().ready();
    let data = 0xb000 + AWAY;
    assert_eq!(
        guest.ask(&[map(DISK, Direction::FromDevice, &[(data, 0xb000)])]),
        [0]
    );
    guest.iommu.set(0x14, &[0]);
    assert_eq!(guest.read(1, data), None);
    // The next driver finds nothing mapped.
    guest.begin();
    assert_eq!(guest.ask(&[unmap(&[data])]), [6]);
}

#[test]
fn a_stopped_access_is_told() {
    let mut guest = Guest::new().ready();
    let data = 0xb000 + AWAY;
    assert_eq!(
        guest.ask(&[map(DISK, Direction::ToDevice, &[(data, 0xb000)])]),
        [0]
    );
    for slot in 0..2u64 {
        let at = 0x7_0000 + 64 * slot;
        guest
            .iommu
            .poke(EVENT_QUEUE + 16 * slot, &descriptor(at, 24, WRITE, 0));
        let place = EVENT_QUEUE + 0x1004 + 2 * slot;
        guest.iommu.poke(place, &(slot as u16).to_le_bytes());
    }
    guest.iommu.poke(EVENT_QUEUE + 0x1002, &[2, 0]);
    guest.iommu.ring(1);
    assert_eq!(guest.read(1, data), Some(1), "not in this direction");
    assert_eq!(guest.read(2, 0xdead_0000), Some(1), "not mapped");
    guest.iommu.session.function().came();
    assert_eq!(guest.iommu.peek(EVENT_QUEUE + 0x2002, 2), [2, 0]);
    for (slot, reason, giova) in [(0, 2, data), (1, 1, 0xdead_0000)] {
        let expected = [longs(&[DISK.into()]), words(&[2, reason]), longs(&[giova])].concat();
        assert_eq!(guest.iommu.peek(0x7_0000 + 64 * slot, 24), expected);
    }
}

#[test]
fn a_request_without_a_place_for_its_status_breaks_the_device() {
    let mut guest = Guest::new();
    guest.begin();
    guest.iommu.poke(REQUEST, &unmap(&[AWAY]));
    guest.iommu.poke(REQUESTS, &descriptor(REQUEST, 24, 0, 0));
    guest.iommu.poke(REQUESTS + 0x1002, &[1, 0]);
    guest.iommu.ring(0);
    assert_eq!(guest.iommu.register(0x14, 1) & 64, 64);
}
