//! Attach and detach: a unit that caches everything translates as the tables say, and only then.

mod common;

use common::{
    BASE, FIRST, MSI_FLAT, Machine, Model, OTHER, SECOND, device, domain, first, map, options,
    second, start, table,
};
use ringfence_pgtable::Levels;
use ringfence_riscv_iommu::{
    GuestFirstStage, MsiAddresses, MsiError, MsiPageTable, Options, Privilege, ProcessBits,
    Translation, UnitError,
};
use ringfence_types::{
    CachedLevels, GuestPhysAddr, Invalidation, Invalidator, Pending, Pfn, PfnRange, PhysAddr,
    Unmapped,
};

const CAPABILITIES: u64 = BASE | MSI_FLAT;

fn page(number: u64) -> Invalidation {
    Invalidation::Pages {
        domain: domain(1),
        range: PfnRange::new(Pfn::new(number), 1).unwrap(),
        levels: CachedLevels::Leaves,
    }
}

fn done<T: Invalidator>(unit: &mut T, request: Invalidation) {
    let ticket = unit.submit(request).unwrap();
    assert_eq!(unit.poll(ticket), Ok(true));
}

#[test]
fn a_device_is_blocked_until_attach_and_after_detach() {
    for (capabilities, bits, id) in [
        (BASE, 7, 0x7f),
        (BASE, 16, 0xffff),
        (BASE, 24, 0xffff),
        (CAPABILITIES, 6, 0x3f),
        (CAPABILITIES, 15, 0x7fff),
        (CAPABILITIES, 16, 0xffff),
    ] {
        let machine = Machine::new();
        let model = Model::new(&machine.memory, capabilities);
        let frames = machine.frames();
        let options = Options {
            device_id_bits: bits,
            ..options()
        };
        let mut unit = start(&machine, &model, &frames, options);
        map(&machine, FIRST, 0x5000, 0x77_7000);
        let read = || model.read(id, None, 0x5123);
        assert_eq!(read(), Err(258));
        let requester = device(id as u16);
        unit.attach(&frames, requester, domain(1), &first(FIRST))
            .unwrap();
        assert_eq!(read(), Ok(0x77_7123));
        assert_eq!(model.read(id - 1, None, 0x5123), Err(258));
        assert_eq!(model.read(id, Some(3), 0x5123), Err(260));
        unit.detach(&frames, requester).unwrap();
        assert_eq!(read(), Err(258));
        assert!(model.state.borrow().caches.entries.is_empty());
        unit.pass_through(&frames, requester).unwrap();
        assert_eq!(read(), Ok(0x5123));
        unit.detach(&frames, requester).unwrap();
        assert_eq!(read(), Err(258));
        let absent = UnitError::NotAttached { device: requester };
        assert_eq!(unit.detach(&frames, requester), Err(absent));
        unit.disable(&frames).map_err(|(_, error)| error).unwrap();
        assert_eq!(frames.in_use(), 0);
        assert!(model.state.borrow().misuse.is_empty());
    }
}

#[test]
fn attach_replaces_the_earlier_translation() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    map(&machine, FIRST, 0x5000, 0x77_7000);
    map(&machine, OTHER, 0x5000, 0x66_6000);
    map(&machine, SECOND, 0x5000, 0x55_5000);
    let read = || model.read(9, None, 0x5000);
    for (id, translation, expected) in [
        (1, first(FIRST), 0x77_7000),
        (1, first(OTHER), 0x66_6000),
        (2, first(FIRST), 0x77_7000),
        (2, second(GuestFirstStage::Bare, None), 0x55_5000),
        (2, Translation::PassThrough, 0x5000),
        (1, first(FIRST), 0x77_7000),
    ] {
        unit.attach(&frames, device(9), domain(id), &translation)
            .unwrap();
        assert_eq!(read(), Ok(expected));
    }
}

