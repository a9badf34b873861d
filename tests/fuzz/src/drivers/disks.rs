//! Drivers of the two disks.

use ringfence_devices::api::DeviceRing;
use ringfence_devices::block::ahci::{
    AhciDriver, AhciPort, AhciRegisters, CommandHeader, HEADER_BYTES, TABLE_BYTES,
};
use ringfence_devices::block::nvme::{
    COMMAND_BYTES, NvmeCommand, NvmeCompletion, NvmeController, NvmeQueue,
};
use ringfence_devices::block::{
    BLOCK_BYTES, CompletedIo, DiskRequest, Operation, PAGE_BYTES, RamDisk, RejectedIo,
};
use ringfence_devices::nic::Environment;
use ringfence_devices::ring::{RingBase, RingSize};
use ringfence_devices::{Pool, Transfer};
use ringfence_types::{Direction, Iova};

use super::Driver;
use super::rig::{self, OracleChecked};
use super::session::{Area, Hostile, Step, block_error};
use crate::OutcomeHook;

const QUEUE: u16 = 1;
/// Entries of the queue pair: seven outstanding commands.
const ENTRIES: u32 = 8;
/// Pages of the largest request; larger requests are refused by their size.
const PAGES: u32 = 6;
const BLOCKS: usize = 256;
/// Pages in the pool: more than all requests can hold at once, 32 slots of [`PAGES`].
const POOL: u64 = 256;

fn rings_of(queue: u16) -> Vec<(DeviceRing, u32)> {
    [Direction::ToDevice, Direction::FromDevice]
        .map(|direction| (DeviceRing { queue, direction }, 64))
        .into()
}

fn area(base: &RingBase) -> Area {
    let bytes = u64::from(base.size.entries()) * u64::from(base.entry_bytes);
    (base.at, bytes)
}

/// Buffers and a medium, for both disks.
#[derive(Debug)]
struct Common {
    pool: Pool,
    disk: RamDisk,
}

impl Common {
    fn new() -> Self {
        let pool = Pool::new(rig::buffers(POOL * PAGE_BYTES), PAGE_BYTES);
        Self {
            pool: pool.expect("pages"),
            disk: RamDisk::new(BLOCKS),
        }
    }

    /// Builds the request of a step. One in eight values of `a` gives an invalid size.
    fn io(&mut self, step: Step) -> Option<DiskRequest> {
        let blocks = u32::from(step.b) % (PAGES * 8) + 1;
        let bytes = blocks * BLOCK_BYTES as u32 + u32::from(step.a >> 5 == 7);
        let pages = u64::from(bytes).div_ceil(PAGE_BYTES);
        let mut buffers = Vec::new();
        for _ in 0..pages {
            match self.pool.alloc() {
                Some(buffer) => buffers.push(buffer),
                None => {
                    self.back(buffers);
                    return None;
                }
            }
        }
        Some(DiskRequest {
            operation: match step.a & 1 {
                0 => Operation::Read,
                _ => Operation::Write,
            },
            block: u64::from(step.c) % (BLOCKS as u64 + 8),
            bytes,
            buffers,
        })
    }

    fn back(&mut self, buffers: Vec<ringfence_devices::Buffer>) {
        for buffer in buffers {
            self.pool.free(buffer).expect("of this pool");
        }
    }

    fn rejected(&mut self, rejected: RejectedIo, reached: OutcomeHook<'_>) {
        reached(block_error(&rejected.error));
        self.back(rejected.buffers);
    }

    fn done(&mut self, done: CompletedIo, reached: OutcomeHook<'_>) {
        reached(match done.succeeded {
            true => "done",
            false => "failed",
        });
        self.back(done.buffers);
    }
}

/// The NVMe driver.
pub(super) struct Nvme;

impl Driver for Nvme {
    type Of<H> = NvmeOf<H>;

    fn rings() -> Vec<(DeviceRing, u32)> {
        rings_of(QUEUE)
    }
}

pub(super) struct NvmeOf<H> {
    common: Common,
    queue: NvmeQueue<H>,
    controller: NvmeController,
    lists: Iova,
}

