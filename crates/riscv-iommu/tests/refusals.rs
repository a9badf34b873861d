//! Attachments that fail: what the unit cannot express, and units that stop answering.

mod common;

use common::{
    ATS, BASE, Behaviour, FIRST, MSI_FLAT, Machine, Model, OTHER, SECOND, T2GPA, device, domain,
    first, map, options, second, start, table,
};
use ringfence_memory::fake::FaultyFrames;
use ringfence_pgtable::{Levels, TableError};
use ringfence_riscv_iommu::{
    Ats, Feature, GuestFirstStage, MsiTranslation, Options, PageTable, Privilege, ProcessBits,
    Translation, Unit, UnitError,
};
use ringfence_types::{GuestPhysAddr, Invalidation, InvalidationError, Invalidator, PhysAddr};

const CAPABILITIES: u64 = BASE | MSI_FLAT;

#[test]
fn what_the_unit_cannot_express_is_rejected() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, 0x0038_0002_0210 & !(0x38 << 32) | 40 << 32);
    let frames = machine.frames();
    let options = Options {
        device_id_bits: 7,
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    let in_use = frames.in_use();
    let mut attach = |id, translation: &Translation, ats| {
        unit.attach_with_ats(&frames, device(id), domain(1), translation, ats)
    };
    let beyond = UnitError::DeviceBeyondDirectory {
        device: device(0x80),
    };
    assert_eq!(attach(0x80, &Translation::PassThrough, None), Err(beyond));
    let unsupported = |feature| Err(UnitError::Unsupported(feature));
    let (four, three) = (Levels::Four, Levels::Three);
    let stage = |levels, guest, msi| Translation::SecondStage {
        table: table(SECOND, levels),
        guest,
        msi,
    };
    let guest = |levels, space| GuestFirstStage::Table {
        root: GuestPhysAddr::new(0x1000),
        levels,
        space,
    };
    let guest_root = |root| GuestFirstStage::Table {
        root: GuestPhysAddr::new(root),
        levels: three,
        space: 1,
    };
    let msi = MsiTranslation {
        table: PhysAddr::new(0x1000),
        mask: 1,
        pattern: 0,
    };
    let at = |root| {
        Err(UnitError::Root {
            at: PhysAddr::new(root),
        })
    };
    let ats = Some(Ats::default());
    let bare = GuestFirstStage::Bare;
    for (translation, ats, expected) in [
        (
            Translation::FirstStage(table(FIRST, four)),
            None,
            unsupported(Feature::FirstStage(four)),
        ),
        (
            stage(four, bare, None),
            None,
            unsupported(Feature::SecondStage(four)),
        ),
        (
            stage(three, guest(four, 1), None),
            None,
            unsupported(Feature::FirstStage(four)),
        ),
        (
            stage(three, guest(three, 1 << 20), None),
            None,
            Err(UnitError::ProcessSpace { id: 1 << 20 }),
        ),
        (stage(three, guest_root(1 << 41), None), None, at(1 << 41)),
        (
            stage(three, bare, Some(msi)),
            None,
            unsupported(Feature::MsiTranslation),
        ),
        (
            Translation::Processes(ProcessBits::Eight),
            None,
            unsupported(Feature::ProcessBits(8)),
        ),
        (first(FIRST), ats, unsupported(Feature::Ats)),
        (first(FIRST + 8), None, at(FIRST + 8)),
        (first(1 << 40), None, at(1 << 40)),
        (
            Translation::SecondStage {
                table: table(0x1000, three),
                guest: bare,
                msi: None,
            },
            None,
            at(0x1000),
        ),
    ] {
        assert_eq!(attach(9, &translation, ats), expected, "{translation:?}");
    }
    let no_device = UnitError::NotAttached { device: device(9) };
    let root = table(FIRST, three);
    let process = unit.attach_process(&frames, device(9), 0, domain(1), root, Privilege::User);
    assert_eq!(process, Err(no_device));
    unit.attach(&frames, device(9), domain(1), &first(FIRST))
        .unwrap();
    let process = unit.attach_process(&frames, device(9), 0, domain(1), root, Privilege::User);
    assert_eq!(process, Err(UnitError::NoProcesses { device: device(9) }));
    assert_eq!(frames.in_use(), in_use);
}

