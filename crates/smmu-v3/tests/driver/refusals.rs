//! Options, devices and tables that the unit cannot express.

use ringfence_memory::{Arena, Frames};
use ringfence_pgtable::{Level, TableError};
use ringfence_smmu_v3::{Feature, PageTable, Register, Translation, Unit, UnitError, UnitQueue};
use ringfence_types::{DomainId, GuestPhysAddr, PageSize, PhysAddr, PhysRange, RequesterId};

use crate::model::CR0;
use crate::rig::{DEVICE, DOMAIN, IDENTIFICATION, IOVA, OTHER, Rig, STREAM_TABLE, one, two};

fn refused(rig: &Rig) -> Option<UnitError> {
    let error = rig.start().err();
    if error.is_some() {
        assert_eq!(rig.frames.in_use(), 0);
        assert_eq!(rig.model.register(CR0), 0, "the unit runs");
    }
    error
}

#[test]
fn units_without_what_the_driver_needs() {
    let [idr0, idr1, idr3, idr5] = IDENTIFICATION;
    for (words, feature) in [
        ([idr0 & !8, idr1, idr3, idr5], Feature::Aarch64),
        (
            [idr0 & !(3 << 21) | 3 << 21, idr1, idr3, idr5],
            Feature::LittleEndian,
        ),
        ([idr0 | 2 << 24, idr1, idr3, idr5], Feature::TerminateModel),
        ([idr0, idr1 | 1 << 29, idr3, idr5], Feature::WritableBases),
        ([idr0, idr1 | 1 << 30, idr3, idr5], Feature::WritableBases),
    ] {
        let rig = Rig::with(words);
        assert_eq!(refused(&rig), Some(UnitError::Unsupported(feature)));
    }
}

#[test]
fn options_beyond_the_unit() {
    let mut rig = Rig::new();
    rig.options.stream_id_bits = 17;
    assert_eq!(refused(&rig), Some(UnitError::StreamIdBits { bits: 17 }));
    let commands = |entries, most| UnitError::QueueEntries {
        queue: UnitQueue::Commands,
        entries,
        fewest: 16,
        most,
    };
    let events = |entries, most| UnitError::QueueEntries {
        queue: UnitQueue::Events,
        entries,
        fewest: 2,
        most,
    };
    for entries in [0, 1, 8, 24, 257, 512, 1 << 31] {
        let mut rig = Rig::new();
        rig.options.command_entries = entries;
        assert_eq!(refused(&rig), Some(commands(entries, 256)));
    }
    for entries in [0, 1, 3, 129, 256] {
        let mut rig = Rig::new();
        rig.options.event_entries = entries;
        assert_eq!(refused(&rig), Some(events(entries, 128)));
    }
    // The unit's largest queues: CMDQS and EVENTQS.
    let [idr0, _, idr3, idr5] = IDENTIFICATION;
    let rig = Rig::with([idr0, 5 << 21 | 7 << 16 | 16, idr3, idr5]);
    assert_eq!(refused(&rig), Some(commands(256, 32)));
    let rig = Rig::with([idr0, 8 << 21 | 2 << 16 | 16, idr3, idr5]);
    assert_eq!(refused(&rig), Some(events(128, 4)));
    let mut rig = Rig::with([idr0, 4 << 21 | 1 << 16 | 16, idr3, idr5]);
    rig.options.command_entries = 16;
    rig.options.event_entries = 2;
    assert_eq!(refused(&rig), None);
}

#[test]
fn memory_for_the_stream_table() {
    let bytes = 8 << 10;
    let at = |start, bytes| PhysRange::new(PhysAddr::new(start), bytes).unwrap();
    for (range, error) in [
        (
            at(STREAM_TABLE, bytes - 1),
            UnitError::StreamTable { bytes },
        ),
        (
            at(STREAM_TABLE + 0x1000, bytes),
            UnitError::StreamTable { bytes },
        ),
        (at(1 << 40, bytes), UnitError::Table(TableError::Memory)),
        (at(1 << 44, bytes), UnitError::Table(TableError::Memory)),
        (
            at(u64::MAX - bytes + 1, bytes),
            UnitError::Table(TableError::Memory),
        ),
    ] {
        let mut rig = Rig::new();
        rig.options.stream_table = range;
        assert_eq!(refused(&rig), Some(error));
    }
}

