//! The order of stores into contexts, and the ids under which units cache.

mod common;

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use common::cache::Entry;
use common::{
    BASE, FIRST, MSI_FLAT, Machine, Model, OTHER, device, domain, first, map, options, start, table,
};
use ringfence_memory::Arena;
use ringfence_memory::fake::NonCoherent;
use ringfence_pgtable::{Coherency, Levels};
use ringfence_riscv_iommu::{Options, Privilege, ProcessBits, Translation, Unit, UnitError};
use ringfence_types::{Invalidation, Invalidator, MemoryError, PhysAddr, PhysMemory, TABLE_WORDS};

const CAPABILITIES: u64 = BASE | MSI_FLAT;

/// Memory that notes a look-up of a field of an entry while V is set.
struct Watched<'a> {
    memory: &'a Arena,
    /// First byte of the entry and its size.
    entry: Cell<(u64, u64)>,
    is_misused: Cell<bool>,
    look_ups: Cell<u32>,
}

impl PhysMemory for Watched<'_> {
    fn word(&self, at: PhysAddr) -> Result<&AtomicU64, MemoryError> {
        let (entry, bytes) = self.entry.get();
        if at.get() > entry && at.get() < entry + bytes {
            self.look_ups.set(self.look_ups.get() + 1);
            let first = self.memory.word(PhysAddr::new(entry))?;
            if first.load(Ordering::SeqCst) & 1 != 0 {
                self.is_misused.set(true);
            }
        }
        self.memory.word(at)
    }

    fn table(&self, at: PhysAddr) -> Result<&[AtomicU64; TABLE_WORDS], MemoryError> {
        self.memory.table(at)
    }

    fn words(&self, at: PhysAddr, count: usize) -> Result<&[AtomicU64], MemoryError> {
        self.memory.words(at, count)
    }

    fn write_back(&self, _at: PhysAddr, _bytes: u64) {}

    fn drain(&self) {}
}

#[test]
fn fields_change_only_while_the_entry_is_not_valid() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let memory = Watched {
        memory: &machine.memory,
        entry: Cell::new((0, 0)),
        is_misused: Cell::new(false),
        look_ups: Cell::new(0),
    };
    let options = Options {
        device_id_bits: 6,
        ..options()
    };
    let mut unit = Unit::new(&model, &memory, &frames, options).unwrap();
    let ddt = model.state.borrow().ddtp >> 10 << 12;
    memory.entry.set((ddt + 9 * 64, 64));
    let processes = Translation::Processes(ProcessBits::Eight);
    for translation in [
        first(FIRST),
        Translation::PassThrough,
        first(OTHER),
        processes,
    ] {
        unit.attach(&frames, device(9), domain(1), &translation)
            .unwrap();
    }
    assert_eq!(memory.look_ups.get(), 4 * 6);
    let pdt = machine.word(ddt + 9 * 64 + 24) << 12 & 0xff_ffff_ffff;
    memory.entry.set((pdt + 3 * 16, 16));
    for root in [FIRST, OTHER] {
        let root = table(root, Levels::Three);
        unit.attach_process(&frames, device(9), 3, domain(1), root, Privilege::User)
            .unwrap();
        unit.detach_process(&frames, device(9), 3).unwrap();
    }
    assert_eq!(memory.look_ups.get(), 4 * 6 + 2);
    assert!(!memory.is_misused.get());
}

