//! Attach and detach: entries in memory, and the invalidations that each change owes.

use crate::model::{self, CAP, CM, ECAP, ECAP_SCALABLE, Event, GCMD, Model, RWBF, start, words};
use ringfence_pgtable::Levels;
use ringfence_types::{DomainId, Pasid, PhysAddr, RequesterId};
use ringfence_vtd::{Feature, Mode, Translation, UnitError};

const ROOT: u64 = 0x10_0000;
/// Present, in root and directory entries.
const P: u64 = 1;
/// The first frame after root, ring and status.
const FIRST: u64 = 0x10_3000;

const fn domain(id: u16) -> DomainId {
    DomainId::new(id)
}

const fn device(id: u16) -> RequesterId {
    RequesterId::new(id)
}

const fn second(root: u64, levels: Levels) -> Translation {
    let root = PhysAddr::new(root);
    Translation::SecondStage { root, levels }
}

const fn first(root: u64) -> Translation {
    Translation::FirstStage {
        root: PhysAddr::new(root),
        levels: Levels::Four,
    }
}

#[test]
fn legacy_entries_and_their_invalidations() {
    let model = Model::new(CAP, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    model.take();
    let table = second(0x5000, Levels::Three);
    unit.attach(device(0x1234), domain(7), table).unwrap();
    assert_eq!(model.take(), [], "an absent entry is in no cache");
    assert_eq!(words(&model, ROOT + 0x12 * 16), [FIRST | P, 0]);
    assert_eq!(words(&model, FIRST + 0x34 * 16), [0x5001, 0x701]);

    unit.detach(device(0x1234)).unwrap();
    assert_eq!(words(&model, FIRST + 0x34 * 16), [0, 0]);
    assert_eq!(
        model.take_commands(),
        [[0x1234_0007_0031, 0], [0x45, 0], [0x0007_00e2, 0]]
    );
    let missing = UnitError::NotAttached(device(0x1234));
    assert_eq!(unit.detach(device(0x1234)), Err(missing));

    unit.pass_through(device(0xffff), domain(8)).unwrap();
    assert_eq!(words(&model, FIRST + 0x1000 + 0xff * 16), [0x9, 0x802]);
    unit.disable().unwrap();
    assert_eq!(frames.in_use(), 0);
}

/// PGSNP, where the unit has snoop control (SC).
#[test]
fn first_stage_accesses_snoop() {
    const SC: u64 = 1 << 7;
    for (ecap, word) in [(ECAP_SCALABLE, 7), (ECAP_SCALABLE | SC, 0x100_0007)] {
        let model = Model::new(CAP, ecap);
        let frames = model::frames(&model);
        let mut unit = start(&model, &frames, Mode::Scalable).unwrap();
        unit.attach(device(0x1285), domain(7), first(0x5000))
            .unwrap();
        let entry = words(&model, FIRST + 0x2000);
        assert_eq!(entry, [0x49, word, 0x5000, 0, 0, 0, 0, 0]);
    }
}

#[test]
fn scalable_entries_and_their_invalidations() {
    let model = Model::new(CAP, ECAP_SCALABLE);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Scalable).unwrap();
    model.take();
    unit.attach(device(0x1285), domain(7), first(0x5000))
        .unwrap();
    assert_eq!(model.take(), []);
    let (contexts, directory, table) = (FIRST, FIRST + 0x1000, FIRST + 0x2000);
    // Device 0x10, function 5 is in the upper context table of bus 0x12.
    assert_eq!(words(&model, ROOT + 0x12 * 16), [0, contexts | P]);
    // PDTS = 2, PASIDE, P.
    let context = words(&model, contexts + 5 * 32);
    assert_eq!(context, [directory | 0x409, 0, 0, 0]);
    assert_eq!(words(&model, directory), [table | P, 0]);
    let entry = words(&model, table);
    assert_eq!(entry, [0x49, 7, 0x5000, 0, 0, 0, 0, 0]);

    unit.detach(device(0x1285)).unwrap();
    assert_eq!(words(&model, contexts + 5 * 32), [0]);
    assert_eq!(
        model.take_commands(),
        [
            [0x1285_0000_0031, 0],
            [0x45, 0],
            [0x0007_0017, 0],
            [0x45, 0],
            [0x0007_0026, 0],
        ]
    );
    assert_eq!(frames.in_use(), 4, "directory and table are free");

    unit.attach(device(0x1200), domain(9), second(0x6000, Levels::Four))
        .unwrap();
    unit.detach(device(0x1200)).unwrap();
    let last = model.take_commands().pop();
    assert_eq!(last, Some([0x0009_00e2, 0]), "the domain's second stage");
    unit.disable().unwrap();
    assert_eq!(frames.in_use(), 0);
}

