//! Tables that point to themselves or outside memory, or hold arbitrary words.

use proptest::prelude::*;
use ringfence_hw::{MAX_TRANSLATED_BYTES, UnitConfig, VtdUnit};
use ringfence_memory::fake::SparseMemory;
use ringfence_pgtable::{Context, Cursor, Levels, SecondStage, TranslationType, walk};
use ringfence_types::FaultReason::{BadLength, NotPresent, ReservedBit, TableAccess};
use ringfence_types::{Access, Iova, PageSize, PhysAddr, PhysMemory};
use std::sync::atomic::Ordering;

use crate::rig::{A, NIC, READ, RW, Rig, WRITE, arena, format, roomy, seen};

#[test]
fn bad_entries_at_every_level() {
    let outside = 0x000f_ffff_ffff_f003;
    let cases = [
        ("absent", 4, 0, NotPresent),
        ("absent", 3, 0, NotPresent),
        ("absent", 2, 0x7000, NotPresent),
        ("absent", 1, 0x7000, NotPresent),
        ("outside", 4, outside, TableAccess),
        ("outside", 3, outside, TableAccess),
        ("outside", 2, outside, TableAccess),
        ("512 GiB page", 4, 0x83, ReservedBit),
        ("misaligned 1 GiB page", 3, 0x2000_0083, ReservedBit),
        ("misaligned 2 MiB page", 2, 0x1083, ReservedBit),
        ("SNP in a table entry", 3, 0x7803, ReservedBit),
        ("TM in a leaf", 1, 1 << 62 | 0x7003, ReservedBit),
    ];
    let mem = arena();
    for config in [roomy(), UnitConfig::UNCACHED] {
        for (name, level, raw, reason) in cases {
            let mut rig = Rig::new(&mem, &config);
            let table = rig.domain_of(format(Levels::Four, PageSize::Size1G), A, &[NIC]);
            rig.map(&table, 0x1000, 0x7000, 2, RW);
            rig.poke(&table, level, 0x1000, |_| raw);
            for _ in 0..2 {
                let outcome = rig.dma(NIC, 0x1800, 8, READ);
                assert_eq!(outcome, Err((0x1800, reason)), "{name} at level {level}");
            }
        }
    }
}

/// Every address translates to the root, in as many steps as the table has levels. The longest
/// allowed access still terminates.
#[test]
fn a_table_that_points_at_itself_is_bounded() {
    let mem = arena();
    let mut rig = Rig::new(&mem, &roomy());
    let table = rig.domain(A, &[NIC]);
    let root = table.root();
    for word in mem.table(root).unwrap() {
        word.store(root.get() | 3, Ordering::Relaxed);
    }
    let at = 0x1234_5678_9abc;
    assert_eq!(
        rig.dma(NIC, at, 4, WRITE),
        Ok(vec![(root.get() + 0xabc, 4)])
    );
    let pages = MAX_TRANSLATED_BYTES / 4096;
    let ranges = rig.dma(NIC, 0, MAX_TRANSLATED_BYTES, READ).unwrap();
    assert_eq!(ranges.len() as u64, pages);
    assert!(ranges.iter().all(|range| *range == (root.get(), 4096)));
    assert_eq!(
        rig.dma(NIC, 0, MAX_TRANSLATED_BYTES + 1, READ),
        Err((0, BadLength))
    );
}

/// Pages of hostile memory: tables that mostly point to each other.
const ROOTS: u64 = 0x1000;
const FIRST: u64 = 0x10_0000;
const COUNT: u64 = 6;

fn entry() -> impl Strategy<Value = u64> {
    let page = (0..COUNT + 1).prop_map(|page| FIRST + page * 0x1000);
    prop_oneof![
        4 => (page, 0..4_u64).prop_map(|(page, rights)| page | rights),
        1 => (0..COUNT, any::<u64>()).prop_map(|(page, noise)| {
            (FIRST + page * 0x1000) | 3 | (noise & 0xfff0_0000_0000_0ffc)
        }),
        1 => (0..8_u64).prop_map(|gib| gib << 30 | 0x83),
        1 => any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(crate::rig::cases(200, 0x7461_626c_6573))]

    /// While memory does not change, caches do not affect results: each access has the outcome of a
    /// plain walk.
    #[test]
    fn arbitrary_memory_agrees_with_a_walk(
        entries in prop::collection::vec((0..COUNT, 0..8_u64, entry()), 0..40),
        accesses in prop::collection::vec(
            (
                any::<[u8; 5]>(),
                0..0x1000_u64,
                1..0x3000_u64,
                any::<bool>(),
            ),
            1..40,
        ),
        levels in prop::sample::select(&Levels::ALL[..]),
    ) {
        let mut mem = SparseMemory::new();
        for page in 0..COUNT {
            mem.add(PhysAddr::new(FIRST + page * 0x1000));
        }
        for (page, index, raw) in entries {
            mem.set(PhysAddr::new(FIRST + page * 0x1000 + index * 8), raw);
        }
        let root = PhysAddr::new(FIRST);
        let context = Context { domain: A, translation: TranslationType::Table { root, levels } };
        let [low, high] = context.encode();
        mem.set(PhysAddr::new(ROOTS + u64::from(NIC.bus()) * 16), 0x2001);
        mem.set(PhysAddr::new(0x2000 + u64::from(NIC.devfn()) * 16), low);
        mem.set(PhysAddr::new(0x2008 + u64::from(NIC.devfn()) * 16), high);
        let mut unit = VtdUnit::vtd(&roomy());
        unit.set_root_table(PhysAddr::new(ROOTS));
        unit.enable();
        let format = SecondStage::new(levels).with_pages_up_to(PageSize::Size1G);
        for (indices, offset, bytes, write) in accesses {
            let access = if write { Access::Write } else { Access::Read };
            // Small indices at every level, so that paths are shared.
            let page = indices.iter().enumerate().fold(0, |page, (level, index)| {
                page | u64::from(index % 8) << (9 * level)
            });
            let iova = Iova::new((page << 12 | offset) & ((1 << levels.width()) - 1));
            let mut expected = Ok(Vec::new());
            let mut at = iova.get();
            let last = iova.get() + bytes - 1;
            while at <= last {
                let end = (at | 0xfff).min(last);
                match walk(&format, &mem, Cursor::root(&format, root), Iova::new(at), |_| {}) {
                    Ok(leaf) if leaf.permissions.allows(access) => {
                        let pa = leaf.translate(Iova::new(at)).get();
                        if let Ok(ranges) = &mut expected {
                            match ranges.last_mut() {
                                Some((start, bytes)) if *start + *bytes == pa => {
                                    *bytes += end - at + 1
                                }
                                _ => ranges.push((pa, end - at + 1)),
                            }
                        }
                    }
                    Ok(_) => {
                        let denied = ringfence_pgtable::WalkErrorKind::NoPermission;
                        expected = Err((at, denied.fault_reason(access)));
                        break;
                    }
                    Err(error) => {
                        expected = Err((at, error.kind.fault_reason(access)));
                        break;
                    }
                }
                at = end + 1;
            }
            let result = unit.translate(&mem, NIC, iova, bytes, access);
            prop_assert_eq!(seen(result.map(|translation| translation.to_vec())), expected);
        }
    }
}
