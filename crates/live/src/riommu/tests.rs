//! The function and the devices behind it, without a client.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_riommu_device::{FaultEntry, InvalidateScope, InvalidateWord, register};
use ringfence_types::{RequesterId, RingId};
use ringfence_vfio_user::{IrqAction, IrqData, SetIrqs};
use rustix::event::{EventfdFlags, eventfd};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

use super::{RingDma, RingIommu, RiommuFunction};
use crate::counters::DeviceCounters;
use crate::dma::Dma;
use crate::handover::{DeviceState, FunctionState, HandOverFunction};
use crate::server::PolledFunction;
use crate::session::{CONFIG_REGION, Function, FunctionError, MSIX_IRQ};

/// Device 4, function 0 of bus 0.
const DISK: RequesterId = RequesterId::new(0x20);
const BAR: u32 = 0;
const COMMAND: u64 = 4;
const MEMORY_AND_MASTER: [u8; 2] = [6, 0];

const ROOT: u64 = 0x1000;
const CONTEXTS: u64 = 0x2000;
const DEVICE: u64 = 0x3000;
const RINGS: u64 = 0x3010;
const TABLE: u64 = 0x4000;
const QUEUE: u64 = 0x5000;
const BUFFER: u64 = 0x8123;

const READ: u64 = 1 << 30;
const WRITE: u64 = 1 << 31;
const VALID: u64 = 1 << 32;

struct Rig {
    function: RiommuFunction,
    disk: RingDma,
    disk_counters: Arc<DeviceCounters>,
    memory: GuestMemoryMmap,
    iommu: Arc<DeviceCounters>,
}