#[test]
fn further_pasids_have_entries_of_their_own() {
    let model = Model::new(CAP, ECAP_SCALABLE);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Scalable).unwrap();
    let (device, pasid) = (device(8), |raw| Pasid::new(raw).unwrap());
    unit.attach(device, domain(1), first(0x5000)).unwrap();
    unit.attach_pasid(device, pasid(0x7fff), domain(2), first(0x6000))
        .unwrap();
    unit.attach_pasid(device, pasid(0x41), domain(3), first(0x7000))
        .unwrap();
    let directory = FIRST + 0x1000;
    // The directory has a table of PASIDs 0x7fc0 to 0x7fff, and one of 0x40 to 0x7f.
    let [high] = words(&model, directory + 511 * 8);
    let [low] = words(&model, directory + 8);
    assert_eq!(words(&model, (high & !P) + 63 * 64), [0x49, 2, 0x6000]);
    assert_eq!(words(&model, (low & !P) + 64), [0x49, 3, 0x7000]);

    model.take();
    unit.detach_pasid(device, pasid(0x7fff)).unwrap();
    assert_eq!(words(&model, (high & !P) + 63 * 64), [0]);
    assert_eq!(
        model.take_commands(),
        [[0x7fff_0002_0017, 0], [0x45, 0], [0x7fff_0002_0026, 0],]
    );
    // Two entries: all caches.
    unit.detach(device).unwrap();
    assert_eq!(
        model.take_commands(),
        [[0x11, 0], [0x45, 0], [0x37, 0], [0x45, 0], [0xd2, 0]]
    );
    unit.disable().unwrap();
    assert_eq!(frames.in_use(), 0);
}

/// "Caching Mode": in this mode the unit may have cached that an entry was not present, with
/// domain-id 0.
#[test]
fn caching_mode_owes_invalidations_after_attach() {
    let model = Model::new(CAP | CM, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    assert!(unit.invalidates_after_map());
    model.take();
    unit.attach(device(0x20), domain(7), second(0x5000, Levels::Three))
        .unwrap();
    assert_eq!(
        model.take_commands(),
        [[0x0020_0000_0031, 0], [0x45, 0], [0x0007_00e2, 0]]
    );
    let refused = unit.attach(device(0x28), domain(0), second(0x6000, Levels::Three));
    assert_eq!(refused, Err(UnitError::Domain(domain(0))));

    let model = Model::new(CAP | CM, ECAP_SCALABLE);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Scalable).unwrap();
    model.take();
    unit.attach(device(0x20), domain(7), first(0x5000)).unwrap();
    assert_eq!(
        model.take_commands(),
        [
            [0x0020_0000_0031, 0],
            [0x45, 0],
            [0x0000_0007, 0],
            [0x0007_0017, 0],
            [0x45, 0],
            [0x0000_00e2, 0],
            [0x0007_0026, 0],
        ]
    );
}