/// Frames beyond the unit's addresses, and frames outside memory.
#[test]
fn frames_that_the_unit_cannot_reach() {
    let [idr0, idr1, idr3, _] = IDENTIFICATION;
    // OAS 32 bits; the arena is smaller, so all its frames are reached.
    let rig = Rig::with([idr0, idr1, idr3, 0x70]);
    assert_eq!(refused(&rig), None);
    let rig = Rig::new();
    let memory = std::rc::Rc::new(Arena::new(1 << 20).unwrap());
    let region = PhysRange::new(PhysAddr::new(0x20_0000), 0x10_0000).unwrap();
    let beyond = Frames::new(rig.memory.clone(), region);
    let mut options = rig.options;
    options.stream_table = PhysRange::new(PhysAddr::new(0x8000), 8 << 10).unwrap();
    let unit = Unit::new(rig.model.clone(), memory, &beyond, &options);
    assert_eq!(unit.map(drop), Err(UnitError::Table(TableError::Memory)));
    assert_eq!(beyond.in_use(), 0);
}

#[test]
fn devices_beyond_the_stream_table() {
    let mut rig = Rig::new();
    rig.options.stream_id_bits = 8;
    let mut unit = rig.unit();
    unit.pass_through(RequesterId::new(0xff)).unwrap();
    for id in [0x100, 0x8000, 0xffff] {
        let device = RequesterId::new(id);
        assert_eq!(
            unit.pass_through(device),
            Err(UnitError::DeviceBeyondTable { device })
        );
    }
    let mut rig = Rig::new();
    rig.options.first_stream_id = u32::MAX - 2;
    let mut unit = rig.unit();
    let device = RequesterId::new(3);
    assert_eq!(
        unit.pass_through(device),
        Err(UnitError::DeviceBeyondTable { device })
    );
}

#[test]
fn domain_ids_beyond_the_tags() {
    // ASIDs and VMIDs of 8 bits.
    let rig = Rig::without(1 << 12 | 1 << 18);
    let mut unit = rig.unit();
    for (id, is_fit) in [(0xff, true), (0x100, false), (0xffff, false)] {
        let domain = DomainId::new(id);
        let (first, second) = (rig.stage1(domain), rig.stage2(domain));
        let expected = if is_fit {
            Ok(())
        } else {
            Err(UnitError::DomainId { domain })
        };
        assert_eq!(unit.attach(DEVICE, domain, &one(&first)), expected);
        let _ = unit.detach(DEVICE);
        assert_eq!(unit.attach(DEVICE, domain, &two(&second)), expected);
        let _ = unit.detach(DEVICE);
    }
    // VMID 0 is that of stage 1.
    let domain = DomainId::new(0);
    let (first, second) = (rig.stage1(domain), rig.stage2(domain));
    assert_eq!(unit.attach(DEVICE, domain, &one(&first)), Ok(()));
    let error = Err(UnitError::DomainId { domain });
    assert_eq!(unit.attach(OTHER, domain, &two(&second)), error);
    // An ASID is no VMID: both stages may not share an id.
    let first = rig.stage1(DOMAIN);
    let second = rig.stage2(DOMAIN);
    unit.attach(DEVICE, DOMAIN, &one(&first)).unwrap();
    let mismatch = UnitError::DomainMismatch { domain: DOMAIN };
    assert_eq!(unit.attach(OTHER, DOMAIN, &two(&second)), Err(mismatch));
}

#[test]
fn stages_and_granules_that_the_unit_lacks() {
    let [idr0, idr1, idr3, _] = IDENTIFICATION;
    let rig = Rig::without(2);
    let table = rig.stage1(DOMAIN);
    let error = Err(UnitError::Unsupported(Feature::Stage1));
    assert_eq!(rig.unit().attach(DEVICE, DOMAIN, &one(&table)), error);
    let nested = |table: &crate::rig::TestTable, context| Translation::Nested {
        table: PageTable::of(table),
        context: GuestPhysAddr::new(context),
    };
    let host = rig.stage2(DOMAIN);
    assert_eq!(rig.unit().attach(DEVICE, DOMAIN, &nested(&host, 0)), error);
    let rig = Rig::without(1);
    let table = rig.stage2(DOMAIN);
    let error = Err(UnitError::Unsupported(Feature::Stage2));
    assert_eq!(rig.unit().attach(DEVICE, DOMAIN, &two(&table)), error);
    assert_eq!(rig.unit().attach(DEVICE, DOMAIN, &nested(&table, 0)), error);
    let rig = Rig::with([idr0, idr1, idr3, 0x64]);
    let error = Err(UnitError::Unsupported(Feature::Granule(PageSize::Size4K)));
    let (first, second) = (rig.stage1(DOMAIN), rig.stage2(DOMAIN));
    assert_eq!(rig.unit().attach(DEVICE, DOMAIN, &one(&first)), error);
    assert_eq!(rig.unit().attach(DEVICE, DOMAIN, &two(&second)), error);
}