impl Rig {
    /// Tables with one ring, whose slot 0 is `BUFFER` of 100 bytes; the IOMMU is not started.
    fn new() -> Self {
        let counters = Arc::new(DeviceCounters::default());
        let iommu = RingIommu::new(&[DISK], Arc::clone(&counters)).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[
            (GuestAddress(0), 0x9000),
            // Adjacent, but another mapping.
            (GuestAddress(0x9000), 0x1000),
        ]);
        let disk_counters: Arc<DeviceCounters> = Arc::default();
        let mut rig = Self {
            disk: iommu.endpoint(DISK, Arc::clone(&disk_counters)).unwrap(),
            disk_counters,
            function: RiommuFunction::new(iommu),
            memory: memory.unwrap(),
            iommu: counters,
        };
        rig.store(ROOT, [CONTEXTS | 1, 0]);
        let context = CONTEXTS + u64::from(DISK.get()) * 16;
        rig.store(context, [DEVICE | 0xd, 1 << 8]);
        rig.store(DEVICE, [RINGS, 1]);
        rig.store(RINGS, [TABLE, 16]);
        rig.map(BUFFER, 100, READ | WRITE);
        rig.function.memory_changed(&rig.memory).unwrap();
        rig
    }

    fn started() -> Self {
        let mut rig = Self::new();
        rig.set_master(&MEMORY_AND_MASTER);
        rig.write(register::ROOT, &ROOT.to_le_bytes());
        rig.write(register::FQ, &(QUEUE | 4).to_le_bytes());
        rig.write(register::CTRL, &[7, 0, 0, 0]);
        rig
    }

    fn store(&self, at: u64, words: [u64; 2]) {
        for (at, word) in (at..).step_by(8).zip(words) {
            self.memory.write_obj(word, GuestAddress(at)).unwrap();
        }
    }

    fn map(&self, buffer: u64, bytes: u64, direction: u64) {
        self.store(TABLE, [buffer, bytes | direction | VALID]);
    }

    fn write(&mut self, register: u64, bytes: &[u8]) {
        self.function.write(BAR, register, bytes).unwrap();
    }

    fn read(&mut self, register: u64) -> u32 {
        let mut bytes = [0; 4];
        self.function.read(BAR, register, &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    fn set_master(&mut self, command: &[u8]) {
        self.function
            .write(CONFIG_REGION, COMMAND, command)
            .unwrap();
    }

    fn interrupts(&mut self, event: &OwnedFd) {
        let request = SetIrqs {
            index: MSIX_IRQ,
            start: 0,
            count: 1,
            action: IrqAction::Trigger,
            data: IrqData::Events(vec![event.try_clone().unwrap()]),
        };
        self.function.set_irqs(request).unwrap();
    }

    fn disk_writes(&mut self, iova: u64, bytes: &[u8]) -> bool {
        let at = GuestAddress(iova);
        self.disk.with(|view| view.write_slice(bytes, at).is_ok())
    }

    fn disk_reads(&mut self, iova: u64, bytes: usize) -> Option<Vec<u8>> {
        let mut read = vec![0; bytes];
        let at = GuestAddress(iova);
        let reached = self
            .disk
            .with(|view| view.read_slice(&mut read, at).is_ok());
        reached.then_some(read)
    }
}

#[test]
fn a_device_reaches_the_bytes_of_its_buffer() {
    let mut rig = Rig::started();
    assert!(rig.disk_writes(10, b"hello"));
    let mut stored = [0; 5];
    let at = GuestAddress(BUFFER + 10);
    rig.memory.read_slice(&mut stored, at).unwrap();
    assert_eq!(&stored, b"hello");
    assert_eq!(rig.disk_reads(10, 5).as_deref(), Some(&b"hello"[..]));
    // The last byte is inside, the next one is not.
    assert!(rig.disk_writes(99, b"x"));
    assert!(!rig.disk_writes(99, b"xy"));
    assert_eq!(rig.iommu.faults.get(), 1);
    rig.map(BUFFER, 100, READ);
    let word = InvalidateWord::new(InvalidateScope::Ring(DISK, RingId::new(0)));
    rig.write(register::INV, &word.get().to_le_bytes());
    assert!(!rig.disk_writes(0, b"x"));
    assert!(rig.disk_reads(0, 1).is_some());
}

/// An access in both directions needs both permissions, and one without a direction fails.
#[test]
fn an_access_needs_permission_for_each_direction() {
    let mut rig = Rig::started();
    let cases = [
        (READ, [true, false, false]),
        (WRITE, [false, true, false]),
        (READ | WRITE, [true, true, true]),
    ];
    let wanted = [
        Permissions::Read,
        Permissions::Write,
        Permissions::ReadWrite,
    ];
    for (direction, allowed) in cases {
        rig.map(BUFFER, 100, direction);
        let word = InvalidateWord::new(InvalidateScope::All);
        rig.write(register::INV, &word.get().to_le_bytes());
        let mut reaches = |bytes, wanted| {
            let at = GuestAddress(0);
            rig.disk.with(|view| view.check_range(at, bytes, wanted))
        };
        assert_eq!(wanted.map(|wanted| reaches(8, wanted)), allowed);
        assert!(!reaches(8, Permissions::No));
        assert!(reaches(0, Permissions::ReadWrite), "no bytes");
    }
}

/// A buffer whose pages lie in two mappings of the client.
#[test]
fn a_buffer_may_span_mappings() {
    let mut rig = Rig::started();
    rig.map(0x8ff0, 0x20, READ | WRITE);
    let written: Vec<u8> = (0..0x20).collect();
    assert!(rig.disk_writes(0, &written));
    assert_eq!(rig.disk_reads(0, 0x20), Some(written));
}

#[test]
fn without_bus_master_the_iommu_reads_no_table() {
    let mut rig = Rig::started();
    assert!(rig.disk_writes(0, b"x"));
    rig.set_master(&[2, 0]);
    assert!(!rig.disk_writes(0, b"x"));
    // It records no fault either: the queue lies in memory.
    assert_eq!(rig.read(register::FQ_TAIL), 0);
    rig.set_master(&MEMORY_AND_MASTER);
    assert!(rig.disk_writes(0, b"x"));
}

/// While the IOMMU was no bus master, the driver may have changed the tables.
#[test]
fn bus_mastering_begins_without_cached_entries() {
    let mut rig = Rig::started();
    assert!(rig.disk_writes(0, b"x"));
    rig.set_master(&[2, 0]);
    rig.store(TABLE, [BUFFER, 0]);
    rig.set_master(&MEMORY_AND_MASTER);
    assert!(!rig.disk_writes(0, b"x"));
}

#[test]
fn a_stale_entry_is_used_until_the_invalidation_only() {
    let mut rig = Rig::started();
    assert!(rig.disk_writes(0, b"x"));
    rig.store(TABLE, [BUFFER, 0]);
    assert!(rig.disk_writes(0, b"x"), "cached");
    let word = InvalidateWord::new(InvalidateScope::Ring(DISK, RingId::new(0)));
    rig.write(register::INV, &word.get().to_le_bytes());
    assert!(!rig.disk_writes(0, b"x"));
    assert_eq!(rig.iommu.unit_invalidations.get(), 1);
}

/// The oracle counts what a cached entry permits after its slot was cleared, by device and
/// direction, and changes no decision.
#[test]
fn accesses_after_a_clear_are_counted() {
    let mut rig = Rig::started();
    let counted = |rig: &Rig| {
        let counters = &rig.disk_counters;
        (
            counters.reads_after_clear.get(),
            counters.writes_after_clear.get(),
        )
    };
    assert!(rig.disk_writes(0, b"x"), "walked");
    assert!(rig.disk_writes(0, b"x"), "cached and mapped");
    assert_eq!(counted(&rig), (0, 0));
    rig.store(TABLE, [BUFFER, 0]);
    assert!(rig.disk_writes(0, b"x"));
    assert!(rig.disk_reads(0, 1).is_some());
    assert!(rig.disk_reads(99, 1).is_some());
    assert_eq!(counted(&rig), (2, 1));
    // Outside the cached buffer: stopped, and not counted.
    assert!(!rig.disk_writes(99, b"xy"));
    // Another buffer in the slot.
    rig.map(0x8200, 100, READ | WRITE);
    assert!(rig.disk_reads(0, 1).is_some());
    assert_eq!(counted(&rig), (3, 1));
    // The same buffer again.
    rig.map(BUFFER, 100, READ | WRITE);
    assert!(rig.disk_reads(0, 1).is_some());
    assert_eq!(counted(&rig), (3, 1));
    rig.store(TABLE, [BUFFER, 0]);
    let word = InvalidateWord::new(InvalidateScope::Ring(DISK, RingId::new(0)));
    rig.write(register::INV, &word.get().to_le_bytes());
    assert!(!rig.disk_writes(0, b"x"));
    assert_eq!(counted(&rig), (3, 1));
    let before = rig.iommu.reads_after_clear.get() + rig.iommu.writes_after_clear.get();
    assert_eq!(before, 0, "counted for the device that accessed");
}

/// The unit has read the next slot in advance: no walk sees that the driver clears it.
#[test]
fn accesses_by_a_prefetched_slot_after_its_clear_are_counted() {
    let mut rig = Rig::started();
    let next = 0x8200;
    rig.store(TABLE + 16, [next, 100 | READ | VALID]);
    assert!(rig.disk_writes(0, b"x"));
    rig.store(TABLE + 16, [next, 0]);
    assert!(rig.disk_reads(1 << 30, 1).is_some(), "prefetched");
    assert_eq!(rig.disk_counters.reads_after_clear.get(), 1);
}

#[test]
fn other_memory_and_a_reset_drop_cached_entries() {
    let mut rig = Rig::started();
    assert!(rig.disk_writes(0, b"x"));
    rig.store(TABLE, [BUFFER, 0]);
    let memory = rig.memory.clone();
    rig.function.memory_changed(&memory).unwrap();
    assert!(!rig.disk_writes(0, b"x"));

    let mut rig = Rig::started();
    assert!(rig.disk_writes(0, b"x"));
    rig.function.reset().unwrap();
    assert!(!rig.disk_writes(0, b"x"));
    assert_eq!(rig.read(register::CTRL), 0);
}

/// A fault of the disk's thread wakes the IOMMU's thread, which sends the interrupt.
#[test]
fn faults_are_queued_and_interrupt_once() {
    let mut rig = Rig::started();
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    rig.interrupts(&event);
    let raised = |event| rustix::io::read(event, &mut [0; 8]).is_ok();
    for _ in 0..3 {
        assert!(!rig.disk_writes(1 << 30, b"x"));
    }
    assert!(!raised(&event));
    assert_eq!(rig.iommu.faults.get(), 3);
    assert!(rig.function.waits_for().is_some());
    rig.function.on_ready();
    assert!(raised(&event));
    assert_eq!(rig.iommu.interrupts.get(), 1);
    assert_eq!(rig.read(register::FQ_TAIL), 3);
    let words = [0, 8].map(|at| rig.memory.read_obj(GuestAddress(QUEUE + at)).unwrap());
    let entry = FaultEntry::from_words(words);
    assert_eq!((entry.device(), entry.iova().get()), (DISK, 1 << 30));
    // The driver has read one of three: the write itself raises the interrupt again.
    rig.write(register::FQ_HEAD, &[1, 0, 0, 0]);
    assert!(raised(&event));
    rig.write(register::FQ_HEAD, &[3, 0, 0, 0]);
    assert!(!raised(&event));
}

/// The driver writes FQ_HEAD only after an interrupt, so none may be lost.
#[test]
fn an_interrupt_waits_for_bus_mastering() {
    let mut rig = Rig::started();
    assert!(!rig.disk_writes(1 << 30, b"x"));
    rig.set_master(&[2, 0]);
    rig.function.on_ready();
    assert_eq!(rig.iommu.interrupts.get(), 0);
    rig.set_master(&MEMORY_AND_MASTER);
    assert_eq!(rig.iommu.interrupts.get(), 1);
    rig.set_master(&MEMORY_AND_MASTER);
    assert_eq!(rig.iommu.interrupts.get(), 1);
}

#[test]
fn accesses_outside_a_region_are_refused() {
    let mut rig = Rig::started();
    let sizes = [(CONFIG_REGION, 256), (BAR, 0x4000), (1, 0)];
    for (region, bytes) in sizes {
        assert_eq!(rig.function.region(region).bytes, bytes);
        for offset in [bytes.saturating_sub(3), bytes, u64::MAX] {
            let read = rig.function.read(region, offset, &mut [0; 4]);
            let outside = FunctionError::OutsideRegion {
                region,
                offset,
                bytes: 4,
            };
            assert_eq!(read, Err(outside));
            assert_eq!(rig.function.write(region, offset, &[0; 4]), Err(outside));
        }
    }
    // Larger than any register.
    rig.write(0, &[0xff; 64]);
    let mut all = [0xff; 64];
    rig.function.read(BAR, 0, &mut all).unwrap();
    assert_eq!(all, [0; 64]);
}

/// Hands the function over as a second process restores it, without a client's session.
fn handed_over(rig: &mut Rig) {
    let (FunctionState::Plain(registers), DeviceState::Ring(state)) = rig.function.saved().unwrap()
    else {
        panic!("a ring IOMMU");
    };
    let counters: Arc<DeviceCounters> = Arc::default();
    let iommu = RingIommu::new(&[DISK], Arc::clone(&counters)).unwrap();
    rig.disk = iommu.endpoint(DISK, Arc::default()).unwrap();
    rig.function = RiommuFunction::new(iommu);
    rig.function.restore(registers, &state).unwrap();
    rig.function.memory_changed(&rig.memory).unwrap();
    rig.iommu = counters;
}

/// A fault has woken the first process' thread, which has sent no interrupt yet.
#[test]
fn a_second_process_sends_the_interrupt_that_is_due() {
    let mut rig = Rig::started();
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    rig.interrupts(&event);
    assert!(!rig.disk_writes(1 << 30, b"x"));
    for bus_master in [true, false] {
        if !bus_master {
            rig.set_master(&[2, 0]);
            rig.function.on_ready();
        }
        handed_over(&mut rig);
        assert!(rig.function.iommu.has_interrupt());
    }
    rig.function.on_ready();
    assert!(
        rustix::io::read(&event, &mut [0; 8]).is_err(),
        "no bus master"
    );
    rig.set_master(&MEMORY_AND_MASTER);
    assert!(rustix::io::read(&event, &mut [0; 8]).is_ok());
    assert_eq!(rig.read(register::FQ_TAIL), 1);
    handed_over(&mut rig);
    assert!(!rig.function.iommu.has_interrupt(), "it was sent");
    // No further one until the driver has read the queue.
    assert!(!rig.disk_writes(1 << 30, b"x"));
    assert!(!rig.function.iommu.has_interrupt());
}

#[test]
fn a_second_process_has_the_registers_and_no_cached_entry() {
    let mut rig = Rig::started();
    assert!(rig.disk_writes(0, b"x"));
    handed_over(&mut rig);
    assert!(rig.disk_writes(0, b"x"));
    rig.store(TABLE, [BUFFER, 0]);
    handed_over(&mut rig);
    assert!(!rig.disk_writes(0, b"x"));
    rig.map(BUFFER, 100, READ | WRITE);
    rig.set_master(&[2, 0]);
    handed_over(&mut rig);
    assert!(!rig.disk_writes(0, b"x"), "no bus master");
}

#[test]
fn a_device_that_is_not_listed_is_refused() {
    let iommu = RingIommu::new(&[DISK], Arc::default()).unwrap();
    assert!(
        iommu
            .endpoint(RequesterId::new(0x28), Arc::default())
            .is_none()
    );
}
