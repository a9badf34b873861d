//! The start of a unit, and the reasons why it fails.

mod common;

use common::model::PQ;
use common::{ATS, BASE, Behaviour, END, MSI_FLAT, Machine, Model, device, options, start};
use ringfence_memory::fake::FaultyFrames;
use ringfence_pgtable::TableError;
use ringfence_riscv_iommu::{Feature, Interrupts, Options, Register, Unit, UnitError};
use ringfence_types::InvalidationError;

const CAPABILITIES: u64 = BASE | MSI_FLAT;
/// IGS: interrupts by wire only.
const WIRES: u64 = 1 << 28;

#[test]
fn a_unit_that_cannot_start_leaves_no_frames() {
    let rejected = |register| UnitError::Rejected { register };
    let timed_out = |register| UnitError::TimedOut { register };
    let unsupported = UnitError::Unsupported;
    let plain = options();
    let with = |change: fn(&mut Options)| {
        let mut options = plain;
        change(&mut options);
        options
    };
    type Prepare = fn(&mut common::model::State);
    let cases: [(u64, Prepare, Options, UnitError); 20] = [
        (
            CAPABILITIES,
            |s| s.behaviour = Behaviour::Absent,
            plain,
            UnitError::Absent,
        ),
        (0x20, |_| (), plain, UnitError::UnsupportedVersion(0x20)),
        (0, |_| (), plain, UnitError::UnsupportedVersion(0)),
        (
            CAPABILITIES,
            |s| s.fctl = 1,
            plain,
            unsupported(Feature::LittleEndian),
        ),
        (
            CAPABILITIES,
            |s| s.fctl = 4,
            plain,
            unsupported(Feature::Gxl64),
        ),
        (
            CAPABILITIES,
            |s| s.behaviour = Behaviour::Stuck,
            plain,
            UnitError::Invalidation(InvalidationError::TimedOut),
        ),
        (
            CAPABILITIES,
            |s| s.behaviour = Behaviour::CannotRead,
            plain,
            UnitError::Invalidation(InvalidationError::Failed),
        ),
        (
            CAPABILITIES,
            |s| s.behaviour = Behaviour::Off(72),
            plain,
            timed_out(Register::Cqcsr),
        ),
        (
            CAPABILITIES,
            |s| s.behaviour = Behaviour::Off(76),
            plain,
            timed_out(Register::Fqcsr),
        ),
        (
            CAPABILITIES,
            |s| s.behaviour = Behaviour::Busy(72),
            plain,
            timed_out(Register::Cqcsr),
        ),
        (
            CAPABILITIES,
            |s| s.behaviour = Behaviour::Busy(16),
            plain,
            timed_out(Register::Ddtp),
        ),
        (
            CAPABILITIES,
            |s| s.modes = 0b11,
            plain,
            rejected(Register::Ddtp),
        ),
        (
            CAPABILITIES,
            |_| (),
            with(|o| o.device_id_bits = 25),
            UnitError::DirectoryBits { bits: 25 },
        ),
        (
            CAPABILITIES & !MSI_FLAT,
            |_| (),
            with(|o| (o.device_id_bits, o.segment) = (25, 1)),
            UnitError::DirectoryBits { bits: 25 },
        ),
        // WSI does not stick. The queue's base does not stick.
        (
            CAPABILITIES | WIRES,
            |_| (),
            with(|o| o.interrupts = Interrupts::Wired),
            rejected(Register::Fctl),
        ),
        (
            CAPABILITIES,
            |s| s.behaviour = Behaviour::KeepsBase(0),
            plain,
            rejected(Register::Cqb),
        ),
        (
            CAPABILITIES,
            |s| s.behaviour = Behaviour::KeepsBase(1),
            plain,
            rejected(Register::Fqb),
        ),
        (
            CAPABILITIES,
            |_| (),
            with(|o| o.command_entries = 8),
            UnitError::QueueEntries { entries: 8 },
        ),
        (
            CAPABILITIES,
            |_| (),
            with(|o| o.fault_entries = 256),
            UnitError::QueueEntries { entries: 256 },
        ),
        (
            CAPABILITIES,
            |_| (),
            with(|o| o.page_request_entries = Some(4)),
            unsupported(Feature::Ats),
        ),
    ];
    for (capabilities, prepare, options, expected) in cases {
        let machine = Machine::new();
        let model = Model::new(&machine.memory, capabilities);
        prepare(&mut model.state.borrow_mut());
        let frames = machine.frames();
        let found = Unit::new(&model, &machine.memory, &frames, options).map(drop);
        assert_eq!(found, Err(expected));
        assert_eq!(frames.in_use(), 0, "{expected}");
        assert!(!expected.to_string().is_empty());
    }
    for (capabilities, interrupts, feature) in [
        (CAPABILITIES, Interrupts::Wired, Feature::WiredInterrupts),
        (
            CAPABILITIES | WIRES,
            Interrupts::Messages,
            Feature::MessageInterrupts,
        ),
    ] {
        let options = Options {
            interrupts,
            ..plain
        };
        let machine = Machine::new();
        let model = Model::new(&machine.memory, capabilities);
        let found = Unit::new(&model, &machine.memory, &machine.frames(), options).map(drop);
        assert_eq!(found, Err(unsupported(feature)));
    }
}

