//! The function over memory and a file, without a client.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringfence_nvme_device::register;
use ringfence_vfio_user::{IrqAction, IrqData, SetIrqs};
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::{FileMedium, NvmeFunction, config};
use crate::counters::DeviceCounters;
use crate::dma::Direct;
use crate::dma_fault_injection::InjectedDma;
use crate::handover::HandOverFunction;
use crate::limits::GuestLimits;
use crate::server::PolledFunction;
use crate::session::{CONFIG_REGION, Function, MSIX_IRQ};
use crate::virtio::DmaInjector;
use crate::virtio::blk::Blk;

const BAR: u32 = 0;
const COMMAND: u64 = 4;
const MEMORY_AND_MASTER: [u8; 2] = [6, 0];
const BLOCKS: u64 = 4096;
const ADMIN_SQ: u64 = 0x1000;
const ADMIN_CQ: u64 = 0x2000;
const IO_SQ: u64 = 0x3000;
const IO_CQ: u64 = 0x4000;
const LIST: u64 = 0x5000;
const BUFFER: u64 = 0x10000;

struct Rig {
    function: NvmeFunction<Direct>,
    memory: GuestMemoryMmap,
    image: File,
    counters: Arc<DeviceCounters>,
}

/// Opcode, PRPs and dwords 10 to 12.
type Command = (u8, [u64; 2], [u32; 3]);