#[test]
fn an_attach_flushes_the_write_buffer() {
    let model = Model::new(CAP | RWBF, ECAP);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    assert!(!unit.invalidates_after_map());
    model.take();
    unit.attach(device(0x20), domain(7), second(0x5000, Levels::Three))
        .unwrap();
    let flush = Event::Write(GCMD, 1 << 31 | 1 << 27 | 1 << 26);
    assert_eq!(model.take(), [flush]);
    unit.flush_write_buffer().unwrap();
    assert_eq!(model.take(), [flush]);
}

#[test]
fn requests_that_the_unit_cannot_express_are_refused() {
    let model = Model::new(CAP & !0b111, ECAP_SCALABLE & !(1 << 6));
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Scalable).unwrap();
    let table = first(0x5000);
    unit.attach(device(1), domain(1), table).unwrap();
    let unsupported = UnitError::Unsupported;
    let five = Translation::FirstStage {
        root: PhysAddr::new(0x5000),
        levels: Levels::Five,
    };
    for (device_id, domain_id, translation, error) in [
        (1, 1, table, UnitError::Attached(device(1))),
        (2, 1, first(0x6000), UnitError::OtherTable(domain(1))),
        (2, 16, table, UnitError::Domain(domain(16))),
        (2, 2, five, UnitError::Depth(Levels::Five)),
        (
            2,
            2,
            second(0x5000, Levels::Five),
            UnitError::Depth(Levels::Five),
        ),
        (
            2,
            2,
            first(0x5008),
            UnitError::Misaligned(PhysAddr::new(0x5008)),
        ),
        (
            2,
            2,
            Translation::PassThrough,
            unsupported(Feature::PassThrough),
        ),
    ] {
        let refused = unit.attach(device(device_id), domain(domain_id), translation);
        assert_eq!(refused, Err(error));
    }
    for (pasid, error) in [
        (
            1 << 15,
            UnitError::PasidBeyondWidth(Pasid::new(1 << 15).unwrap()),
        ),
        (0, UnitError::Attached(device(1))),
    ] {
        let pasid = Pasid::new(pasid).unwrap();
        assert_eq!(
            unit.attach_pasid(device(1), pasid, domain(1), table),
            Err(error)
        );
    }
    unit.disable().unwrap();
    assert_eq!(frames.in_use(), 0);
}

#[test]
fn stages_that_the_mode_lacks_are_refused() {
    let model = Model::new(CAP, ECAP_SCALABLE & !(1 << 46));
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Legacy).unwrap();
    let one = Pasid::new(1).unwrap();
    let table = second(0x5000, Levels::Three);
    let refused = unit.attach(device(1), domain(1), first(0x5000));
    assert_eq!(refused, Err(UnitError::Unsupported(Feature::FirstStage)));
    let refused = unit.attach_pasid(device(1), one, domain(1), table);
    assert_eq!(refused, Err(UnitError::Unsupported(Feature::Pasid)));
    unit.disable().unwrap();
    let mut unit = start(&model, &frames, Mode::Scalable).unwrap();
    let refused = unit.attach(device(1), domain(1), table);
    assert_eq!(refused, Err(UnitError::Unsupported(Feature::SecondStage)));
}

/// The device stays in the list until its translations are out of the caches.
#[test]
fn a_failed_detach_can_be_repeated() {
    let model = Model::new(CAP, ECAP_SCALABLE);
    let frames = model::frames(&model);
    let mut unit = start(&model, &frames, Mode::Scalable).unwrap();
    unit.attach(device(8), domain(1), first(0x5000)).unwrap();
    model.is_stalled.set(true);
    let error = unit.detach(device(8)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "invalidation: the invalidation did not complete in time"
    );
    let in_use = frames.in_use();
    let pasid = Pasid::new(1).unwrap();
    let refused = unit.attach_pasid(device(8), pasid, domain(2), first(0x6000));
    assert_eq!(refused, Err(UnitError::Attached(device(8))));
    model.is_stalled.set(false);
    model.run();
    unit.detach(device(8)).unwrap();
    assert_eq!(frames.in_use(), in_use - 2);
    unit.disable().unwrap();
    assert_eq!(frames.in_use(), 0);
}
