//! Property: both stages agree with two maps from pages to pages.

use std::collections::BTreeMap;

use proptest::prelude::*;
use ringfence_hw::{NestedInvalidation, NestedUnitConfig};
use ringfence_pgtable::Levels;
use ringfence_types::{Access, DomainId, FaultReason, Permissions, PfnRange};

use super::{CACHED, Nested, UNCACHED, host_of, pasid};
use crate::rig::{A, NIC, READ, RW, Seen, WRITE, arena, pages_at};

#[derive(Debug, Clone)]
enum Step {
    MapFirst(u64, u64, Permissions),
    UnmapFirst(u64),
    MapSecond(u64, Permissions),
    UnmapSecond(u64),
    Access(u64, u64, u64, Access),
}

fn step() -> impl Strategy<Value = Step> {
    let both = prop::sample::select(&[Permissions::READ, RW][..]);
    let any = prop::sample::select(&[Permissions::READ, Permissions::WRITE, RW][..]);
    let access = prop::sample::select(&[READ, WRITE][..]);
    prop_oneof![
        3 => (0..8_u64, 0..8_u64, both).prop_map(|(iova, guest, rights)| {
            Step::MapFirst(iova, guest, rights)
        }),
        2 => (0..8_u64).prop_map(Step::UnmapFirst),
        3 => (0..8_u64, any).prop_map(|(guest, rights)| Step::MapSecond(guest, rights)),
        2 => (0..8_u64).prop_map(Step::UnmapSecond),
        8 => (0..8_u64, 0..4096_u64, 1..9000_u64, access)
            .prop_map(|(page, offset, bytes, access)| Step::Access(page, offset, bytes, access)),
    ]
}

/// The two stages, modelled without tables.
#[derive(Default)]
struct Pages {
    first: BTreeMap<u64, (u64, Permissions)>,
    second: BTreeMap<u64, Permissions>,
}

impl Pages {
    fn access(&self, iova: u64, bytes: u64, access: Access) -> Seen {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut at = iova;
        let last = iova + bytes - 1;
        let denied = match access {
            Access::Read => FaultReason::ReadDenied,
            Access::Write => FaultReason::WriteDenied,
        };
        while at <= last {
            let end = (at | 0xfff).min(last);
            let (guest, first) = self
                .first
                .get(&(at >> 12))
                .ok_or((at, FaultReason::NotPresent))?;
            if !first.allows(access) {
                return Err((at, denied));
            }
            let second = self
                .second
                .get(guest)
                .ok_or((at, FaultReason::NotPresent))?;
            if !second.allows(access) {
                return Err((at, denied));
            }
            let start = host_of(guest << 12) + (at & 0xfff);
            match ranges.last_mut() {
                Some((first, bytes)) if *first + *bytes == start => *bytes += end - at + 1,
                _ => ranges.push((start, end - at + 1)),
            }
            at = end + 1;
        }
        Ok(ranges)
    }
}

/// Runs `steps`; returns the number of accesses that differ from the model.
fn run(steps: &[Step], config: &NestedUnitConfig, invalidate: [bool; 2]) -> usize {
    let mem = arena();
    let mut nested = Nested::new(&mem, config, Levels::Four);
    let first = nested.first(Levels::Four);
    nested.attach(NIC, 1, &first, Levels::Four);
    let mut pages = Pages::default();
    let mut differences = 0;
    for step in steps {
        match *step {
            Step::MapFirst(iova, guest, rights) => {
                if pages.first.insert(iova, (guest, rights)).is_some() {
                    nested.unmap_first(&first, iova << 12);
                    flush_first(&mut nested, iova, invalidate[0]);
                }
                nested.map_first(&first, iova << 12, guest << 12, rights);
            }
            Step::UnmapFirst(iova) => {
                if pages.first.remove(&iova).is_some() {
                    nested.unmap_first(&first, iova << 12);
                    flush_first(&mut nested, iova, invalidate[0]);
                }
            }
            Step::MapSecond(guest, rights) => {
                if pages.second.insert(guest, rights).is_some() {
                    nested.unmap_second(guest << 12);
                    flush_second(&mut nested, guest, invalidate[1]);
                }
                nested.map_second(guest << 12, rights);
            }
            Step::UnmapSecond(guest) => {
                if pages.second.remove(&guest).is_some() {
                    nested.unmap_second(guest << 12);
                    flush_second(&mut nested, guest, invalidate[1]);
                }
            }
            Step::Access(page, offset, bytes, access) => {
                let iova = page << 12 | offset;
                let expected = pages.access(iova, bytes, access);
                let found = nested.dma(NIC, iova, bytes, access);
                differences += usize::from(found != expected);
            }
        }
    }
    differences
}

fn flush_first(nested: &mut Nested<'_>, iova: u64, invalidate: bool) {
    if invalidate {
        let range: PfnRange = pages_at(iova << 12, 1);
        let domain: DomainId = A;
        nested
            .unit
            .invalidate_nested(&NestedInvalidation::FirstStagePages {
                domain,
                pasid: pasid(1),
                range,
            });
    }
}

fn flush_second(nested: &mut Nested<'_>, guest: u64, invalidate: bool) {
    if invalidate {
        let range = pages_at(guest << 12, 1);
        nested
            .unit
            .invalidate_nested(&NestedInvalidation::SecondStagePages { domain: A, range });
    }
}

proptest! {
    #![proptest_config(crate::rig::cases(96, 0x6e65_7374))]

    #[test]
    fn both_stages_agree_with_the_model(steps in prop::collection::vec(step(), 1..150)) {
        for (iotlb, second_stage) in [(0, 0), (2, 0), (0, 3), (64, 64)] {
            let config = NestedUnitConfig { iotlb, second_stage, ..UNCACHED };
            prop_assert_eq!(run(&steps, &config, [true, true]), 0, "{:?}", config);
        }
    }
}

/// Without the invalidations of one stage, the property fails: it is not vacuous.
#[test]
fn a_missing_invalidation_of_either_stage_shows() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let strategy = prop::collection::vec(step(), 300..301);
    let mut differences = [0; 2];
    // The sequence depends on the width of usize, so there are enough rounds for any sequence.
    for _ in 0..24 {
        let steps = strategy.new_tree(&mut runner).unwrap().current();
        differences[0] += run(&steps, &CACHED, [false, true]);
        differences[1] += run(&steps, &CACHED, [true, false]);
    }
    assert!(
        differences.iter().all(|count| *count > 5),
        "{differences:?}"
    );
}