fn encode((opcode, prps, words): Command) -> [u8; 64] {
    let mut raw = [0; 64];
    (raw[0], raw[4]) = (opcode, 1);
    for (at, prp) in [24, 32].into_iter().zip(prps) {
        raw[at..at + 8].copy_from_slice(&prp.to_le_bytes());
    }
    for (at, word) in [40, 44, 48].into_iter().zip(words) {
        raw[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    raw
}

impl Rig {
    /// A bus master with queue pair 1 of 256 entries.
    fn new() -> Self {
        let mut image = tempfile::tempfile().unwrap();
        for block in 0..BLOCKS {
            image.write_all(&[block as u8; 512]).unwrap();
        }
        let counters = Arc::new(DeviceCounters::default());
        let disk = Blk::new(image.try_clone().unwrap(), false, Arc::clone(&counters)).unwrap();
        let config = config(&disk, &GuestLimits::default());
        let medium = FileMedium::new(&disk, Arc::clone(&counters)).unwrap();
        let known = Arc::clone(&counters);
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
        let mut rig = Self {
            function: NvmeFunction::new(&config, medium, Direct::default(), known),
            memory,
            image,
            counters,
        };
        rig.function.memory_changed(&rig.memory).unwrap();
        rig.set_master(&MEMORY_AND_MASTER);
        rig.write(register::AQA, &[7, 0, 7, 0]);
        rig.write(register::ASQ, &ADMIN_SQ.to_le_bytes());
        rig.write(register::ACQ, &ADMIN_CQ.to_le_bytes());
        rig.write(register::CC, &[1, 0, 0x46, 0]);
        rig.store(ADMIN_SQ, (5, [IO_CQ, 0], [0x00ff_0001, 0x0001_0003, 0]));
        rig.store(
            ADMIN_SQ + 64,
            (1, [IO_SQ, 0], [0x00ff_0001, 0x0001_0001, 0]),
        );
        rig.doorbell(0, 2);
        rig
    }

    fn set_master(&mut self, command: &[u8]) {
        let written = self.function.write(CONFIG_REGION, COMMAND, command);
        written.unwrap();
    }

    fn write(&mut self, register: u64, bytes: &[u8]) {
        self.function.write(BAR, register, bytes).unwrap();
    }

    fn status(&mut self) -> u32 {
        let mut bytes = [0; 4];
        let read = self.function.read(BAR, register::CSTS, &mut bytes);
        read.unwrap();
        u32::from_le_bytes(bytes)
    }

    fn store(&self, at: u64, command: Command) {
        let stored = self.memory.write_slice(&encode(command), GuestAddress(at));
        stored.unwrap();
    }

    /// Stores commands at the beginning of queue 1.
    fn offer(&self, commands: &[Command]) {
        for (at, command) in (IO_SQ..).step_by(64).zip(commands) {
            self.store(at, *command);
        }
    }

    fn doorbell(&mut self, index: u64, value: u32) {
        self.write(register::DOORBELLS + index * 4, &value.to_le_bytes());
    }

    /// The number of completions of queue 1, and the status of the last one.
    fn completed(&self) -> (usize, u16) {
        let entry = |at: u64| {
            self.memory
                .read_obj::<u16>(GuestAddress(IO_CQ + at * 16 + 14))
        };
        let fields = (0..256).map(|at| entry(at).unwrap());
        let fields: Vec<u16> = fields.take_while(|field| field & 1 == 1).collect();
        (
            fields.len(),
            fields.last().map_or(0, |field| field >> 1 & 0x7ff),
        )
    }

    fn bytes(&self, at: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.memory
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    }
}

const fn read(block: u32, prps: [u64; 2], blocks: u32) -> Command {
    (2, prps, [block, 0, blocks - 1])
}

#[test]
fn the_class_is_that_of_nvme() {
    let mut rig = Rig::new();
    let mut header = [0; 16];
    rig.function.read(CONFIG_REGION, 0, &mut header).unwrap();
    assert_eq!(header[9..12], [0x02, 0x08, 0x01]);
    // A vector for the admin queue and for each of 16 I/O queues.
    assert_eq!(rig.function.vectors(MSIX_IRQ), 17);
    let mut message_control = [0; 2];
    rig.function
        .read(CONFIG_REGION, 0x42, &mut message_control)
        .unwrap();
    assert_eq!(message_control, [16, 0]);
}

#[test]
fn blocks_reach_memory_and_the_file() {
    let mut rig = Rig::new();
    rig.memory
        .write_slice(&[0x77; 512], GuestAddress(BUFFER + 0x2000))
        .unwrap();
    rig.offer(&[
        read(9, [BUFFER, 0], 2),
        (1, [BUFFER + 0x2000, 0], [5, 0, 0]),
        (0, [0, 0], [0, 0, 0]),
    ]);
    rig.doorbell(2, 3);
    assert_eq!(rig.completed(), (3, 0));
    assert_eq!(rig.bytes(BUFFER, 1024), [[9; 512], [10; 512]].concat());
    let mut block = [0; 512];
    rig.image.read_exact_at(&mut block, 5 * 512).unwrap();
    assert_eq!(block, [0x77; 512]);
    let counters = &rig.counters;
    let counts = [&counters.requests, &counters.flushes, &counters.bytes_read];
    assert_eq!(counts.map(|count| count.get()), [3, 1, 1024]);
    assert_eq!(counters.bytes_written.get(), 512);
}

#[test]
fn without_bus_mastering_nothing_is_read_or_written() {
    let mut rig = Rig::new();
    let event = |rig: &mut Rig| {
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let request = SetIrqs {
            index: MSIX_IRQ,
            start: 1,
            count: 1,
            action: IrqAction::Trigger,
            data: IrqData::Events(vec![event.try_clone().unwrap()]),
        };
        rig.function.set_irqs(request).unwrap();
        event
    };
    let event: OwnedFd = event(&mut rig);
    let signalled = || rustix::io::read(&event, &mut [0; 8]).is_ok();
    rig.set_master(&[2, 0]);
    rig.offer(&[read(9, [BUFFER, 0], 1)]);
    rig.doorbell(2, 1);
    assert_eq!((rig.completed(), signalled()), ((0, 0), false));
    assert!(!rig.function.unfinished());
    // The doorbell is not lost.
    rig.set_master(&MEMORY_AND_MASTER);
    assert_eq!((rig.completed(), signalled()), ((1, 0), true));
    assert_eq!(rig.bytes(BUFFER, 512), [9; 512]);
}

/// A turn ends after 1 MiB; the rest follows without a doorbell.
#[test]
fn a_turn_is_bounded() {
    let mut rig = Rig::new();
    let pages: Vec<u64> = (0..127).map(|page| BUFFER + page * 0x1000).collect();
    for (at, page) in (LIST..).step_by(8).zip(&pages) {
        rig.memory.write_obj(*page, GuestAddress(at)).unwrap();
    }
    // 512 KiB each.
    rig.offer(&[read(0, [BUFFER, LIST], 1024); 5]);
    rig.doorbell(2, 5);
    assert_eq!(rig.completed(), (2, 0));
    assert!(rig.function.unfinished());
    rig.function.continue_work();
    assert_eq!(rig.completed(), (4, 0));
    rig.function.continue_work();
    assert_eq!(rig.completed(), (5, 0));
    assert!(!rig.function.unfinished());
}

#[test]
fn a_queue_out_of_memory_is_logged_once() {
    let mut rig = Rig::new();
    let far = 1 << 40;
    rig.store(ADMIN_SQ + 128, (5, [far, 0], [0x00ff_0002, 0x0002_0003, 0]));
    rig.store(ADMIN_SQ + 192, (1, [far, 0], [0x00ff_0002, 0x0002_0001, 0]));
    rig.doorbell(0, 4);
    rig.doorbell(4, 1);
    assert_eq!(rig.status(), 0b11);
    let failure = rig.function.take_failure().map(|error| error.to_string());
    let expected = "submission queue 2: no access to 0x10000000000";
    assert_eq!(failure.as_deref(), Some(expected));
    assert!(rig.function.take_failure().is_none());
    assert_eq!(rig.counters.broken_queues.get(), 1);
}

#[test]
fn a_reset_returns_to_power_on() {
    let mut rig = Rig::new();
    rig.function.reset().unwrap();
    assert_eq!(rig.status(), 0);
    let mut command = [0; 2];
    rig.function
        .read(CONFIG_REGION, COMMAND, &mut command)
        .unwrap();
    assert_eq!(command, [0, 0]);
    rig.set_master(&MEMORY_AND_MASTER);
    rig.offer(&[read(9, [BUFFER, 0], 1)]);
    rig.doorbell(2, 1);
    assert_eq!(rig.completed().0, 0);
}

#[test]
fn a_delayed_disk_waits_for_its_timer() {
    let mut rig = Rig::new();
    rig.function.delay(Duration::from_secs(3600)).unwrap();
    assert!(rig.function.waits_for().is_none());
    rig.offer(&[read(9, [BUFFER, 0], 1)]);
    rig.doorbell(2, 1);
    assert_eq!(rig.completed().0, 0);
    assert!(rig.function.waits_for().is_some());
    rig.function.on_ready();
    assert_eq!(rig.completed(), (1, 0));
    assert!(rig.function.waits_for().is_none());
}

/// A driver that writes another register during the delay does not end it.
#[test]
fn no_register_write_ends_a_delay() {
    let mut rig = Rig::new();
    rig.function.delay(Duration::from_secs(3600)).unwrap();
    rig.offer(&[read(9, [BUFFER, 0], 1)]);
    rig.doorbell(2, 1);
    rig.write(register::ASQ, &ADMIN_SQ.to_le_bytes());
    rig.set_master(&[2, 0]);
    rig.set_master(&MEMORY_AND_MASTER);
    assert_eq!(rig.completed().0, 0);
    rig.function.on_ready();
    assert_eq!(rig.completed(), (1, 0));
}

/// The rest of a turn waits with the commands of a new doorbell, and the server does not poll.
#[test]
fn the_rest_of_a_turn_waits_for_the_delay() {
    let mut rig = Rig::new();
    let pages: Vec<u64> = (0..127).map(|page| BUFFER + page * 0x1000).collect();
    for (at, page) in (LIST..).step_by(8).zip(&pages) {
        rig.memory.write_obj(*page, GuestAddress(at)).unwrap();
    }
    rig.offer(&[read(0, [BUFFER, LIST], 1024); 4]);
    rig.doorbell(2, 3);
    assert_eq!(rig.completed(), (2, 0));
    assert!(rig.function.unfinished());
    rig.function.delay(Duration::from_secs(3600)).unwrap();
    rig.doorbell(2, 4);
    assert!(!rig.function.unfinished());
    rig.function.continue_work();
    assert_eq!(rig.completed(), (2, 0));
    rig.function.on_ready();
    assert_eq!(rig.completed(), (4, 0));
}

#[test]
fn a_timer_that_fails_delays_nothing_and_is_logged() {
    let mut rig = Rig::new();
    rig.function.delay(Duration::MAX).unwrap();
    rig.offer(&[read(9, [BUFFER, 0], 1)]);
    rig.doorbell(2, 1);
    assert_eq!(rig.completed(), (1, 0));
    let failure = rig.function.take_failure().map(|error| error.to_string());
    let expected = "cannot delay commands: invalid input parameter";
    assert_eq!(failure.as_deref(), Some(expected));
}

#[test]
fn the_injector_sees_the_buffers() {
    let mut rig = Rig::new();
    let results = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&results);
    let classes = [InjectedDma::WriteReadOnly, InjectedDma::ReadWriteOnly];
    let tell = move |result: &crate::dma_fault_injection::InjectionResult| {
        told.lock()
            .unwrap()
            .push((result.injected, result.iova.get()));
    };
    let counters = Arc::clone(&rig.counters);
    rig.function
        .inject_dma(DmaInjector::new(&classes, None, tell, counters));
    rig.offer(&[
        read(9, [BUFFER, 0], 1),
        (1, [BUFFER + 0x2000, 0], [5, 0, 0]),
    ]);
    rig.doorbell(2, 2);
    let expected = [
        (InjectedDma::ReadWriteOnly, BUFFER),
        (InjectedDma::WriteReadOnly, BUFFER + 0x2000),
    ];
    assert_eq!(*results.lock().unwrap(), expected);
    assert_eq!(rig.counters.injected_permitted.get(), 2);
}

#[test]
fn transfers_have_the_limit_of_requests() {
    let mut rig = Rig::new();
    let disk = Blk::new(rig.image.try_clone().unwrap(), true, Arc::default()).unwrap();
    for (request_bytes, shift) in [
        (4096, 1),
        (8192, 1),
        (65536, 4),
        (100_000, 4),
        (16 << 20, 8),
    ] {
        let limits = GuestLimits {
            request_bytes,
            ..GuestLimits::default()
        };
        let config = config(&disk, &limits);
        assert_eq!(config.transfer_shift, shift, "{request_bytes}");
        assert_eq!((config.blocks, config.read_only), (BLOCKS, true));
    }
    assert_eq!(rig.status(), 1);
}

#[test]
fn a_hand_over_is_refused() {
    let why = Rig::new().function.saved().unwrap_err().to_string();
    assert_eq!(why, "cannot hand over an NVMe disk");
}
