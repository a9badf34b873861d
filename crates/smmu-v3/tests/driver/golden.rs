//! Words of entries, commands and registers, computed by hand from IHI 0070.

use ringfence_pgtable::{Arm, Granule4K, Level};
use ringfence_smmu_v3::{Capabilities, PageTable, StallModel, Translation, UnitError};
use ringfence_types::{
    CachedLevels, DomainId, GuestPhysAddr, Invalidation, PageSize, PhysAddr, RequesterId,
};

use crate::model::{Model, STRTAB_BASE, STRTAB_BASE_CFG};
use crate::rig::{
    COHERENT, DEVICE, DOMAIN, FAR, IDENTIFICATION, IOVA, OTHER, PA, Rig, TWO_LEVELS, WIDTH,
    all_levels, invalidate, one, pages, two,
};

const STREAM: u64 = 0x20;

fn entry(model: &Model, stream: u64) -> [u64; 8] {
    model.entry_in_memory(stream).unwrap()
}

/// Words of registers, section 6.3.
#[test]
fn capabilities_are_decoded() {
    let ours = Capabilities::decode(IDENTIFICATION.map(|raw| raw as u32));
    assert!(ours.stage1 && ours.stage2 && ours.aarch64 && ours.coherent && ours.two_levels);
    assert!(ours.range_invalidation && ours.little_endian);
    assert!(!ours.aarch32 && !ours.ats && !ours.msi && !ours.broadcast);
    assert_eq!(ours.stall_model, StallModel::Selectable);
    assert!(!ours.queues_preset && !ours.tables_preset);
    assert_eq!((ours.asid_bits, ours.vmid_bits), (16, 16));
    assert_eq!((ours.stream_id_bits, ours.address_bits), (16, 44));
    assert_eq!((ours.command_queue, ours.event_queue), (8, 7));
    assert_eq!(ours.intermediate_address_bits(), 44);
    assert!(
        [PageSize::Size4K, PageSize::Size16K, PageSize::Size64K]
            .iter()
            .all(|g| ours.granule(*g))
    );
    // Stage 1 with 8-bit ASIDs, VMSAv8-32 too, ATS, MSI, BTM, stalls forced, big-endian, linear.
    let idr0 = 1 << 1 | 0b11 << 2 | 1 << 5 | 1 << 10 | 1 << 13 | 3 << 21 | 2 << 24;
    let other = Capabilities::decode([idr0, 0x6000_0000 | 0x25, 0, 0x21]);
    assert!(other.stage1 && other.aarch32 && other.broadcast && other.ats && other.msi);
    assert!(other.queues_preset && other.tables_preset);
    let models = [
        StallModel::Selectable,
        StallModel::Never,
        StallModel::Forced,
        StallModel::Forced,
    ];
    for (field, model) in models.into_iter().enumerate() {
        let unit = Capabilities::decode([(field as u32) << 24, 0, 0, 0]);
        assert_eq!(unit.stall_model, model);
    }
    assert!(!other.stage2 && !other.coherent && !other.two_levels && !other.little_endian);
    assert_eq!((other.asid_bits, other.vmid_bits), (8, 8));
    assert_eq!((other.stream_id_bits, other.address_bits), (0x25, 36));
    assert_eq!(other.intermediate_address_bits(), 40);
    assert!(other.granule(PageSize::Size16K) && !other.granule(PageSize::Size4K));
    let widths = (0..8).map(|oas| Capabilities::decode([0, 0, 0, oas]).address_bits);
    assert!(widths.eq([32, 36, 40, 42, 44, 48, 52, 56]));
}

/// Sections 5.2 and 5.4.
#[test]
fn a_stage_1_entry_and_its_context_descriptor() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let table = rig.stage1(DOMAIN);
    unit.attach(DEVICE, DOMAIN, &one(&table)).unwrap();
    let words = entry(&rig.model, STREAM);
    let context = words[0] & !0x3f;
    assert_eq!(words, [context | 0xb, 0x1000_0000_00d4, 0, 0, 0, 0, 0, 0]);
    let words: [u64; 8] = rig.model.words(context);
    let root = table.root().get();
    assert_eq!(words, [0x0005_e204_c000_3519, root, 0, 0xff, 0, 0, 0, 0]);
}