/// A guest's stage 1 can select attributes that bypass the CPU caches.
#[test]
fn guests_need_coherent_devices() {
    let mut rig = Rig::new();
    rig.options.coherent_guests = false;
    let mut unit = rig.unit();
    let table = rig.stage2(DOMAIN);
    let nested = Translation::Nested {
        table: PageTable::of(&table),
        context: GuestPhysAddr::new(0x1_0000),
    };
    let error = UnitError::Unsupported(Feature::CoherentGuests);
    assert_eq!(unit.attach(DEVICE, DOMAIN, &nested), Err(error));
    assert_eq!(rig.access(DEVICE, 0x1000), None);
    unit.attach(DEVICE, DOMAIN, &two(&table)).unwrap();
    unit.detach(DEVICE).unwrap();

    let forced = PageTable {
        forced_write_back: true,
        ..PageTable::of(&table)
    };
    let nested = Translation::Nested {
        table: forced,
        context: GuestPhysAddr::new(0x1_0000),
    };
    for translation in [Translation::Stage2(forced), nested] {
        let error = UnitError::Unsupported(Feature::ForcedWriteBack);
        assert_eq!(unit.attach(DEVICE, DOMAIN, &translation), Err(error));
    }
}

#[test]
fn tables_that_no_entry_describes() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let table = |width, level, granule, root| PageTable {
        root: PhysAddr::new(root),
        width,
        level: Level::new(level).unwrap(),
        granule,
        forced_write_back: false,
    };
    let four = PageSize::Size4K;
    let width = |width| Err(UnitError::Width { width });
    let start = |width, level| {
        Err(UnitError::StartLevel {
            width,
            level: Level::new(level).unwrap(),
        })
    };
    let root = |at| {
        Err(UnitError::Root {
            at: PhysAddr::new(at),
        })
    };
    let stage1 = [
        (table(49, 5, four, 0), width(49)),
        (table(24, 2, four, 0), width(24)),
        (table(39, 2, four, 0), start(39, 2)),
        (table(39, 4, four, 0), start(39, 4)),
        (table(0, 3, four, 0), width(0)),
        (table(u32::MAX, 3, four, 0), width(u32::MAX)),
        (table(39, 3, four, 0x60_0800), root(0x60_0800)),
        (table(39, 3, four, 1 << 44), root(1 << 44)),
        (table(32, 3, four, 0x60_0010), root(0x60_0010)),
    ];
    for (table, expected) in stage1 {
        let attached = unit.attach(DEVICE, DOMAIN, &Translation::Stage1(table));
        assert_eq!(attached, expected, "{table:?}");
    }
    let stage2 = [
        (table(45, 4, four, 0), width(45)),
        (table(44, 3, four, 0), start(44, 3)),
        (table(29, 1, four, 0), start(29, 1)),
        (table(43, 2, four, 0), start(43, 2)),
        // Sixteen concatenated tables are aligned to their size.
        (table(43, 3, four, 0x60_8000), root(0x60_8000)),
        (table(40, 3, four, 0x60_1000), root(0x60_1000)),
        (table(43, 3, four, 0x60_0000), Ok(())),
    ];
    for (table, expected) in stage2 {
        let attached = unit.attach(DEVICE, DOMAIN, &Translation::Stage2(table));
        assert_eq!(attached, expected, "{table:?}");
    }
    unit.detach(DEVICE).unwrap();
    for at in [0x1020, 1 << 39, u64::MAX] {
        let nested = Translation::Nested {
            table: table(39, 3, four, 0x60_0000),
            context: GuestPhysAddr::new(at),
        };
        assert_eq!(unit.attach(DEVICE, DOMAIN, &nested), root(at));
    }
    assert_eq!(rig.access(DEVICE, IOVA), None);
}

