//! A guest whose disk is behind the para-virtual IOMMU: the driver's side of its two queues.
#![allow(dead_code)]

use std::sync::Arc;

use ringfence_live::assigned::AssignedDma;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::Dma;
use ringfence_live::host::HostPagePool;
use ringfence_live::pviommu::{PvDma, PvIommu};
use ringfence_live::server::PolledFunction;
use ringfence_live::virtio::Device;
use ringfence_live::virtio::pviommu::PvIommuDevice;
use ringfence_pviommu::wire::{Devid, Gpa, encode_map, encode_unmap};
use ringfence_types::{Direction, Iova, RequesterId};

use crate::guest::{AWAY, ENDPOINT, EVENT_QUEUE, Guest, share};
use crate::rig::*;

/// Requester ID of the disk.
pub(crate) const DISK: u16 = ENDPOINT as u16;
/// Address of the request queue.
pub(crate) const REQUESTS: u64 = 0x4_0000;
/// Address of the requests, one page each; `STATUS` is the address of their status bytes.
pub(crate) const REQUEST: u64 = 0x6_0000;
const STATUS: u64 = 0x7_1000;
/// Address of the event buffers.
const EVENT: u64 = 0x7_0000;
pub(crate) const PAGE: u64 = 4096;

/// Client of the para-virtual IOMMU.
pub(crate) type Para = Client<PvIommuDevice, PvDma>;

pub(crate) fn map(device: u16, direction: Direction, pages: &[(u64, u64)]) -> Vec<u8> {
    let mut request = Vec::new();
    let pages = pages
        .iter()
        .map(|(giova, gpa)| (Iova::new(*giova), Gpa::new(*gpa)));
    encode_map(&mut request, Devid::new(device.into()), direction, pages).unwrap();
    request
}

pub(crate) fn unmap(giovas: &[u64]) -> Vec<u8> {
    unmap_for(DISK, giovas)
}

pub(crate) fn unmap_for(device: u16, giovas: &[u64]) -> Vec<u8> {
    let mut request = Vec::new();
    let giovas = giovas.iter().map(|giova| Iova::new(*giova));
    encode_unmap(&mut request, Devid::new(device.into()), giovas).unwrap();
    request
}

/// Returns the pages of a range.
fn pages(start: u64, bytes: u64) -> impl Iterator<Item = u64> {
    (start..start + bytes).step_by(PAGE as usize)
}

impl<D: Device> Guest<D, Para> {
    /// Creates a guest with the device that `make` returns; its IOMMU driver is not started.
    pub(crate) fn behind_para(make: impl FnOnce(&PvIommu, Arc<DeviceCounters>) -> D) -> Self {
        Self::behind_para_of(HostPagePool::Off, make)
    }

    /// Like [`behind_para`](Self::behind_para), with these host optimisations.
    pub(crate) fn behind_para_of(
        optimisations: HostPagePool,
        make: impl FnOnce(&PvIommu, Arc<DeviceCounters>) -> D,
    ) -> Self {
        let counters = Arc::new(DeviceCounters::default());
        let id = RequesterId::new(DISK);
        let shared = PvIommu::with_assigned(&[id], &[], optimisations, Arc::clone(&counters));
        let shared = shared.unwrap();
        let own = Arc::new(DeviceCounters::default());
        let device = make(&shared, Arc::clone(&own));
        let disk = Client::new(device, shared.reader(id).unwrap(), true, own);
        Self::of_para(&shared, counters, disk)
    }
}

impl<D: Device> Guest<D, Para, AssignedDma> {
    /// Creates a guest with a device whose accesses the hardware model translates.
    pub(crate) fn assigned_para(
        optimisations: HostPagePool,
        make: impl FnOnce(Arc<DeviceCounters>) -> D,
    ) -> Self {
        let counters = Arc::new(DeviceCounters::default());
        let id = RequesterId::new(DISK);
        let shared = PvIommu::with_assigned(&[id], &[id], optimisations, Arc::clone(&counters));
        let shared = shared.unwrap();
        let own = Arc::new(DeviceCounters::default());
        let dma = shared.assigned(id, Arc::clone(&own)).unwrap();
        let disk = Client::new(make(Arc::clone(&own)), dma, true, own);
        Self::of_para(&shared, counters, disk)
    }
}