#[test]
fn a_domain_id_has_one_table() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    unit.attach(&frames, device(1), domain(1), &first(FIRST))
        .unwrap();
    unit.attach(&frames, device(2), domain(1), &first(FIRST))
        .unwrap();
    let mismatch = Err(UnitError::DomainMismatch { domain: domain(1) });
    let deeper = Translation::FirstStage(table(FIRST, Levels::Four));
    for other in [first(OTHER), deeper, second(GuestFirstStage::Bare, None)] {
        assert_eq!(unit.attach(&frames, device(3), domain(1), &other), mismatch);
        assert_eq!(unit.attach(&frames, device(1), domain(1), &other), mismatch);
    }
    unit.detach(&frames, device(2)).unwrap();
    // Only the device itself uses the domain.
    unit.attach(&frames, device(1), domain(1), &first(OTHER))
        .unwrap();
    map(&machine, OTHER, 0x5000, 0x66_6000);
    assert_eq!(model.read(1, None, 0x5000), Ok(0x66_6000));
}

#[test]
fn unmapped_pages_stay_reachable_until_their_invalidation() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    for (translation, root) in [
        (first(FIRST), FIRST),
        (second(GuestFirstStage::Bare, None), SECOND),
    ] {
        map(&machine, root, 0x5000, 0x77_7000);
        map(&machine, root, 0x6000, 0x66_6000);
        unit.attach(&frames, device(9), domain(1), &translation)
            .unwrap();
        let read = |iova| model.read(9, None, iova).ok();
        let leaf = root + 0x8000 + 5 * 8;
        for request in [
            page(5),
            Invalidation::Domain(domain(1)),
            Invalidation::Global,
        ] {
            map(&machine, root, 0x5000, 0x77_7000);
            assert_eq!(
                (read(0x5000), read(0x6000)),
                (Some(0x77_7000), Some(0x66_6000))
            );
            machine.set(leaf, 0);
            done(&mut unit, page(6));
            assert_eq!(read(0x5000), Some(0x77_7000));
            done(&mut unit, request);
            assert_eq!(read(0x5000), None, "{request:?}");
        }
    }
}

#[test]
fn both_stages_of_a_guest_are_invalidated() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    // The guest's tables lie at guest-physical 0x5_0000 and up, in memory at FIRST and up.
    map(&machine, FIRST, 0x5000, 0x9000);
    for level in [2, 1] {
        let at = FIRST + 0x4000 * (2 - level);
        machine.set(at, (0x5_0000 + 0x4000 * (3 - level)) >> 12 << 10 | 1);
    }
    for frame in [0x0, 0x4000, 0x8000] {
        map(&machine, SECOND, 0x5_0000 + frame, FIRST + frame);
    }
    map(&machine, SECOND, 0x9000, 0x77_7000);
    let guest = GuestFirstStage::Table {
        root: GuestPhysAddr::new(0x5_0000),
        levels: Levels::Three,
        space: 0x1234,
    };
    unit.attach(&frames, device(9), domain(1), &second(guest, None))
        .unwrap();
    let read = || model.read(9, None, 0x5000).ok();
    let second_leaf = SECOND + 0x8000 + 9 * 8;
    let first_leaf = FIRST + 0x8000 + 5 * 8;
    for request in [
        page(9),
        Invalidation::Domain(domain(1)),
        Invalidation::Global,
    ] {
        map(&machine, SECOND, 0x9000, 0x77_7000);
        assert_eq!(read(), Some(0x77_7000));
        machine.set(second_leaf, 0);
        assert_eq!(read(), Some(0x77_7000));
        done(&mut unit, request);
        // The device context has guest-physical pointers, which a unit may cache translated.
        assert!(
            !model.state.borrow().caches.devices.contains_key(&9),
            "{request:?}"
        );
        assert_eq!(read(), None);
    }
    map(&machine, SECOND, 0x9000, 0x77_7000);
    let range = PfnRange::new(Pfn::new(5), 1);
    for (space, range) in [(Some(0x1234), range), (Some(0x1234), None), (None, range)] {
        machine.set(first_leaf, 0x9000 >> 12 << 10 | 0xd7);
        assert_eq!(read(), Some(0x77_7000));
        machine.set(first_leaf, 0);
        let other = unit.submit_guest_first_stage(domain(1), Some(7), None, CachedLevels::All);
        assert_eq!(unit.poll(other.unwrap()), Ok(true));
        assert_eq!(read(), Some(0x77_7000));
        let ticket = unit.submit_guest_first_stage(domain(1), space, range, CachedLevels::Leaves);
        assert_eq!(unit.poll(ticket.unwrap()), Ok(true));
        assert_eq!(read(), None);
    }
}