impl<H> Hostile<H> for NvmeOf<H> {
    fn open<W: OracleChecked + Environment<Handle = H>>(world: &mut W, seed: u8) -> Self {
        let mut common = Common::new();
        let size = RingSize::new(ENTRIES).expect("a power of two");
        let mut queue = NvmeQueue::open(&mut world.api(), QUEUE, size).expect("nothing fails");
        // The first command has a list and shows its address; it stays outstanding.
        let first = Step {
            a: 0,
            b: 2 * 8,
            c: 0,
        };
        let io = common.io(first).expect("the pool is full");
        let id = queue
            .submit(&mut world.api(), io)
            .expect("the queue is empty");
        let tail = queue.sync_map(&mut world.api());
        let at = queue.addresses();
        let mut raw = [0; COMMAND_BYTES];
        let read = world
            .bus()
            .read(rig::NIC, at.submissions.entry(0), &mut raw);
        assert_eq!((id, read), (0, Ok(())));
        let mut controller = NvmeController::new(rig::NIC, at, u64::from(seed));
        controller.submission_doorbell(tail);
        Self {
            common,
            queue,
            controller,
            lists: NvmeCommand::decode(&raw).prp2,
        }
    }

    fn areas(&self) -> Vec<Area> {
        let at = self.queue.addresses();
        vec![
            area(&at.submissions),
            area(&at.completions),
            (self.lists, u64::from(ENTRIES) * PAGE_BYTES),
        ]
    }

    fn request<W: OracleChecked + Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        step: Step,
        reached: OutcomeHook<'_>,
    ) {
        let Some(io) = self.common.io(step) else {
            return;
        };
        match self.queue.submit(&mut world.api(), io) {
            Ok(_) => {}
            Err(rejected) => self.common.rejected(rejected, reached),
        }
        let tail = self.queue.sync_map(&mut world.api());
        self.controller.submission_doorbell(tail);
    }

    fn service<W: OracleChecked + Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        step: Step,
        reached: OutcomeHook<'_>,
    ) {
        let (queue, common) = (&mut self.queue, &mut self.common);
        let budget = u32::from(step.a) + 1;
        let result = queue.complete(&mut world.api(), budget, |done| common.done(done, reached));
        if let Err(error) = result {
            reached(block_error(&error));
        }
        let head = self.queue.completion_head();
        self.controller.completion_doorbell(head);
    }

    fn claim(&self, step: Step) -> Option<(Iova, [u8; 16])> {
        let done = NvmeCompletion {
            result: 0,
            head: step.b,
            queue: (step.c >> 24) as u16 & 3,
            id: (step.c & 15) as u16,
            status: (step.c >> 8) as u16,
        };
        let mut raw = done.encode();
        raw[14] = (raw[14] & !1) | step.a >> 7;
        let at = self.queue.addresses().completions;
        Some((at.entry(u32::from(step.a)), raw))
    }

    fn work<W: OracleChecked + Environment<Handle = H>>(&mut self, world: &mut W) {
        let disk = &mut self.common.disk;
        let run = self.controller.run(&mut world.bus(), disk);
        run.expect("its queues are mapped");
    }

    fn doorbell(&mut self, value: u32) {
        match value & 1 {
            0 => self.controller.submission_doorbell(value >> 1),
            _ => self.controller.completion_doorbell(value >> 1),
        }
    }

    fn out(&self) -> usize {
        self.common.pool.in_use()
    }

    fn close<W: OracleChecked + Environment<Handle = H>>(
        self,
        world: &mut W,
        reached: OutcomeHook<'_>,
    ) -> usize {
        let Self {
            mut common, queue, ..
        } = self;
        if queue.outstanding() > 0 {
            reached("closed with requests");
        }
        let mut back = Vec::new();
        let closed = queue.close(&mut world.api(), |buffer| back.push(buffer));
        closed.expect("closing does not ask the device");
        common.back(back);
        common.pool.in_use()
    }
}

/// The AHCI driver.
pub(super) struct Ahci;

impl Driver for Ahci {
    type Of<H> = AhciOf<H>;

