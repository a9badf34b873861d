//! Disks: reads return the written data in every order of execution, and all pages are returned.

mod invalid_completions;

use proptest::prelude::*;
use ringfence_devices::api::{DeviceRing, DmaApi};
use ringfence_devices::block::ahci::{self, AhciDriver, AhciPort};
use ringfence_devices::block::nvme::{self, NvmeController, NvmeQueue};
use ringfence_devices::block::{
    BlockError, CompletedIo, DiskRequest, Operation, PAGE_BYTES, PseudoScsi, RamDisk, RejectedIo,
};
use ringfence_devices::nic::Environment;
use ringfence_devices::ring::RingSize;
use ringfence_devices::{Buffer, ByteMemory, Pool};
use ringfence_dma::Mapping;
use ringfence_dma::ring::{RingSetup, SlotChoice};
use ringfence_hw::{DmaUsage, IommuKind};
use ringfence_types::Direction;

use super::rig::{self, OracleChecked, RingRig};

const BLOCKS: usize = 4096;
pub(crate) const QUEUE: u16 = 1;

/// A driver with its device, so that one test covers both disks.
trait Disk<W: Environment> {
    fn submit(&mut self, env: &mut W, io: DiskRequest) -> Result<u16, RejectedIo>;
    /// The device executes some commands, and the driver handles their completions.
    fn work(&mut self, env: &mut W, disk: &mut RamDisk) -> Vec<CompletedIo>;
    fn outstanding(&self) -> usize;
    fn close(self, env: &mut W, each: impl FnMut(Buffer));
}

struct Nvme<H> {
    queue: NvmeQueue<H>,
    controller: NvmeController,
}

impl<H> Nvme<H> {
    fn open<W: Environment<Handle = H>>(env: &mut W, entries: u32, seed: u64) -> Self {
        let size = RingSize::new(entries).unwrap();
        let queue = NvmeQueue::open(&mut env.api(), QUEUE, size).unwrap();
        let controller = NvmeController::new(rig::NIC, queue.addresses(), seed);
        Self { queue, controller }
    }
}

impl<W: Environment> Disk<W> for Nvme<W::Handle> {
    fn submit(&mut self, env: &mut W, io: DiskRequest) -> Result<u16, RejectedIo> {
        self.queue.submit(&mut env.api(), io)
    }

    fn work(&mut self, env: &mut W, disk: &mut RamDisk) -> Vec<CompletedIo> {
        let tail = self.queue.sync_map(&mut env.api());
        self.controller.submission_doorbell(tail);
        self.controller.run(&mut env.bus(), disk).unwrap();
        let mut all = Vec::new();
        self.queue
            .complete(&mut env.api(), u32::MAX, |done| all.push(done))
            .unwrap();
        self.controller
            .completion_doorbell(self.queue.completion_head());
        all
    }

    fn outstanding(&self) -> usize {
        self.queue.outstanding()
    }

    fn close(self, env: &mut W, each: impl FnMut(Buffer)) {
        self.queue.close(&mut env.api(), each).unwrap();
    }
}

struct Ahci<H> {
    driver: AhciDriver<H>,
    port: AhciPort,
}

impl<H> Ahci<H> {
    fn open<W: Environment<Handle = H>>(env: &mut W, seed: u64) -> Self {
        let driver = AhciDriver::open(&mut env.api()).unwrap();
        let port = AhciPort::new(rig::NIC, driver.addresses(), seed);
        Self { driver, port }
    }
}

impl<W: Environment> Disk<W> for Ahci<W::Handle> {
    fn submit(&mut self, env: &mut W, io: DiskRequest) -> Result<u16, RejectedIo> {
        let tag = self.driver.submit(&mut env.api(), io)?;
        let slots = self.driver.sync_map(&mut env.api());
        self.port.issue(slots);
        Ok(tag)
    }

    fn work(&mut self, env: &mut W, disk: &mut RamDisk) -> Vec<CompletedIo> {
        self.port.run(&mut env.bus(), disk, 3).unwrap();
        let mut all = Vec::new();
        self.driver
            .complete(&mut env.api(), self.port.registers(), |done| {
                all.push(done);
            })
            .unwrap();
        all
    }

    fn outstanding(&self) -> usize {
        self.driver.outstanding().count_ones() as usize
    }

    fn close(self, env: &mut W, each: impl FnMut(Buffer)) {
        self.driver.close(&mut env.api(), each).unwrap();
    }
}

