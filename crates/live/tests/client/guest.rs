//! A guest whose disk is behind its IOMMU: one client for each device, over the same memory.

use std::sync::Arc;

use ringfence_live::assigned::AssignedDma;
use ringfence_live::counters::DeviceCounters;
use ringfence_live::dma::Dma;
use ringfence_live::iommu::{EndpointMemory, GuestDma, VirtioIommu};
use ringfence_live::limits::GuestLimits;
use ringfence_live::server::PolledFunction;
use ringfence_live::virtio::Device;
use ringfence_live::virtio::iommu::IommuDevice;
use ringfence_types::RequesterId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::rig::*;

pub(crate) const ENDPOINT: u32 = 0x20;
pub(crate) const DOMAIN: u32 = 1;
/// Difference between an IOVA and its guest-physical address.
pub(crate) const AWAY: u64 = 1 << 44;
pub(crate) const READ: u32 = 1;
#[allow(dead_code)]
pub(crate) const WRITE_ONLY: u32 = 2;
pub(crate) const READ_WRITE: u32 = 3;
pub(crate) const ACCESS_PLATFORM: u64 = 1 << 33;

/// A device that reports if it has no work left.
pub(crate) trait Idle {
    fn idle(&self) -> bool;
}

impl Idle for ringfence_live::virtio::blk::Blk {
    fn idle(&self) -> bool {
        true
    }
}

impl Idle for ringfence_live::sandbox::DiskProxy {
    fn idle(&self) -> bool {
        self.is_idle()
    }
}

/// Client of the virtio-iommu.
pub(crate) type Virtio = Client<IommuDevice, GuestDma>;

/// A guest with a client for its IOMMU, virtio or para-virtual. Software or the hardware model
/// translates the disk's accesses.
pub(crate) struct Guest<D: Device, I = Virtio, A: Dma = EndpointMemory> {
    pub(crate) iommu: I,
    pub(crate) disk: Client<D, A>,
    pub(crate) requests: u16,
}

/// Lets both clients share the same memory.
pub(crate) fn share<D: Device, A: Dma, E: Device, B: Dma>(
    iommu: &mut Client<D, A>,
    disk: &mut Client<E, B>,
) {
    disk.ram = iommu.ram.try_clone().unwrap();
    iommu.agree();
    iommu.share_memory();
    disk.agree();
    disk.share_memory();
}

pub(crate) const IOMMU_QUEUE: u64 = 0x4_0000;
pub(crate) const EVENT_QUEUE: u64 = 0x5_0000;

impl<D: Device> Guest<D> {
    /// Creates a guest with the device that `make` returns. `make` runs before the endpoint is
    /// added.
    // Some test binaries use only one of the two constructors.
    #[allow(dead_code)]
    pub(crate) fn with(make: impl FnOnce(&VirtioIommu, Arc<DeviceCounters>) -> D) -> Self {
        Self::within(&GuestLimits::default(), make)
    }

    pub(crate) fn within(
        caps: &GuestLimits,
        make: impl FnOnce(&VirtioIommu, Arc<DeviceCounters>) -> D,
    ) -> Self {
        let counters = Arc::new(DeviceCounters::default());
        let shared = VirtioIommu::with_limits(caps, Arc::clone(&counters)).unwrap();
        let own = Arc::new(DeviceCounters::default());
        let device = make(&shared, Arc::clone(&own));
        let translated = shared
            .add_endpoint(RequesterId::new(ENDPOINT as u16))
            .unwrap();
        Self::behind_virtio(
            &shared,
            counters,
            Client::new(device, translated, true, own),
        )
    }
}

impl<D: Device> Guest<D, Virtio, AssignedDma> {
    /// Creates a guest with a device whose accesses the hardware model translates.
    #[allow(dead_code)]
    pub(crate) fn assigned(make: impl FnOnce(Arc<DeviceCounters>) -> D) -> Self {
        let counters = Arc::new(DeviceCounters::default());
        let shared = VirtioIommu::new(Arc::clone(&counters)).unwrap();
        let own = Arc::new(DeviceCounters::default());
        let dma = shared.assign(RequesterId::new(ENDPOINT as u16), Arc::clone(&own));
        let disk = Client::new(make(Arc::clone(&own)), dma.unwrap(), true, own);
        Self::behind_virtio(&shared, counters, disk)
    }
}

impl<D: Device, A: Dma> Guest<D, Virtio, A> {
    fn behind_virtio(
        shared: &VirtioIommu,
        counters: Arc<DeviceCounters>,
        mut disk: Client<D, A>,
    ) -> Self {
        let iommu = IommuDevice::new(shared.clone(), Arc::clone(&counters));
        let mut iommu = Client::new(iommu, shared.memory(), false, counters);
        share(&mut iommu, &mut disk);
        // Features: input range, domain range, MAP and UNMAP, PROBE.
        iommu.negotiate(0b10111);
        iommu.enable(0, 16, IOMMU_QUEUE);
        iommu.enable(1, 16, EVENT_QUEUE);
        iommu.set(0x14, &[15]);
        Guest {
            iommu,
            disk,
            requests: 0,
        }
    }

    /// Maps the rings, the header and the status writable, and a data page at 0xb000. Starts the
    /// disk.
    pub(crate) fn mapped(mut self) -> Self {
        assert_eq!(self.attach(), 0);
        assert_eq!(self.map(QUEUE + AWAY, 0xa000 - QUEUE, QUEUE, READ_WRITE), 0);
        assert_eq!(self.map(0xb000 + AWAY, 0x1000, 0xb000, READ_WRITE), 0);
        self.begin();
        self
    }