/// The unit may execute commands out of order, except around a fence (section 3.1.2). It must not
/// read a context again through an entry of the second stage that is not invalidated yet.
#[test]
fn a_context_is_read_again_after_the_second_stage_is_invalidated() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, BASE);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let nested = Translation::SecondStage {
        table: table(0x8000, Levels::Three),
        guest: GuestFirstStage::Table {
            root: GuestPhysAddr::new(0x1000),
            levels: Levels::Three,
            space: 3,
        },
        msi: None,
    };
    unit.attach(&frames, device(9), domain(1), &nested).unwrap();
    let requests = [
        page(1),
        Invalidation::Domain(domain(1)),
        Invalidation::Global,
    ];
    for request in requests {
        model.take_log();
        done(&mut unit, request);
        let log = model.take_log();
        let position = |opcode: u64| log.iter().position(|command| command[0] & 0x3ff == opcode);
        // IOTINVAL.GVMA, IOFENCE.C and IODIR.INVAL_DDT.
        let (second_stage, fence, context) = (position(0x81), position(2), position(3));
        assert!(second_stage.is_some(), "{log:x?}");
        assert!(second_stage < fence && fence < context, "{log:x?}");
    }
}

#[test]
fn processes_have_tables_of_their_own() {
    for (bits, last) in [
        (ProcessBits::Eight, 0xff),
        (ProcessBits::Seventeen, 0x1_ffff),
        (ProcessBits::Twenty, 0xf_ffff),
    ] {
        let machine = Machine::new();
        let model = Model::new(&machine.memory, CAPABILITIES);
        let frames = machine.frames();
        let mut unit = start(&machine, &model, &frames, options());
        map(&machine, FIRST, 0x5000, 0x77_7000);
        map(&machine, OTHER, 0x5000, 0x66_6000);
        let processes = Translation::Processes(bits);
        unit.attach(&frames, device(9), domain(0), &processes)
            .unwrap();
        let read = |process| model.read(9, process, 0x5000);
        assert_eq!((read(None), read(Some(last))), (Err(266), Err(266)));
        let mut attach = |process, id, root| {
            let root = table(root, Levels::Three);
            unit.attach_process(
                &frames,
                device(9),
                process,
                domain(id),
                root,
                Privilege::User,
            )
        };
        attach(0, 1, FIRST).unwrap();
        attach(last, 2, OTHER).unwrap();
        let used = Err(UnitError::Process { process: last });
        assert_eq!(attach(last, 2, OTHER), used);
        let beyond = UnitError::ProcessBeyondDirectory { process: last + 1 };
        assert_eq!(attach(last + 1, 3, OTHER), Err(beyond));
        let mismatch = Err(UnitError::DomainMismatch { domain: domain(1) });
        assert_eq!(attach(7, 1, OTHER), mismatch);
        assert_eq!(read(None), Ok(0x77_7000));
        assert_eq!(
            (read(Some(0)), read(Some(last))),
            (Ok(0x77_7000), Ok(0x66_6000))
        );
        unit.detach_process(&frames, device(9), last).unwrap();
        assert_eq!((read(Some(0)), read(Some(last))), (Ok(0x77_7000), Err(266)));
        machine.set(FIRST + 0x8000 + 5 * 8, 0);
        assert_eq!(read(None), Ok(0x77_7000));
        done(&mut unit, page(5));
        assert_eq!(read(None), Err(13));
        unit.detach(&frames, device(9)).unwrap();
        assert_eq!(read(None), Err(258));
        unit.disable(&frames).map_err(|(_, error)| error).unwrap();
        assert_eq!(frames.in_use(), 0);
    }
}

