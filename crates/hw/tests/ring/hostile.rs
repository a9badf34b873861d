//! Rings with arbitrary addresses and sizes, and entries with arbitrary bits.

use proptest::prelude::*;
use ringfence_hw::{FixedLogic, Prefetch, RingLogic, RingUnit, RingUnitConfig, Translate};
use ringfence_memory::fake::SparseMemory;
use ringfence_pgtable::{Context, TranslationType};
use ringfence_types::{Access, DomainId, Iova, PhysAddr};

use crate::rig::{NIC, cases, pa, roomy};
use crate::ring_logic::{ByValue, LogicAsPublished};

/// Pages of hostile memory. The rDEVICE is at the start of the first page; all other structures are
/// anywhere.
const ROOTS: u64 = 0x1000;
const FIRST: u64 = 0x10_0000;
const COUNT: u64 = 4;

/// A word: an address inside the pages, a size, a valid entry, or anything.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (0..COUNT * 256 + 16).prop_map(|entry| FIRST + entry * 16),
        2 => 0..10_u64,
        3 => (1..0x200_u64, 0..4_u64).prop_map(|(size, dir)| size | dir << 30 | 1 << 32),
        1 => any::<u64>(),
    ]
}

fn memory(words: &[(u64, u64, u64)]) -> SparseMemory {
    let mut mem = SparseMemory::new();
    for page in 0..COUNT {
        mem.add(pa(FIRST + page * 0x1000));
    }
    for (page, index, raw) in words {
        mem.set(pa(FIRST + page * 0x1000 + index * 8), *raw);
    }
    let [low, high] = Context {
        domain: DomainId::new(1),
        translation: TranslationType::Rings { device: pa(FIRST) },
    }
    .encode();
    mem.set(pa(ROOTS + u64::from(NIC.bus()) * 16), 0x2001);
    mem.set(pa(0x2000 + u64::from(NIC.devfn()) * 16), low);
    mem.set(pa(0x2008 + u64::from(NIC.devfn()) * 16), high);
    mem
}

fn unit<L: RingLogic>(config: &RingUnitConfig) -> RingUnit<L> {
    let mut unit = RingUnit::new(config);
    unit.set_root_table(PhysAddr::new(ROOTS));
    unit.enable();
    unit
}

proptest! {
    #![proptest_config(cases(400, 0x686f_7374))]

    /// While memory does not change, fixed caches do not affect results. Published logic may
    /// differ, but every access terminates.
    #[test]
    fn arbitrary_memory_agrees_with_an_uncached_unit(
        words in prop::collection::vec((0..COUNT, 0..32_u64, word()), 0..100),
        accesses in prop::collection::vec(
            (
                0..6_u64,
                0..10_u64,
                0..0x200_u64,
                0..0x100_u64,
                any::<bool>(),
                any::<Option<u64>>(),
            ),
            1..60,
        ),
    ) {
        let mem = memory(&words);
        let mut reference = unit::<FixedLogic>(&RingUnitConfig::UNCACHED);
        let mut cached = [Prefetch::Immediate, Prefetch::Deferred, Prefetch::Absent]
            .map(|when| unit::<FixedLogic>(&roomy(when)));
        let mut as_published = unit::<LogicAsPublished>(&roomy(Prefetch::Immediate));
        let mut by_value = unit::<ByValue>(&roomy(Prefetch::Deferred));
        for (ring, slot, offset, bytes, write, anywhere) in accesses {
            let access = if write { Access::Write } else { Access::Read };
            let iova = Iova::new(match anywhere {
                Some(raw) if raw % 8 == 0 => raw >> 3,
                _ => ring << 48 | slot << 30 | offset,
            });
            let expected = reference
                .translate(&mem, NIC, iova, bytes, access)
                .map(|found| found.to_vec());
            for unit in &mut cached {
                let seen = unit
                    .translate(&mem, NIC, iova, bytes, access)
                    .map(|found| found.to_vec());
                prop_assert_eq!(&seen, &expected);
            }
            if slot % 3 == 0 {
                cached[1].complete_prefetch(&mem);
                by_value.complete_prefetch(&mem);
            }
            let _ = as_published.translate(&mem, NIC, iova, bytes, access);
            let _ = by_value.translate(&mem, NIC, iova, u64::MAX - bytes, access);
            prop_assert!(cached[1].prefetches_waiting() <= 32);
        }
    }
}