#[test]
fn a_stage_2_entry() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let table = rig.stage2(DOMAIN);
    unit.attach(DEVICE, DOMAIN, &two(&table)).unwrap();
    let root = table.root().get();
    let words = entry(&rig.model, STREAM);
    assert_eq!(
        words,
        [
            0xd,
            0x1000_0000_0000,
            0x044c_3559_0000_0005,
            root,
            0,
            0,
            0,
            0
        ]
    );
}

#[test]
fn entries_without_tables_and_of_both_stages() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    unit.attach(DEVICE, DOMAIN, &Translation::Abort).unwrap();
    assert_eq!(entry(&rig.model, STREAM), [1, 0, 0, 0, 0, 0, 0, 0]);
    unit.pass_through(DEVICE).unwrap();
    assert_eq!(
        entry(&rig.model, STREAM),
        [9, 0x1000_0000_0000, 0, 0, 0, 0, 0, 0]
    );
    let table = rig.stage2(DOMAIN);
    let nested = Translation::Nested {
        table: PageTable::of(&table),
        context: GuestPhysAddr::new(0x1_2340),
    };
    unit.attach(DEVICE, DOMAIN, &nested).unwrap();
    let root = table.root().get();
    let words = [
        0x1_234f,
        0x1000_0808_00d4,
        0x044c_3559_0000_0005,
        root,
        0,
        0,
        0,
        0,
    ];
    assert_eq!(entry(&rig.model, STREAM), words);
}

/// IDR3.FWB, S2FWB of the entry (section 5.2), and the memory type of the leaf.
#[test]
fn a_table_that_forces_write_back() {
    const FWB: u64 = 1 << 8;
    let [idr0, idr1, idr3, idr5] = IDENTIFICATION;
    let mut rig = Rig::with([idr0, idr1, idr3 | FWB, idr5]);
    rig.options.coherent_guests = false;
    let mut unit = rig.unit();
    assert!(unit.capabilities().forced_write_back);
    let format = Arm::<Granule4K>::stage2(WIDTH).unwrap();
    let table = rig.table_of(format.with_forced_write_back(), DOMAIN);
    rig.map(&table, IOVA, PA, 1);
    let nested = Translation::Nested {
        table: PageTable::of(&table),
        context: GuestPhysAddr::new(0x1_2340),
    };
    for (translation, word) in [(two(&table), 0x1000_0200_0000), (nested, 0x1000_0a08_00d4)] {
        unit.attach(DEVICE, DOMAIN, &translation).unwrap();
        assert_eq!(entry(&rig.model, STREAM)[1], word);
        unit.detach(DEVICE).unwrap();
    }
    // Domains must agree on the meaning of the leaves.
    let other = PageTable {
        forced_write_back: false,
        ..PageTable::of(&table)
    };
    unit.attach(DEVICE, DOMAIN, &two(&table)).unwrap();
    let mismatch = unit.attach(OTHER, DOMAIN, &Translation::Stage2(other));
    assert_eq!(mismatch, Err(UnitError::DomainMismatch { domain: DOMAIN }));
}

/// A unit that does not snoop reads tables from memory: no attribute is cacheable.
#[test]
fn entries_of_a_unit_that_does_not_snoop() {
    let rig = Rig::without(COHERENT);
    let mut unit = rig.unit();
    let (first, second) = (rig.stage1(DOMAIN), rig.stage2(DomainId::new(6)));
    unit.attach(DEVICE, DOMAIN, &one(&first)).unwrap();
    unit.attach(OTHER, DomainId::new(6), &two(&second)).unwrap();
    let words = entry(&rig.model, STREAM);
    assert_eq!(words[1], 0x1000_0000_0000);
    assert_eq!(rig.model.load(words[0] & !0x3f), 0x0005_e204_c000_0019);
    assert_eq!(entry(&rig.model, 0x28)[2], 0x044c_0059_0000_0006);
}