/// The highest start level of each granule needs a unit with enough physical address bits (Arm ARM,
/// `AArch64.S2InvalidSL`), although the width alone would fit.
#[test]
fn start_levels_of_small_units() {
    let [idr0, idr1, idr3, _] = IDENTIFICATION;
    let (four, sixteen) = (PageSize::Size4K, PageSize::Size16K);
    // OAS of 40, 42, 44 and 48 bits.
    for (oas, width, level, granule, is_fit) in [
        (2, 40, 4, four, false),
        (3, 42, 4, four, false),
        (4, 42, 4, four, true),
        (5, 48, 4, four, true),
        (3, 42, 3, four, true),
        (2, 40, 3, sixteen, false),
        (3, 40, 3, sixteen, true),
        (2, 40, 2, sixteen, true),
    ] {
        let rig = Rig::with([idr0, idr1, idr3, 0x70 | oas]);
        let table = PageTable {
            root: PhysAddr::new(0x60_0000),
            width,
            level: Level::new(level).unwrap(),
            granule,
            forced_write_back: false,
        };
        let expected = if is_fit {
            Ok(())
        } else {
            let level = table.level;
            Err(UnitError::StartLevel { width, level })
        };
        let attached = rig
            .unit()
            .attach(DEVICE, DOMAIN, &Translation::Stage2(table));
        assert_eq!(attached, expected, "OAS {oas}: {table:?}");
    }
}

/// Errors name what they concern, in words of IHI 0070, and what to do.
#[test]
fn errors_are_sentences() {
    let (device, domain) = (DEVICE, DomainId::new(0));
    let at = PhysAddr::new(0x1800);
    let level = Level::new(4).unwrap();
    let unsupported = UnitError::Unsupported;
    for (error, text) in [
        (UnitError::Absent, "no unit answers at the registers"),
        (
            unsupported(Feature::Stage1),
            "the unit does not support stage 1",
        ),
        (
            unsupported(Feature::Stage2),
            "the unit does not support stage 2",
        ),
        (
            unsupported(Feature::Aarch64),
            "the unit does not support tables of VMSAv8-64",
        ),
        (
            unsupported(Feature::LittleEndian),
            "the unit does not support tables with little-endian entries",
        ),
        (
            unsupported(Feature::TerminateModel),
            "the unit does not support termination of faulting transactions",
        ),
        (
            unsupported(Feature::WritableBases),
            "the unit does not support tables and queues at addresses that the driver selects",
        ),
        (
            unsupported(Feature::Granule(PageSize::Size16K)),
            "the unit does not support a granule of 16K",
        ),
        (
            unsupported(Feature::ForcedWriteBack),
            "the unit does not support a stage 2 that forces write-back (S2FWB)",
        ),
        (
            unsupported(Feature::CoherentGuests),
            "a guest's stage 1 can bypass the CPU caches: use a table with forced write-back, or \
             set Options::coherent_guests if the platform prevents it",
        ),
        (
            UnitError::TimedOut {
                register: Register::Cr0,
            },
            "the unit did not complete the operation of SMMU_CR0",
        ),
        (
            UnitError::StreamIdBits { bits: 17 },
            "the unit has fewer than 17 bits of stream ids",
        ),
        (
            UnitError::StreamTable { bytes: 8192 },
            "the stream table needs 8192 bytes, aligned to its size",
        ),
        (
            UnitError::QueueEntries {
                queue: UnitQueue::Commands,
                entries: 8,
                fewest: 16,
                most: 256,
            },
            "the command queue cannot have 8 entries: a power of two from 16 to 256",
        ),
        (
            UnitError::QueueEntries {
                queue: UnitQueue::Events,
                entries: 1,
                fewest: 2,
                most: 128,
            },
            "the event queue cannot have 1 entries: a power of two from 2 to 128",
        ),
        (
            UnitError::DeviceBeyondTable { device },
            "the stream table does not reach 00:04.0",
        ),
        (
            UnitError::DomainId { domain },
            "the unit cannot tag entries with domain-id 0",
        ),
        (
            UnitError::Width { width: 49 },
            "the unit does not translate addresses of 49 bits",
        ),
        (
            UnitError::StartLevel { width: 39, level },
            "a walk of 39 bits cannot begin at a table of 4 levels",
        ),
        (
            UnitError::Root { at },
            "the root at 0x1800 is misaligned or too wide",
        ),
        (
            UnitError::DomainMismatch { domain },
            "domain 0 is in use with another table",
        ),
        (UnitError::NotAttached { device }, "00:04.0 is not attached"),
    ] {
        assert_eq!(error.to_string(), text);
    }
}