#[test]
fn an_unused_domain_id_is_emptied_before_its_use() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    map(&machine, FIRST, 0x5000, 0x77_7000);
    let stale = |guest, space| Entry {
        guest,
        space,
        page: 5,
        guest_page: 7,
        target: 0xbad,
    };
    let leave_entries = || {
        model.state.borrow_mut().caches.entries = vec![
            stale(None, Some(1)),
            stale(Some(1), None),
            stale(Some(1), Some(9)),
            stale(None, Some(2)),
        ];
    };
    leave_entries();
    unit.attach(&frames, device(9), domain(1), &first(FIRST))
        .unwrap();
    let entries = || model.state.borrow().caches.entries.clone();
    assert_eq!(entries(), [stale(None, Some(2))]);
    assert_eq!(model.read(9, None, 0x5000), Ok(0x77_7000));
    let processes = Translation::Processes(ProcessBits::Eight);
    unit.attach(&frames, device(9), domain(0), &processes)
        .unwrap();
    leave_entries();
    let root = table(FIRST, Levels::Three);
    unit.attach_process(&frames, device(9), 0, domain(1), root, Privilege::User)
        .unwrap();
    assert_eq!(entries(), [stale(None, Some(2))]);
}

#[test]
fn the_segment_is_part_of_the_device_id() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let options = |device_id_bits| Options {
        device_id_bits,
        segment: 2,
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options(24));
    assert_eq!(unit.device_id(device(0x1234)), Ok(0x2_1234));
    unit.pass_through(&frames, device(0x1234)).unwrap();
    assert_eq!(model.read(0x2_1234, None, 0x5000), Ok(0x5000));
    assert_eq!(model.read(0x1234, None, 0x5000), Err(258));
    unit.disable(&frames).map_err(|(_, error)| error).unwrap();
    // The segment needs a larger directory than the option alone.
    for bits in [0, 15, 16] {
        let mut unit = start(&machine, &model, &frames, options(bits));
        assert_eq!(unit.device_id_bits(), 24);
        unit.pass_through(&frames, device(9)).unwrap();
        assert_eq!(model.read(0x2_0009, None, 0x5000), Ok(0x5000));
        unit.disable(&frames).map_err(|(_, error)| error).unwrap();
    }
    // Within the options, a directory may still not reach every requester ID of segment 0.
    let small = Options {
        segment: 0,
        ..options(15)
    };
    let mut unit = start(&machine, &model, &frames, small);
    let far = device(0x8000);
    let beyond = UnitError::DeviceBeyondDirectory { device: far };
    assert_eq!(unit.pass_through(&frames, far), Err(beyond));
}

/// The unit does not snoop: entries and commands reach memory before the doorbell.
#[test]
fn entries_and_commands_are_written_back() {
    let (processors, devices) = (Machine::new(), Machine::new());
    // The frames hold other bytes in memory than the zeroes in the caches.
    for frame in 0..32 {
        for word in 0..512 {
            devices.set((1 << 20) + frame * 4096 + word * 8, u64::MAX);
        }
    }
    let memory = NonCoherent::new(&processors.memory, &devices.memory);
    let mut model = Model::new(&devices.memory, CAPABILITIES);
    model.mirror = Some(&processors.memory);
    let frames = processors.frames();
    let options = Options {
        coherency: Coherency::NonCoherent,
        ..options()
    };
    let mut unit = Unit::new(&model, &memory, &frames, options).unwrap();
    map(&devices, FIRST, 0x5000, 0x77_7000);
    let read = |process| model.read(9, process, 0x5000);
    unit.attach(&frames, device(9), domain(1), &first(FIRST))
        .unwrap();
    assert_eq!(read(None), Ok(0x77_7000));
    assert_eq!(model.read(0x1009, None, 0x5000), Err(258));
    let ticket = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    unit.detach(&frames, device(9)).unwrap();
    assert_eq!(read(None), Err(258));
    let processes = Translation::Processes(ProcessBits::Seventeen);
    unit.attach(&frames, device(9), domain(0), &processes)
        .unwrap();
    let root = table(FIRST, Levels::Three);
    unit.attach_process(&frames, device(9), 0x300, domain(1), root, Privilege::User)
        .unwrap();
    assert_eq!(
        (read(Some(0x300)), read(Some(0x301))),
        (Ok(0x77_7000), Err(266))
    );
    unit.detach_process(&frames, device(9), 0x300).unwrap();
    assert_eq!(read(Some(0x300)), Err(266));
}