/// Granules, start levels and sizes of stage 2, and the fields TG0 and T0SZ of stage 1.
#[test]
fn fields_of_all_granules() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let root = PhysAddr::new(0x60_0000);
    let table = |width, level, granule| PageTable {
        root,
        width,
        level: Level::new(level).unwrap(),
        granule,
        forced_write_back: false,
    };
    // Granule, width, levels, S2T0SZ, S2SL0, S2TG.
    let stage2 = [
        (PageSize::Size4K, 44, 4, 20, 2, 0),
        (PageSize::Size4K, 30, 2, 34, 0, 0),
        (PageSize::Size16K, 40, 3, 24, 2, 2),
        (PageSize::Size16K, 36, 2, 28, 1, 2),
        (PageSize::Size64K, 42, 2, 22, 1, 1),
        (PageSize::Size64K, 44, 3, 20, 2, 1),
        (PageSize::Size64K, 29, 1, 35, 0, 1),
    ];
    for (granule, width, levels, size, start, code) in stage2 {
        unit.attach(
            DEVICE,
            DOMAIN,
            &Translation::Stage2(table(width, levels, granule)),
        )
        .unwrap();
        let control = entry(&rig.model, STREAM)[2];
        let fields = (control >> 32 & 0x3f, control >> 38 & 3, control >> 46 & 3);
        assert_eq!(fields, (size, start, code), "{granule}, {width}");
    }
    // Granule, width, levels, T0SZ, TG0.
    let stage1 = [
        (PageSize::Size4K, 48, 4, 16, 0),
        (PageSize::Size4K, 25, 2, 39, 0),
        (PageSize::Size16K, 47, 3, 17, 2),
        (PageSize::Size64K, 48, 3, 16, 1),
    ];
    for (granule, width, levels, size, code) in stage1 {
        unit.attach(
            DEVICE,
            DOMAIN,
            &Translation::Stage1(table(width, levels, granule)),
        )
        .unwrap();
        let context = entry(&rig.model, STREAM)[0] & !0x3f;
        let control = rig.model.load(context);
        assert_eq!(
            (control & 0x3f, control >> 6 & 3),
            (size, code),
            "{granule}, {width}"
        );
    }
}

/// Sections 5.1, 6.3.24 and 6.3.25.
#[test]
fn stream_tables() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    assert_eq!(rig.model.register(STRTAB_BASE), 0xc0_0000);
    // FMT 01, SPLIT 6, LOG2SIZE 16.
    assert_eq!(rig.model.register(STRTAB_BASE_CFG), 0x1_0190);
    unit.pass_through(FAR).unwrap();
    let descriptor = rig.model.load(0xc0_0000 + 8 * (0x1234 >> 6));
    // Span 7: 64 entries.
    assert_eq!(descriptor & 0x3f, 7);
    assert_eq!(rig.model.load((descriptor & !0x3f) + 64 * 0x34), 9);

    let rig = Rig::without(TWO_LEVELS);
    let mut unit = rig.unit();
    assert_eq!(rig.model.register(STRTAB_BASE_CFG), 16);
    unit.pass_through(FAR).unwrap();
    assert_eq!(rig.model.load(0xc0_0000 + 64 * 0x1234), 9);
}

/// Bytes of the first or only level.
#[test]
fn sizes_of_stream_tables() {
    let [two_levels, linear] = [0x0800_0000, 0].map(|idr0| Capabilities::decode([idr0, 0, 0, 0]));
    for (bits, frame, bytes) in [
        (16, PageSize::Size4K, 8 << 10),
        (16, PageSize::Size16K, 8 << 8),
        (16, PageSize::Size64K, 8 << 6),
        (32, PageSize::Size4K, 8 << 26),
        (7, PageSize::Size4K, 64),
        (6, PageSize::Size4K, 64 << 6),
        (0, PageSize::Size4K, 64),
    ] {
        assert_eq!(
            two_levels.stream_table_bytes(bits, frame),
            bytes,
            "{bits} bits, {frame}"
        );
        assert_eq!(
            linear.stream_table_bytes(bits, frame),
            64 << bits,
            "{bits} bits"
        );
    }
}