/// A request of a test. Concurrent requests use different blocks, as a file system ensures.
#[derive(Debug, Clone)]
struct Request {
    operation: Operation,
    block: u64,
    blocks: u32,
    fill: u8,
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    // Mostly a page or two, sometimes enough for a PRP list.
    let blocks = prop_oneof![1_u32..20, 1_u32..200];
    let request = (any::<bool>(), 0..(BLOCKS as u64 - 200), blocks, any::<u8>()).prop_map(
        |(read, block, blocks, fill)| Request {
            operation: if read {
                Operation::Read
            } else {
                Operation::Write
            },
            block,
            blocks,
            fill,
        },
    );
    prop::collection::vec(request, 1..60)
}

/// Returns byte `at` of a write of `fill`.
fn pattern(fill: u8, at: usize) -> u8 {
    fill.wrapping_add((at % 251) as u8).wrapping_mul(3)
}

struct Pending {
    tag: u16,
    request: Request,
    /// Expected data of a read.
    expected: Vec<u8>,
}

/// Runs `requests` and checks every byte against a plain array. Returns how often there was no
/// room.
fn drive<W: OracleChecked, D: Disk<W>>(env: &mut W, mut driver: D, requests: &[Request]) -> usize {
    let mut pool = Pool::new(rig::buffers(64 << 20), PAGE_BYTES).unwrap();
    let mut disk = RamDisk::new(BLOCKS);
    let mut model = vec![0_u8; BLOCKS * 512];
    let mut pending: Vec<Pending> = Vec::new();
    let mut full = 0;
    for request in requests {
        let bytes = request.blocks as usize * 512;
        let range = request.block as usize * 512..request.block as usize * 512 + bytes;
        // Overlapping requests complete first.
        let overlaps = |pending: &[Pending]| {
            pending.iter().any(|other| {
                let (a, b) = (&other.request, request);
                a.block < b.block + u64::from(b.blocks) && b.block < a.block + u64::from(a.blocks)
            })
        };
        while overlaps(&pending) {
            settle(env, &mut driver, &mut disk, &mut pool, &mut pending);
        }
        loop {
            let mut buffers = Vec::new();
            for page in 0..bytes.div_ceil(PAGE_BYTES as usize) {
                let buffer = pool.alloc().unwrap();
                let here: Vec<u8> = (0..PAGE_BYTES as usize)
                    .map(|at| pattern(request.fill, page * PAGE_BYTES as usize + at))
                    .collect();
                if request.operation == Operation::Write {
                    env.api().memory().write(buffer.start(), &here).unwrap();
                }
                buffers.push(buffer);
            }
            let io = DiskRequest {
                operation: request.operation,
                block: request.block,
                bytes: bytes as u32,
                buffers,
            };
            match driver.submit(env, io) {
                Ok(tag) => {
                    if request.operation == Operation::Write {
                        for (at, byte) in model[range.clone()].iter_mut().enumerate() {
                            *byte = pattern(request.fill, at);
                        }
                    }
                    pending.push(Pending {
                        tag,
                        request: request.clone(),
                        expected: model[range].to_vec(),
                    });
                    break;
                }
                Err(rejected) => {
                    assert_eq!(rejected.error, BlockError::Full);
                    for buffer in rejected.buffers {
                        pool.free(buffer).unwrap();
                    }
                    full += 1;
                    assert!(!pending.is_empty(), "no room, and nothing outstanding");
                    settle(env, &mut driver, &mut disk, &mut pool, &mut pending);
                }
            }
        }
    }
    while driver.outstanding() > 0 {
        settle(env, &mut driver, &mut disk, &mut pool, &mut pending);
    }
    assert!(pending.is_empty());
    assert_eq!(pool.in_use(), 0);
    driver.close(env, |_| panic!("nothing was outstanding"));
    assert_eq!(disk.at(0, model.len() as u64).unwrap(), &model[..]);
    let judge = env.judge();
    assert_eq!(
        (judge.violations, judge.false_faults, judge.live()),
        (0, 0, 0)
    );
    full
}

/// Like `drive`, for a device without an attacker.
fn drive_alone<W: OracleChecked, D: Disk<W>>(
    env: &mut W,
    driver: D,
    requests: &[Request],
) -> usize {
    let full = drive(env, driver, requests);
    assert_eq!(env.judge().faults, 0);
    full
}