    fn rings() -> Vec<(DeviceRing, u32)> {
        rings_of(0)
    }
}

pub(super) struct AhciOf<H> {
    common: Common,
    driver: AhciDriver<H>,
    port: AhciPort,
    tables: Iova,
}

/// Slots of a port.
const SLOTS: u64 = 32;
/// Size of a received FIS area in bytes; the driver allocates two of them.
const RECEIVED: u64 = 512;

impl<H> Hostile<H> for AhciOf<H> {
    fn open<W: OracleChecked + Environment<Handle = H>>(world: &mut W, seed: u8) -> Self {
        let mut common = Common::new();
        let mut driver = AhciDriver::open(&mut world.api()).expect("nothing fails");
        let first = Step { a: 0, b: 0, c: 0 };
        let io = common.io(first).expect("the pool is full");
        let tag = driver
            .submit(&mut world.api(), io)
            .expect("all slots are free");
        let slots = driver.sync_map(&mut world.api());
        let at = driver.addresses();
        let mut raw = [0; HEADER_BYTES];
        let read = world.bus().read(rig::NIC, at.commands, &mut raw);
        assert_eq!((tag, read), (0, Ok(())));
        let mut port = AhciPort::new(rig::NIC, at, u64::from(seed));
        port.issue(slots);
        Self {
            common,
            driver,
            port,
            tables: CommandHeader::decode(&raw).table,
        }
    }

    fn areas(&self) -> Vec<Area> {
        let at = self.driver.addresses();
        vec![
            (at.commands, SLOTS * HEADER_BYTES as u64),
            (self.tables, SLOTS * TABLE_BYTES as u64),
            (at.received, RECEIVED),
        ]
    }

    fn request<W: OracleChecked + Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        step: Step,
        reached: OutcomeHook<'_>,
    ) {
        let Some(io) = self.common.io(step) else {
            return;
        };
        let submitted = self.driver.submit(&mut world.api(), io);
        match submitted {
            Ok(tag) => {
                self.driver.sync_map(&mut world.api());
                self.port.issue(1 << tag);
            }
            Err(rejected) => self.common.rejected(rejected, reached),
        }
    }

    /// The device also controls the registers: they have the port's values or, in every other step,
    /// the values of the step.
    fn service<W: OracleChecked + Environment<Handle = H>>(
        &mut self,
        world: &mut W,
        step: Step,
        reached: OutcomeHook<'_>,
    ) {
        let registers = match step.a & 1 {
            0 => self.port.registers(),
            _ => AhciRegisters {
                active: step.c,
                failed: u32::from(step.b),
            },
        };
        let (driver, common) = (&mut self.driver, &mut self.common);
        let result = driver.complete(&mut world.api(), registers, |done| {
            common.done(done, reached);
        });
        if let Err(error) = result {
            reached(block_error(&error));
        }
        let api = world.api();
        let bits = self
            .driver
            .set_device_bits(ringfence_devices::api::DmaApi::memory(&api));
        bits.expect("memory is there");
    }

    fn claim(&self, _: Step) -> Option<(Iova, [u8; 16])> {
        None
    }

    fn work<W: OracleChecked + Environment<Handle = H>>(&mut self, world: &mut W) {
        let disk = &mut self.common.disk;
        let run = self.port.run(&mut world.bus(), disk, 4);
        run.expect("the received area is mapped");
    }

    fn doorbell(&mut self, value: u32) {
        self.port.issue(value);
    }

    fn out(&self) -> usize {
        self.common.pool.in_use()
    }

    fn close<W: OracleChecked + Environment<Handle = H>>(
        self,
        world: &mut W,
        reached: OutcomeHook<'_>,
    ) -> usize {
        let Self {
            mut common, driver, ..
        } = self;
        if driver.outstanding() > 0 {
            reached("closed with requests");
        }
        let mut back = Vec::new();
        let closed = driver.close(&mut world.api(), |buffer| back.push(buffer));
        closed.expect("closing does not ask the device");
        common.back(back);
        common.pool.in_use()
    }
}