/// Words of commands, chapter 4.
#[test]
fn commands() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let (first, second) = (rig.stage1(DOMAIN), rig.stage2(DomainId::new(6)));
    let sync = [0x46, 0];
    unit.attach(DEVICE, DOMAIN, &one(&first)).unwrap();
    let ste = |leaf| [0x20_0000_0003, leaf];
    assert_eq!(rig.commands(), [ste(0), sync, ste(1), sync]);
    unit.attach(OTHER, DomainId::new(6), &two(&second)).unwrap();
    rig.commands();

    let domain = DOMAIN;
    let other = DomainId::new(6);
    let unused = DomainId::new(0x1234);
    let cases: [(Invalidation, &[[u64; 2]]); 12] = [
        (
            pages(domain, IOVA, 1),
            &[[0x0005_0000_0000_0012, 0x4020_1001]],
        ),
        (
            all_levels(domain, IOVA, 1),
            &[[0x0005_0000_0000_0012, 0x4020_1000]],
        ),
        // 64 pages: 16 << 2.
        (
            pages(domain, IOVA, 64),
            &[[0x0005_0000_0020_f012, 0x4020_1401]],
        ),
        // 67 pages: 16 << 2, and 3.
        (
            pages(domain, IOVA, 67),
            &[
                [0x0005_0000_0020_f012, 0x4020_1401],
                [0x0005_0000_0000_2012, 0x4024_1401],
            ],
        ),
        (pages(other, IOVA, 1), &[[0x0006_0000_002a, 0x4020_1001]]),
        (
            all_levels(other, IOVA, 2),
            &[[0x0006_0000_102a, 0x4020_1400]],
        ),
        (Invalidation::Domain(domain), &[[0x0005_0000_0000_0011, 0]]),
        (Invalidation::Domain(other), &[[0x0006_0000_0028, 0]]),
        (
            Invalidation::Domain(unused),
            &[[0x1234_0000_0000_0011, 0], [0x1234_0000_0028, 0]],
        ),
        (Invalidation::Global, &[[0x30, 0]]),
        (
            Invalidation::Context(DEVICE),
            &[ste(1), sync, [0x0005_0000_0000_0011, 0]],
        ),
        (Invalidation::Context(RequesterId::new(0x99)), &[]),
    ];
    for (request, expected) in cases {
        invalidate(&mut unit, request);
        assert_eq!(rig.commands(), [expected, &[sync]].concat(), "{request:?}");
    }
    unit.detach(DEVICE).unwrap();
    let asid = [0x0005_0000_0000_0011, 0];
    assert_eq!(rig.commands(), [ste(1), sync, asid, sync]);
}

/// TG of a range follows the granule; the range begins at a granule.
#[test]
fn ranges_of_other_granules() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let root = PhysAddr::new(0x60_0000);
    for (granule, width, tg) in [(PageSize::Size16K, 47, 2), (PageSize::Size64K, 48, 3)] {
        let table = PageTable {
            root,
            width,
            level: Level::new(3).unwrap(),
            granule,
            forced_write_back: false,
        };
        unit.attach(DEVICE, DOMAIN, &Translation::Stage1(table))
            .unwrap();
        rig.commands();
        // One page of 4 KiB is within one granule.
        invalidate(&mut unit, pages(DOMAIN, IOVA, 1));
        assert_eq!(rig.commands()[0], [0x0005_0000_0000_0012, 0x4020_0001]);
        invalidate(&mut unit, pages(DOMAIN, IOVA, granule.bytes() / 4096));
        let range = [0x0005_0000_0000_1012, 0x4020_0001 | tg << 10];
        assert_eq!(rig.commands()[0], range, "{granule}");
    }
}

/// The levels of a request decide about Leaf.
#[test]
fn tables_of_higher_levels_are_invalidated_on_request() {
    let rig = Rig::new();
    let mut unit = rig.unit();
    let table = rig.stage1(DOMAIN);
    unit.attach(DEVICE, DOMAIN, &one(&table)).unwrap();
    for (levels, leaf) in [(CachedLevels::Leaves, 1), (CachedLevels::All, 0)] {
        rig.commands();
        let range = crate::rig::range(IOVA, 8);
        invalidate(
            &mut unit,
            Invalidation::Pages {
                domain: DOMAIN,
                range,
                levels,
            },
        );
        assert_eq!(rig.commands()[0][1] & 1, leaf);
    }
}