#[test]
fn msis_of_a_guest_reach_interrupt_files() {
    let machine = Machine::new();
    let model = Model::new(&machine.memory, CAPABILITIES);
    let frames = machine.frames();
    let mut unit = start(&machine, &model, &frames, options());
    let memory = &&machine.memory;
    let addresses = |mask| MsiAddresses {
        mask,
        pattern: 0x2_8000,
    };
    let create = |mask| MsiPageTable::new(memory, &frames, domain(1), addresses(mask));
    let msi = create(0x3).unwrap();
    let file = |number: u64| GuestPhysAddr::new((0x2_8000 + number) << 12);
    let translation = second(GuestFirstStage::Bare, Some(msi.translation()));
    unit.attach(&frames, device(9), domain(1), &translation)
        .unwrap();
    let read = |number| model.read(9, None, file(number).get());
    assert_eq!(read(2), Err(262));
    msi.map(memory, file(2), PhysAddr::new(0x44_4000)).unwrap();
    assert_eq!((read(2), read(3)), (Ok(0x44_4000), Err(262)));
    assert_eq!(model.read(9, None, file(4).get()), Err(21));
    let already = MsiError::AlreadyMapped { page: file(2) };
    assert_eq!(
        msi.map(memory, file(2), PhysAddr::new(0x5000)),
        Err(already)
    );
    let not = MsiError::NotMapped { page: file(3) };
    assert_eq!(msi.unmap(memory, file(3)).map(drop), Err(not));
    let outside = MsiError::NotAnInterruptFile { page: file(4) };
    assert_eq!(
        msi.map(memory, file(4), PhysAddr::new(0x5000)),
        Err(outside)
    );
    let narrow = MsiError::Target {
        at: PhysAddr::new(0x5800),
    };
    assert_eq!(msi.map(memory, file(3), PhysAddr::new(0x5800)), Err(narrow));
    let unmapped = msi.unmap(memory, file(2)).unwrap();
    assert_eq!(read(2), Ok(0x44_4000));
    // Until the unit has forgotten the old target, no other one replaces it.
    let early = msi.map(memory, file(2), PhysAddr::new(0x55_5000));
    assert_eq!(early, Err(MsiError::NotInvalidated { page: file(2) }));
    let invalidation = Invalidation::Pages {
        domain: unmapped.domain(),
        range: unmapped.range(),
        levels: CachedLevels::Leaves,
    };
    let pending = Pending::submit(&mut unit, invalidation, unmapped).unwrap();
    let flushed = pending.wait(&mut unit).unwrap();
    assert_eq!(read(2), Err(262));
    msi.release(memory, flushed).unwrap();
    msi.map(memory, file(2), PhysAddr::new(0x55_5000)).unwrap();
    assert_eq!(read(2), Ok(0x55_5000));
    let foreign =
        Unmapped::attest_cleared(domain(2), PfnRange::new(Pfn::new(0x2_8002), 1).unwrap());
    let invalidation = Invalidation::Domain(domain(2));
    let pending = Pending::submit(&mut unit, invalidation, foreign).unwrap();
    let foreign = msi.release(memory, pending.wait(&mut unit).unwrap());
    // The proof is not lost: the table of the other domain accepts it.
    let (proof, error) = foreign.unwrap_err();
    assert_eq!(error, MsiError::OtherDomain(domain(2)));
    assert_eq!(
        (proof.domain(), proof.range().lo()),
        (domain(2), Pfn::new(0x2_8002))
    );
    let addresses = MsiAddresses {
        mask: 0b11,
        pattern: 0x2_8000,
    };
    let other = MsiPageTable::new(memory, &frames, domain(2), addresses).unwrap();
    other
        .map(memory, file(2), PhysAddr::new(0x66_6000))
        .unwrap();
    let _ = other.unmap(memory, file(2)).unwrap();
    let early = other.map(memory, file(2), PhysAddr::new(0x55_5000));
    assert_eq!(early, Err(MsiError::NotInvalidated { page: file(2) }));
    other.release(memory, proof).unwrap();
    other
        .map(memory, file(2), PhysAddr::new(0x55_5000))
        .unwrap();
    other.destroy(&frames);
    unit.detach(&frames, device(9)).unwrap();
    msi.destroy(&frames);
    unit.disable(&frames).map_err(|(_, error)| error).unwrap();
    assert_eq!(frames.in_use(), 0);
    assert_eq!(create(0x1ff).map(drop), Err(MsiError::TooManyFiles));
    assert_eq!(create(u64::MAX).map(drop), Err(MsiError::TooManyFiles));
}