impl<D: Device, A: Dma> Guest<D, Para, A> {
    pub(crate) fn of_para(
        shared: &PvIommu,
        counters: Arc<DeviceCounters>,
        mut disk: Client<D, A>,
    ) -> Self {
        let device = PvIommuDevice::new(shared.clone(), Arc::clone(&counters));
        let mut iommu = Client::new(device, shared.memory(), false, counters);
        share(&mut iommu, &mut disk);
        Self {
            iommu,
            disk,
            requests: 0,
        }
    }

    /// Starts the IOMMU's driver, with an event queue.
    pub(crate) fn attach(&mut self) {
        self.begin_para(0);
    }

    /// Like [`attach`](Self::attach), with these features of the rings.
    pub(crate) fn begin_para(&mut self, features: u64) {
        self.requests = 0;
        self.iommu.negotiate(1 | features);
        self.iommu.poke(REQUESTS + 0x1000, &[0; 64]);
        self.iommu.enable(0, 16, REQUESTS);
        self.iommu.enable(1, 16, EVENT_QUEUE);
        self.iommu.set(0x14, &[15]);
    }

    /// Makes these requests with one doorbell; returns their statuses.
    pub(crate) fn ask(&mut self, requests: &[Vec<u8>]) -> Vec<u8> {
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
            let available = u64::from(self.requests % 16);
            ram.poke(REQUESTS + 0x1004 + 2 * available, &head.to_le_bytes());
            self.requests += 1;
        }
        ram.poke(REQUESTS + 0x1002, &self.requests.to_le_bytes());
        self.iommu.ring(0);
        let used = self.iommu.peek(REQUESTS + 0x2002, 2);
        assert_eq!(used, self.requests.to_le_bytes(), "all are answered");
        self.iommu.peek(STATUS, requests.len())
    }

    /// Maps a range for the disk, with the flags of a virtio-iommu request; returns the status.
    pub(crate) fn map(&mut self, start: u64, bytes: u64, to: u64, flags: u32) -> u8 {
        let direction = match flags {
            1 => Direction::ToDevice,
            2 => Direction::FromDevice,
            _ => Direction::Bidirectional,
        };
        let pages: Vec<_> = pages(start, bytes).zip(pages(to, bytes)).collect();
        self.ask(&[map(DISK, direction, &pages)])[0]
    }

    pub(crate) fn unmap(&mut self, start: u64, bytes: u64) -> u8 {
        let pages: Vec<_> = pages(start, bytes).collect();
        self.ask(&[unmap(&pages)])[0]
    }

    /// Maps the rings, the header, the status and a data page at 0xb000 in both directions. Starts
    /// the disk.
    pub(crate) fn mapped(mut self) -> Self {
        self.attach();
        assert_eq!(self.map(QUEUE + AWAY, 0xa000 - QUEUE, QUEUE, 3), 0);
        assert_eq!(self.map(0xb000 + AWAY, 0x1000, 0xb000, 3), 0);
        self.begin();
        self
    }

    /// Gives the IOMMU buffers for two events.
    pub(crate) fn wait_for_a_fault(&mut self) {
        for slot in 0..2u64 {
            let at = EVENT + 64 * slot;
            self.iommu
                .poke(EVENT_QUEUE + 16 * slot, &descriptor(at, 24, WRITE, 0));
            let address = EVENT_QUEUE + 0x1004 + 2 * slot;
            self.iommu.poke(address, &(slot as u16).to_le_bytes());
        }
        self.iommu.poke(EVENT_QUEUE + 0x1002, &[2, 0]);
        self.iommu.ring(1);
    }

    /// Returns the reported events, at most two.
    pub(crate) fn events(&mut self) -> Vec<Vec<u8>> {
        self.iommu.session.function().on_ready();
        let told = self.iommu.peek(EVENT_QUEUE + 0x2002, 2)[0];
        let told = 0..u64::from(told);
        told.map(|slot| self.iommu.peek(EVENT + 64 * slot, 24))
            .collect()
    }

    /// Returns the endpoint and the address of the first stopped access. `None` if no event was
    /// reported.
    pub(crate) fn fault(&mut self) -> Option<(u32, u64)> {
        let events = self.events();
        let event = events.first()?;
        let long = |at: usize| u64::from_le_bytes(event[at..at + 8].try_into().unwrap());
        Some((long(0) as u32, long(16)))
    }
}