/// Cached entries of a guest's first stage bear GSCID and PSCID only: a device would use those of
/// another device's table.
#[test]
fn an_address_space_of_a_guest_has_one_table() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    // Both tables are mapped one to one by the second stage, and so are the pages.
    for (root, page) in [(FIRST, 0x6_0000), (OTHER, 0x7_0000)] {
        map(&machine, root, 0x5000, page);
        for at in [root, root + 0x4000, root + 0x8000, page] {
            map(&machine, SECOND, at, at);
        }
    }
    let guest = |root, space| {
        let table = GuestFirstStage::Table {
            root: GuestPhysAddr::new(root),
            levels: Levels::Three,
            space,
        };
        second(table, None)
    };
    let mut attach =
        |id, root, space| unit.attach(&frames, device(id), domain(1), &guest(root, space));
    attach(9, FIRST, 5).unwrap();
    assert_eq!(model.read(9, None, 0x5000), Ok(0x6_0000));
    let attached = attach(8, OTHER, 5);
    let found = model.read(8, None, 0x5000);
    assert_ne!(found, Ok(0x6_0000), "the page of device 9");
    let mismatch = UnitError::DomainMismatch { domain: domain(1) };
    assert_eq!((attached, found), (Err(mismatch), Err(258)));
    // Another space, or the same table.
    attach(8, OTHER, 6).unwrap();
    assert_eq!(model.read(8, None, 0x5000), Ok(0x7_0000));
    attach(7, FIRST, 5).unwrap();
    // Device 9 leaves the space, which then belongs to device 7 alone.
    attach(9, OTHER, 6).unwrap();
    attach(7, OTHER, 5).unwrap();
    assert_eq!(model.read(7, None, 0x5000), Ok(0x7_0000));
}

#[test]
fn services_need_what_they_build_on() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES | ATS | T2GPA);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let mut attach = |translation: &Translation, ats: Ats| {
        unit.attach_with_ats(&frames, device(9), domain(1), translation, Some(ats))
    };
    let contained = Ats {
        guest_addresses: true,
        ..Ats::default()
    };
    let needs_second = UnitError::Unsupported(Feature::GuestAddressCompletions);
    assert_eq!(attach(&first(FIRST), contained), Err(needs_second));
    let response = Ats {
        response_process: true,
        ..Ats::default()
    };
    let needs_requests = UnitError::Unsupported(Feature::Ats);
    assert_eq!(attach(&first(FIRST), response), Err(needs_requests));
    attach(&second(GuestFirstStage::Bare, None), contained).unwrap();
    let wide = MsiTranslation {
        table: PhysAddr::new(0x1000),
        mask: 1,
        pattern: 1 << 47,
    };
    let too_wide = second(GuestFirstStage::Bare, Some(wide));
    assert_eq!(attach(&too_wide, contained), Err(UnitError::MsiAddress));
}

#[test]
fn a_failed_invalidation_leaves_the_device_blocked() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    map(&machine, FIRST, 0x5000, 0x77_7000);
    let timeout = UnitError::Invalidation(InvalidationError::TimedOut);
    // The domain cannot be emptied: the device was never attached.
    model.behave(Behaviour::Stuck);
    let attached = unit.attach(&frames, device(9), domain(1), &first(FIRST));
    assert_eq!(attached, Err(timeout));
    assert_eq!(model.read(9, None, 0x5000), Err(258));
    model.behave(Behaviour::Normal);
    let ticket = unit.recover().unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
    unit.attach(&frames, device(9), domain(1), &first(FIRST))
        .unwrap();
    // The context of a second device of the domain cannot be published: it is blocked again.
    model.behave(Behaviour::Stuck);
    let attached = unit.attach(&frames, device(8), domain(1), &first(FIRST));
    assert_eq!(attached, Err(timeout));
    assert_eq!(model.read(8, None, 0x5000), Err(258));
    // A detach blocks at once, but the unit may use cached entries until a detach succeeds.
    assert_eq!(model.read(9, None, 0x5000), Ok(0x77_7000));
    assert_eq!(unit.detach(&frames, device(9)), Err(timeout));
    assert_eq!(model.read(9, None, 0x5000), Ok(0x77_7000));
    model.behave(Behaviour::Normal);
    unit.recover().unwrap();
    unit.detach(&frames, device(9)).unwrap();
    unit.detach(&frames, device(8)).unwrap();
    assert_eq!(model.read(9, None, 0x5000), Err(258));
}

