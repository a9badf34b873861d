//! Random buffers through the cache: the device can access them while mapped, and no longer than
//! the bound.

use std::collections::HashMap;

use proptest::prelude::*;
use ringfence_dma::{Mapping, SgMapping};
use ringfence_pviommu::frontend::UnknownUnmap;
use ringfence_pviommu::rtc::{FlatCache, ResidencyPolicy, ReverseCache};
use ringfence_types::{Access, Direction, IovaRange, Pfn, PfnRange, PhysRange};

use crate::caching::{CYCLE, Guest, LIMIT, buffer, c, guest, tree};
use crate::rig::{PAGE, cases};

#[derive(Debug, Clone)]
enum Step {
    Map {
        page: u64,
        offset: u64,
        pages: u64,
        direction: usize,
    },
    List {
        pages: Vec<u64>,
        direction: usize,
    },
    Unmap(usize),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..12_u64, 0..PAGE, 1..4_u64, 0..3_usize).prop_map(
            |(page, offset, pages, direction)| {
                Step::Map { page, offset, pages, direction }
            }
        ),
        1 => (prop::collection::vec(0..12_u64, 1..4), 0..3_usize)
            .prop_map(|(pages, direction)| Step::List { pages, direction }),
        4 => any::<usize>().prop_map(Step::Unmap),
        1 => (0..2 * CYCLE).prop_map(Step::Wait),
    ];
    prop::collection::vec(step, 1..120)
}

enum Held {
    Single(Mapping<u32>),
    List(SgMapping<u32>),
}

struct Live {
    held: Held,
    pieces: Vec<(IovaRange, PhysRange)>,
    direction: Direction,
}

/// Checks that the device reaches the right pages, only in their direction. A released page must be
/// inaccessible after T x (C + 1), unless it is in use again.
fn holds<C: ReverseCache>(mut guest: Guest<C>, steps: Vec<Step>) {
    let mut live: Vec<Live> = Vec::new();
    // Time of the last release, by page of the device's address.
    let mut released: HashMap<u64, u64> = HashMap::new();
    let pages = |range: &IovaRange| {
        let pages = PfnRange::covering(range);
        pages.lo().get()..=pages.hi().get()
    };
    for step in steps {
        let made = match step {
            Step::Map {
                page,
                offset,
                pages,
                direction,
            } => {
                let memory = buffer(page, offset, (pages - 1) * PAGE + 1);
                let direction = Direction::ALL[direction];
                let mapping = guest.map(memory, direction);
                let pieces = vec![(mapping.range(), memory)];
                Some(Live {
                    held: Held::Single(mapping),
                    pieces,
                    direction,
                })
            }
            Step::List { pages, direction } => {
                let memory: Vec<_> = pages.iter().map(|page| buffer(*page, 8, 64)).collect();
                let direction = Direction::ALL[direction];
                let list = guest.map_list(&memory, direction).unwrap();
                let pieces = list.piece_ranges().iter().copied().zip(memory).collect();
                Some(Live {
                    held: Held::List(list),
                    pieces,
                    direction,
                })
            }
            Step::Unmap(_) if live.is_empty() => None,
            Step::Unmap(nth) => {
                let chosen = live.swap_remove(nth % live.len());
                for (range, _) in &chosen.pieces {
                    released.extend(pages(range).map(|page| (page, guest.machine.now.0)));
                }
                match chosen.held {
                    Held::Single(mapping) => guest.unmap(mapping),
                    Held::List(list) => guest.unmap_list(list),
                };
                None
            }
            Step::Wait(ns) => {
                guest.wait(ns);
                None
            }
        };
        live.extend(made);
        if live.len() > 12 {
            continue;
        }
        let mut in_use = Vec::new();
        for Live {
            pieces, direction, ..
        } in &live
        {
            for (range, memory) in pieces {
                in_use.extend(pages(range));
                for (iova, at) in [
                    (range.start(), memory.start()),
                    (range.last(), memory.last()),
                ] {
                    for access in [Access::Read, Access::Write] {
                        let may = direction.permissions().allows(access);
                        let expected = may.then(|| guest.frame(at));
                        assert_eq!(guest.reach(iova, access), expected, "{range} {direction}");
                    }
                }
            }
        }
        // Setting the clock ended all cycles that were over by then.
        let bound = CYCLE * (u64::from(c().get()) + 1);
        for (page, since) in &released {
            if guest.machine.now.0 >= since + bound && !in_use.contains(page) {
                let iova = Pfn::new(*page).iova();
                assert!(guest.reach(iova, Access::Read).is_none(), "{iova}");
                assert!(guest.reach(iova, Access::Write).is_none(), "{iova}");
            }
        }
    }
    for chosen in live {
        match chosen.held {
            Held::Single(mapping) => guest.unmap(mapping),
            Held::List(list) => guest.unmap_list(list),
        };
    }
    guest.flush();
    assert_eq!(guest.live(), 0);
}

proptest! {
    #![proptest_config(cases(64, 20_261_122))]

    #[test]
    fn buffers_are_accessible_no_longer_than_the_bound(steps in steps()) {
        holds(tree(), steps.clone());
        let adaptive = ResidencyPolicy::Adaptive { late: 10 };
        holds(guest(FlatCache::new(c(), LIMIT, adaptive), UnknownUnmap::Refused), steps);
    }
}