/// Runs requests of one to 24 pages, all in the direction of `operation`.
pub(crate) fn nvme_under_attack<W: OracleChecked>(env: &mut W, operation: Operation) {
    let requests: Vec<_> = (0..80_u64)
        .map(|number| Request {
            operation,
            block: number * 200 % 3800,
            blocks: 1 + (number * 37 % 191) as u32,
            fill: number as u8,
        })
        .collect();
    let nvme = Nvme::open(env, 32, 7);
    drive(env, nvme, &requests);
}

/// Completes some of the outstanding requests.
fn settle<W: OracleChecked, D: Disk<W>>(
    env: &mut W,
    driver: &mut D,
    disk: &mut RamDisk,
    pool: &mut Pool,
    pending: &mut Vec<Pending>,
) {
    for done in driver.work(env, disk) {
        assert!(done.succeeded);
        let index = pending.iter().position(|other| other.tag == done.tag);
        let Pending {
            request, expected, ..
        } = pending.swap_remove(index.unwrap());
        assert_eq!(done.operation, request.operation);
        let mut found = Vec::new();
        for buffer in done.buffers {
            let mut page = vec![0; PAGE_BYTES as usize];
            env.api().memory().read(buffer.start(), &mut page).unwrap();
            found.extend(page);
            pool.free(buffer).unwrap();
        }
        assert_eq!(found.len().div_ceil(4096), expected.len().div_ceil(4096));
        assert_eq!(found[..expected.len()], expected[..], "{request:?}");
    }
}

/// Returns the rings of a disk's queue, with `slots` slots each.
pub(crate) fn rings_of(queue: u16, slots: u32) -> Vec<(DeviceRing, u32)> {
    [Direction::ToDevice, Direction::FromDevice]
        .map(|direction| (DeviceRing { queue, direction }, slots))
        .into()
}

/// Creates a ring unit for a disk.
fn rings(queue: u16, slots: u32, choice: SlotChoice) -> RingRig<()> {
    let rings = rings_of(queue, slots);
    let setup = RingSetup {
        choice,
        ..rig::TAIL
    };
    RingRig::rings(rings, setup, ())
}

/// The queue pairs of one NVMe controller.
struct NvmeQueues<H> {
    queues: Vec<Nvme<H>>,
    /// Entries of each queue, which separate the tags of the queues.
    entries: u16,
    /// The queue of the next request.
    next: usize,
    /// Largest number of queues with outstanding commands.
    busy: usize,
}

impl<H> NvmeQueues<H> {
    fn open<W: Environment<Handle = H>>(env: &mut W, queues: u16, entries: u16) -> Self {
        let size = RingSize::new(entries.into()).unwrap();
        let open = |number| {
            let queue = NvmeQueue::open(&mut env.api(), number, size).unwrap();
            let controller = NvmeController::new(rig::NIC, queue.addresses(), number.into());
            Nvme { queue, controller }
        };
        Self {
            queues: (0..queues).map(open).collect(),
            entries,
            next: 0,
            busy: 0,
        }
    }
}

impl<W: Environment> Disk<W> for NvmeQueues<W::Handle> {
    /// Queues take requests in turn, as if each CPU had one.
    fn submit(&mut self, env: &mut W, io: DiskRequest) -> Result<u16, RejectedIo> {
        let index = self.next;
        let tag = self.queues[index].queue.submit(&mut env.api(), io)?;
        self.next = (index + 1) % self.queues.len();
        let busy = self
            .queues
            .iter()
            .filter(|nvme| nvme.queue.outstanding() > 0);
        self.busy = self.busy.max(busy.count());
        Ok(index as u16 * self.entries + tag)
    }

    fn work(&mut self, env: &mut W, disk: &mut RamDisk) -> Vec<CompletedIo> {
        let mut all = Vec::new();
        for (index, nvme) in (0..).zip(&mut self.queues) {
            let tagged = |done: CompletedIo| CompletedIo {
                tag: index * self.entries + done.tag,
                ..done
            };
            all.extend(nvme.work(env, disk).into_iter().map(tagged));
        }
        all
    }

    fn outstanding(&self) -> usize {
        self.queues
            .iter()
            .map(|nvme| nvme.queue.outstanding())
            .sum()
    }

    fn close(self, env: &mut W, mut each: impl FnMut(Buffer)) {
        assert!(self.busy > self.queues.len() / 2, "{} queues", self.busy);
        for nvme in self.queues {
            nvme.queue.close(&mut env.api(), &mut each).unwrap();
        }
    }
}