/// Options that no mode of the unit satisfies are found before the unit is reset.
#[test]
fn a_refused_option_leaves_the_unit_running() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    model.state.borrow_mut().ddtp = 0x9999 << 10 | 4;
    let options = Options {
        device_id_bits: 25,
        ..options()
    };
    let found = Unit::new(&model, &machine.memory, &machine.frames(), options).map(drop);
    assert_eq!(found, Err(UnitError::DirectoryBits { bits: 25 }));
    assert_eq!(model.state.borrow().ddtp, 0x9999 << 10 | 4);
}

#[test]
fn frames_run_out_without_a_leak_at_the_start() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES | ATS);
    let source = machine.frames();
    let frames = FaultyFrames::new(&source);
    let options = Options {
        page_request_entries: Some(4),
        ..options()
    };
    for count in 0..5 {
        frames.fail_after(count);
        let found = Unit::new(&model, &machine.memory, &frames, options).map(drop);
        assert_eq!(found, Err(UnitError::Table(TableError::OutOfFrames)));
        assert_eq!((frames.outstanding(), frames.wrong_frees()), (0, 0));
        frames.recover();
    }
}

/// Firmware left the unit in use, with big-endian accesses.
#[test]
fn a_unit_in_use_is_taken_over() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES | END | ATS);
    {
        let mut state = model.state.borrow_mut();
        state.ddtp = 0x9999 << 10 | 4;
        state.fctl = 1;
        state.fctl_writable = 1;
        state.csr = [0x1_0001 | 1 << 10, 0x1_0001, 0x1_0001];
        state.caches.devices.insert(9, [1, 0, 0, 0, 0, 0, 0]);
    }
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    assert_eq!(model.read(9, None, 0x5000), Err(258));
    assert_eq!(model.state.borrow().csr[PQ], 0, "its queue is not ours");
    unit.pass_through(&frames, device(9)).unwrap();
    let state = model.state.borrow();
    assert!(state.misuse.is_empty(), "{:?}", state.misuse);
}

/// The unit lacks the smallest mode: the next one is used.
#[test]
fn a_larger_directory_replaces_an_unsupported_one() {
    for (modes, bits, expected) in [(0b11011, 6, 15), (0b10011, 6, 24), (0b11111, 6, 6)] {
        let machine = Machine::new();
        let model = Model::new(&machine.memory, CAPABILITIES);
        model.state.borrow_mut().modes = modes;
        let frames = machine.frames();
        let options = Options {
            device_id_bits: bits,
            ..options()
        };
        let mut unit = start(&machine, &model, &frames, options);
        assert_eq!(unit.device_id_bits(), expected);
        unit.pass_through(&frames, device(0x25)).unwrap();
        assert_eq!(model.read(0x25, None, 0x5000), Ok(0x5000));
        assert!(model.state.borrow().misuse.is_empty());
    }
}