    /// Makes a request to the IOMMU; returns its status.
    pub(crate) fn ask(&mut self, kind: u8, body: &[u8]) -> u8 {
        self.requests += 1;
        let (at, reply) = (0x6_0000u64, 0x6_1000u64);
        let ram = &self.iommu;
        ram.poke(at, &[vec![kind, 0, 0, 0], body.to_vec()].concat());
        ram.poke(reply, &[0xee; 4]);
        ram.poke(IOMMU_QUEUE, &descriptor(at, 4 + body.len() as u32, NEXT, 1));
        ram.poke(IOMMU_QUEUE + 16, &descriptor(reply, 4, WRITE, 0));
        let slot = u64::from((self.requests - 1) % 16);
        ram.poke(IOMMU_QUEUE + 0x1004 + 2 * slot, &[0, 0]);
        ram.poke(IOMMU_QUEUE + 0x1002, &self.requests.to_le_bytes());
        self.iommu.ring(0);
        self.iommu.peek(reply, 1)[0]
    }

    pub(crate) fn attach(&mut self) -> u8 {
        self.ask(1, &words(&[DOMAIN, ENDPOINT, 0, 0]))
    }

    pub(crate) fn detach(&mut self) -> u8 {
        self.ask(2, &[words(&[DOMAIN, ENDPOINT]), vec![0; 8]].concat())
    }

    pub(crate) fn map(&mut self, start: u64, bytes: u64, to: u64, flags: u32) -> u8 {
        let body = [
            words(&[DOMAIN]),
            longs(&[start, start + bytes - 1, to]),
            words(&[flags]),
        ];
        self.ask(3, &body.concat())
    }

    pub(crate) fn unmap(&mut self, start: u64, bytes: u64) -> u8 {
        let body = [
            words(&[DOMAIN]),
            longs(&[start, start + bytes - 1]),
            vec![0; 4],
        ];
        self.ask(4, &body.concat())
    }

    /// Gives the IOMMU a buffer for a fault.
    pub(crate) fn wait_for_a_fault(&mut self) {
        self.iommu
            .poke(EVENT_QUEUE, &descriptor(0x7_0000, 24, WRITE, 0));
        self.iommu.poke(EVENT_QUEUE + 0x1002, &[1, 0]);
        self.iommu.ring(1);
    }

    /// Returns the endpoint and the address of the fault. `None` if no fault was reported.
    pub(crate) fn fault(&mut self) -> Option<(u32, u64)> {
        self.iommu.session.function().on_ready();
        let used = self.iommu.peek(EVENT_QUEUE + 0x2002, 2);
        (used == [1, 0]).then(|| {
            let report = self.iommu.peek(0x7_0000, 24);
            (
                u32::from_le_bytes(report[8..12].try_into().unwrap()),
                u64::from_le_bytes(report[16..24].try_into().unwrap()),
            )
        })
    }
}

impl<D: Device, I, A: Dma> Guest<D, I, A> {
    /// Waits until the device has done its work, or cannot continue.
    pub(crate) fn settle(&mut self)
    where
        D: Idle,
    {
        while !self.disk.session.function().device().idle() && self.wait() {}
    }

    /// Waits until the device handles an event from outside. Returns false if it expects none, or
    /// none arrives in time.
    pub(crate) fn wait(&mut self) -> bool {
        let function = self.disk.session.function();
        let Some(awaited) = function.waits_for() else {
            return false;
        };
        let limit = Timespec {
            tv_sec: 30,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::from_borrowed_fd(awaited.fd, PollFlags::IN)];
        let came = matches!(poll(&mut fds, Some(&limit)), Ok(1));
        function.on_ready();
        while function.unfinished() {
            function.continue_work();
        }
        came
    }

    /// Starts the disk with rings at their IOVAs.
    pub(crate) fn begin(&mut self) {
        self.start_disk(QUEUE + AWAY);
    }

    /// Starts the disk with its rings at `queue`.
    pub(crate) fn start_disk(&mut self, queue: u64) {
        self.disk.negotiate(ACCESS_PLATFORM);
        self.disk.enable(0, 16, queue);
        self.disk.set(0x14, &[15]);
    }
}

/// Reads sector 0 into `data`. Returns the status, or `None` if the request did not complete.
pub(crate) fn read<D: Device + Idle, I, A: Dma>(
    guest: &mut Guest<D, I, A>,
    count: u16,
    data: u64,
) -> Option<u8> {
    read_bytes(guest, count, data, 512)
}

/// Like [`read`], with a length in bytes.
pub(crate) fn read_bytes<D: Device + Idle, I, A: Dma>(
    guest: &mut Guest<D, I, A>,
    count: u16,
    data: u64,
    bytes: u32,
) -> Option<u8> {
    transfer(guest, count, (0, 0), data, bytes)
}

/// Makes a request of a kind, 0 to read and 1 to write, at a sector, with this data buffer.
pub(crate) fn transfer<D: Device + Idle, I, A: Dma>(
    guest: &mut Guest<D, I, A>,
    count: u16,
    (kind, sector): (u32, u64),
    data: u64,
    bytes: u32,
) -> Option<u8> {
    let disk = &mut guest.disk;
    disk.poke(0x8000, &request(kind, sector));
    disk.poke(0x9000, &[0xee]);
    disk.descriptor(0, 0x8000 + AWAY, 16, NEXT, 1);
    let flags = if kind == 0 { NEXT | WRITE } else { NEXT };
    disk.descriptor(1, data, bytes, flags, 2);
    disk.descriptor(2, 0x9000 + AWAY, 1, WRITE, 0);
    disk.offer(0, count);
    guest.settle();
    let disk = &guest.disk;
    (disk.used().0 == count).then(|| disk.peek(0x9000, 1)[0])
}