/// Runs `requests` in the mode that the rule selects for the device, and returns the unit.
fn by_rule<D>(
    usage: &DmaUsage,
    rings: impl IntoIterator<Item = (DeviceRing, u32)>,
    requests: &[Request],
    open: D,
) -> IommuKind
where
    D: OpenDisk,
{
    let kind = IommuKind::for_device(usage);
    match kind {
        IommuKind::Ring => {
            let rings: Vec<_> = rings.into_iter().collect();
            // The rig makes two tables for each ring.
            assert_eq!(usage.tables as usize, 2 * rings.len());
            open.run(&mut RingRig::rings(rings, rig::TAIL, ()), requests);
        }
        IommuKind::Baseline => open.run(&mut rig::strict(), requests),
    }
    kind
}

/// Opens a disk in any mode and runs requests.
trait OpenDisk {
    fn run<W: OracleChecked>(&self, env: &mut W, requests: &[Request]);
}

/// A controller with this many queue pairs of so many entries.
struct QueuePairs(u16, u16);

impl OpenDisk for QueuePairs {
    fn run<W: OracleChecked>(&self, env: &mut W, requests: &[Request]) {
        let Self(queues, entries) = *self;
        let disk = NvmeQueues::open(env, queues, entries);
        drive_alone(env, disk, requests);
    }
}

/// An AHCI port with its driver.
struct Port;

impl OpenDisk for Port {
    fn run<W: OracleChecked>(&self, env: &mut W, requests: &[Request]) {
        let disk = Ahci::open(env, 3);
        drive_alone(env, disk, requests);
    }
}

/// Single-block requests, writes and reads, each of another block of `blocks`.
fn single_blocks(blocks: u64, rounds: u64) -> Vec<Request> {
    let requests = (0..rounds * blocks).map(|number| Request {
        operation: match number / blocks % 2 {
            0 => Operation::Write,
            _ => Operation::Read,
        },
        block: number % blocks,
        blocks: 1,
        fill: number as u8,
    });
    requests.collect()
}

#[test]
fn many_nvme_queues_have_rings_and_ahci_has_the_baseline_unit() {
    let all_rings = |queues: u16, slots| (0..queues).flat_map(move |queue| rings_of(queue, slots));
    // 1024 queue pairs have 4096 tables.
    let requests = single_blocks(2000, 2);
    let unit = by_rule(
        &nvme::dma_usage(1024, 4),
        all_rings(1024, 4),
        &requests,
        QueuePairs(1024, 4),
    );
    assert_eq!(unit, IommuKind::Ring);
    // 16384 queue pairs have more tables than ring ids. The controller works behind the baseline
    // unit; a few of its queues suffice here.
    let unit = by_rule(
        &nvme::dma_usage(16_384, 4),
        [],
        &single_blocks(100, 2),
        QueuePairs(16, 4),
    );
    assert_eq!(unit, IommuKind::Baseline);
    let unit = by_rule(&ahci::DMA_USAGE, [], &single_blocks(100, 4), Port);
    assert_eq!(unit, IommuKind::Baseline);
    assert_eq!(IommuKind::for_device(&DmaUsage::RDMA), IommuKind::Baseline);
    // A ring has at most 2^18 - 1 slots.
    for (slots, unit) in [(1 << 16, IommuKind::Ring), (1 << 18, IommuKind::Baseline)] {
        let usage = nvme::dma_usage(1, slots);
        assert_eq!(IommuKind::for_device(&usage), unit, "{slots}");
    }
}