/// Each process of a device with ATS has a command of its own in an invalidation of everything,
/// which recovery needs.
#[test]
fn a_process_that_the_queue_has_no_room_for_is_rejected() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES | ATS);
    let frames = machine.frames();
    let options = Options {
        command_entries: 16,
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    let processes = Translation::Processes(ProcessBits::Eight);
    let ats = Some(Ats::default());
    unit.attach_with_ats(&frames, device(9), domain(0), &processes, ats)
        .unwrap();
    let root = table(FIRST, Levels::Three);
    let attach = |unit: &mut common::TestUnit<'_>, process| {
        unit.attach_process(
            &frames,
            device(9),
            process,
            domain(1),
            root,
            Privilege::User,
        )
    };
    let attached = (1..30).take_while(|process| attach(&mut unit, *process).is_ok());
    let attached = attached.count() as u32;
    let rejected = attached + 1;
    let error = attach(&mut unit, rejected);
    assert_eq!(error, Err(UnitError::QueueTooSmall));
    assert_eq!(model.read(9, Some(rejected), 0x5000), Err(266));
    // All processes: every invalidation that names them fits, as does recovery.
    let everything = unit.submit(Invalidation::Global).unwrap();
    assert_eq!(unit.poll(everything), Ok(true));
    let recovered = unit.recover().unwrap();
    assert_eq!(unit.poll(recovered), Ok(true));
    for process in 1..=attached {
        unit.detach_process(&frames, device(9), process).unwrap();
    }
    attach(&mut unit, rejected).unwrap();
}

#[test]
fn frames_run_out_without_a_leak() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let source = machine.frames();
    let frames = FaultyFrames::new(&source);
    let mut unit = Unit::new(&model, &machine.memory, &frames, options()).unwrap();
    let processes = Translation::Processes(ProcessBits::Twenty);
    // Two tables of the device directory stay linked; then the process directory is missing.
    for count in [0, 1, 1] {
        frames.fail_after(count);
        let attached = unit.attach(&frames, device(9), domain(0), &processes);
        assert_eq!(attached, Err(UnitError::Table(TableError::OutOfFrames)));
        frames.recover();
    }
    unit.attach(&frames, device(9), domain(0), &processes)
        .unwrap();
    let root: PageTable = table(FIRST, Levels::Three);
    for count in 0..2 {
        frames.fail_after(count);
        let attached = unit.attach_process(
            &frames,
            device(9),
            1 << 18,
            domain(1),
            root,
            Privilege::User,
        );
        assert_eq!(attached, Err(UnitError::Table(TableError::OutOfFrames)));
        frames.recover();
    }
    unit.attach_process(
        &frames,
        device(9),
        1 << 18,
        domain(1),
        root,
        Privilege::User,
    )
    .unwrap();
    unit.disable(&frames).map_err(|(_, error)| error).unwrap();
    assert_eq!((frames.outstanding(), frames.wrong_frees()), (0, 0));
}

/// A guest passes on process ids, and the unit stops at one that is too wide.
#[test]
fn a_guest_cannot_name_a_process_that_the_unit_does_not_have() {
    // PD8 alone: PD17 and PD20 are bits 39 and 40.
    for (capabilities, most) in [
        (BASE & !(0b11 << 39), 0xff),
        (BASE & !(1 << 40), 0x1_ffff),
        (BASE, 0xf_ffff),
    ] {
        let machine = Machine::new();
        let model = Model::new(&machine.memory, capabilities);
        let frames = machine.frames();
        let mut unit = start(&machine, &model, &frames, options());
        let ticket = unit.submit_guest_process(device(9), most).unwrap();
        assert_eq!(unit.poll(ticket), Ok(true));
        assert_eq!(
            unit.submit_guest_process(device(9), most + 1),
            Err(InvalidationError::Unsupported)
        );
    }
}

/// With Svpbmt a guest selects memory types that may bypass the CPU caches.
#[test]
fn guests_need_coherent_devices() {
    let table = table(0x8000, Levels::Three);
    let root = GuestPhysAddr::new(0x1000);
    let guests = [
        GuestFirstStage::Table {
            root,
            levels: Levels::Three,
            space: 3,
        },
        GuestFirstStage::Processes {
            root,
            bits: ProcessBits::Eight,
            default_process: true,
        },
    ];
    const SVPBMT: u64 = 1 << 15;
    for (capabilities, coherent_guests) in [(BASE, false), (BASE | SVPBMT, true)] {
        for guest in guests {
            let attached = attach_guest(capabilities, coherent_guests, table, guest);
            assert_eq!(attached, Ok(()));
        }
    }
    for guest in guests {
        let attached = attach_guest(BASE | SVPBMT, false, table, guest);
        let error = UnitError::Unsupported(Feature::CoherentGuests);
        assert_eq!(attached, Err(error));
    }
    let bare = attach_guest(BASE | SVPBMT, false, table, GuestFirstStage::Bare);
    assert_eq!(bare, Ok(()));
}

fn attach_guest(
    capabilities: u64,
    coherent_guests: bool,
    table: PageTable,
    guest: GuestFirstStage,
) -> Result<(), UnitError> {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, capabilities);
    let frames = machine.frames();
    let options = Options {
        coherent_guests,
        ..options()
    };
    let mut unit = start(&machine, &model, &frames, options);
    let translation = Translation::SecondStage {
        table,
        guest,
        msi: None,
    };
    unit.attach(&frames, device(9), domain(1), &translation)
}