#[test]
fn a_queue_of_64k_entries_wraps_on_rings() {
    const ENTRIES: u32 = 1 << 16;
    // One entry of a full queue stays empty.
    const OUTSTANDING: usize = ENTRIES as usize - 1;
    assert_eq!(
        IommuKind::for_device(&nvme::dma_usage(1, ENTRIES)),
        IommuKind::Ring
    );
    let mut env = rings(QUEUE, ENTRIES, SlotChoice::Tail);
    let mut nvme = Nvme::open(&mut env, ENTRIES, 3);
    let mut pool = Pool::new(rig::buffers(OUTSTANDING as u64 * PAGE_BYTES), PAGE_BYTES).unwrap();
    let mut disk = RamDisk::new(1);
    disk.at(0, 512).unwrap().fill(0x5a);
    // The second round begins at the last entry and wraps.
    for requests in [OUTSTANDING, 2] {
        for _ in 0..requests {
            let buffer = pool.alloc().unwrap();
            env.api().memory().write(buffer.start(), &[0; 512]).unwrap();
            let read = DiskRequest {
                operation: Operation::Read,
                block: 0,
                bytes: 512,
                buffers: vec![buffer],
            };
            nvme.submit(&mut env, read).unwrap();
        }
        let mut completed = 0;
        while nvme.queue.outstanding() > 0 {
            for done in nvme.work(&mut env, &mut disk) {
                let mut data = [0; 512];
                let buffer = done.buffers.into_iter().next().unwrap();
                env.api().memory().read(buffer.start(), &mut data).unwrap();
                assert!(done.succeeded && data == [0x5a; 512]);
                pool.free(buffer).unwrap();
                completed += 1;
            }
        }
        assert_eq!(completed, requests);
    }
    nvme.close(&mut env, |_| panic!("nothing was outstanding"));
    let judge = env.judge();
    assert_eq!((judge.violations, judge.faults, judge.live()), (0, 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn nvme_reads_what_was_written(
        requests in requests(),
        entries in 1_u32..6,
        seed in any::<u64>(),
        slots in 26_u32..200,
    ) {
        fn run<W: OracleChecked>(
            mut env: W,
            entries: u32,
            seed: u64,
            requests: &[Request],
        ) -> usize {
            let driver = Nvme::open(&mut env, 1 << entries, seed);
            drive_alone(&mut env, driver, requests)
        }
        run(rig::strict(), entries, seed, &requests);
        run(rig::burst(7), entries, seed, &requests);
        run(rig::deferred(), entries, seed, &requests);
        run(rig::unprotected(), entries, seed, &requests);
        run(rings(QUEUE, slots, SlotChoice::Tail), entries, seed, &requests);
        run(rings(QUEUE, slots, SlotChoice::NextFree), entries, seed, &requests);
    }

    #[test]
    fn ahci_reads_what_was_written(
        requests in requests(),
        seed in any::<u64>(),
        slots in 26_u32..200,
    ) {
        fn run<W: OracleChecked>(mut env: W, seed: u64, requests: &[Request]) -> usize {
            let driver = Ahci::open(&mut env, seed);
            drive_alone(&mut env, driver, requests)
        }
        run(rig::strict(), seed, &requests);
        run(rig::burst(7), seed, &requests);
        run(rig::unprotected(), seed, &requests);
        run(rings(0, slots, SlotChoice::Tail), seed, &requests);
    }
}

#[test]
fn tail_slots_stall_out_of_order_completions() {
    // 64 requests of a page with a table of 40 slots. With a drive in arbitrary order, the
    // slot at the tail is live while others are free. The tail policy then waits; a choice of any
    // free slot does not.
    let requests: Vec<_> = (0..640)
        .map(|number| Request {
            operation: Operation::Read,
            block: number * 8 % 4000,
            blocks: 8,
            fill: 0,
        })
        .collect();
    let waits = |choice| {
        let mut env = rings(0, 64, choice);
        let driver = Ahci::open(&mut env, 5);
        drive_alone(&mut env, driver, &requests)
    };
    let (tail, any) = (waits(SlotChoice::Tail), waits(SlotChoice::NextFree));
    assert!(tail > any, "{tail} waits at the tail, {any} otherwise");
}

#[test]
fn the_pseudo_adapter_maps_and_transfers_nothing() {
    fn run<W: OracleChecked + Environment<Handle = Mapping<B>>, B>(mut env: W) {
        let memory = rig::buffers(16 * PAGE_BYTES);
        let mut scsi = PseudoScsi::new(memory, PseudoScsi::REQUEST, Operation::Read).unwrap();
        for _ in 0..100 {
            scsi.request(&mut env.api()).unwrap();
            assert_eq!(scsi.lost(), 0);
        }
        let judge = env.judge();
        assert_eq!((judge.maps, judge.accesses, judge.live()), (100, 0, 0));
    }
    run(rig::strict());
    run(rig::deferred());
    run(rig::burst(250));
    run(rig::unprotected());
    run(rings(0, 2, SlotChoice::Tail));
    for bytes in [0, 4097] {
        assert!(PseudoScsi::new(rig::buffers(4096), bytes, Operation::Read).is_err());
    }
    assert!(PseudoScsi::new(rig::buffers(4095), 1, Operation::Read).is_err());
}
