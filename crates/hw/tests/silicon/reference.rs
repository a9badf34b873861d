//! The unit against a unit without caches and against a map from pages to pages, over random
//! operations on two domains.

use std::collections::BTreeMap;

use proptest::prelude::*;
use ringfence_hw::{
    Geometry, InvalidationGranularity, Replacement, UnitConfig, VtdUnit, WALK_CACHES,
};
use ringfence_pgtable::{Coherency, Levels, ReclaimingTable, UnlinkedTables};
use ringfence_types::{
    Access, CachedLevels, DomainId, FaultReason, Invalidation, Iova, PageSize, Pending,
    Permissions, Pfn, PfnRange, RequesterId,
};

use crate::rig::{A, B, DISK, GPU, NIC, Rig, Seen, arena, format, geometry, request, seen};

#[derive(Debug, Clone, Copy)]
enum Scope {
    Pages,
    Wider,
    Domain,
    Global,
}

#[derive(Debug, Clone)]
enum Step {
    Map {
        domain: usize,
        page: u64,
        pa: u64,
        pages: u64,
        permissions: Permissions,
    },
    Unmap {
        domain: usize,
        nth: prop::sample::Index,
        scope: Scope,
    },
    Access {
        device: RequesterId,
        page: u64,
        offset: u64,
        bytes: u64,
        access: Access,
    },
    /// A redundant invalidation, which must do no harm.
    Invalidate(Invalidation),
}

/// Pages under a few tables of every level, so that paths are shared, and the first and last pages
/// of the address space.
fn page() -> impl Strategy<Value = u64> {
    (
        prop::sample::select(&[0_u64, 1 << 9, 3 << 9, 1 << 18, 5 << 27, (1 << 36) - 512][..]),
        0..512_u64,
    )
        .prop_map(|(base, offset)| {
            base + if !(16..496).contains(&offset) {
                offset
            } else {
                offset % 16
            }
        })
}

fn domain_id(domain: usize) -> DomainId {
    [A, B][domain]
}

fn step() -> impl Strategy<Value = Step> {
    let rights = prop::sample::select(
        &[
            Permissions::READ,
            Permissions::WRITE,
            Permissions::READ_WRITE,
        ][..],
    );
    let pages = prop_oneof![8 => 1..6_u64, 1 => Just(512_u64), 1 => Just(1024_u64)];
    let map = (0..2_usize, page(), 0..1_u64 << 20, pages, rights).prop_map(
        |(domain, page, pa, pages, permissions)| {
            // Align long mappings, so that larger leaves are used.
            let mask = if pages >= 512 { !511 } else { !0 };
            Step::Map {
                domain,
                page: page & mask,
                pa: pa & mask,
                pages,
                permissions,
            }
        },
    );
    let scope = prop::sample::select(
        &[
            Scope::Pages,
            Scope::Pages,
            Scope::Pages,
            Scope::Wider,
            Scope::Domain,
            Scope::Global,
        ][..],
    );
    let unmap = (0..2_usize, any::<prop::sample::Index>(), scope)
        .prop_map(|(domain, nth, scope)| Step::Unmap { domain, nth, scope });
    let device = prop::sample::select(&[NIC, GPU, DISK][..]);
    let bytes = prop_oneof![6 => 1..64_u64, 2 => 1..0x4000_u64, 1 => Just(0x20_0000_u64)];
    let access = (device, page(), 0..0x1000_u64, bytes, any::<bool>()).prop_map(
        |(device, page, offset, bytes, write)| Step::Access {
            device,
            page,
            offset,
            bytes,
            access: if write { Access::Write } else { Access::Read },
        },
    );
    let unrelated =
        (0..2_usize, page(), 1..2000_u64, any::<bool>()).prop_map(|(domain, page, pages, all)| {
            Step::Invalidate(Invalidation::Pages {
                domain: domain_id(domain),
                range: PfnRange::new(Pfn::new(page), pages).unwrap(),
                levels: if all {
                    CachedLevels::All
                } else {
                    CachedLevels::Leaves
                },
            })
        });
    prop_oneof![4 => map, 3 => unmap, 12 => access, 1 => unrelated]
}

fn config() -> impl Strategy<Value = UnitConfig> {
    let shape = || {
        prop::sample::select(&[(0, 0), (1, 1), (1, 4), (2, 2), (16, 4), (64, 1)][..]).prop_map(
            |(sets, ways)| {
                if ways == 0 {
                    Geometry::ABSENT
                } else {
                    geometry(sets, ways)
                }
            },
        )
    };
    (
        shape(),
        [shape(), shape(), shape()],
        any::<bool>(),
        any::<bool>(),
        0..3_u32,
    )
        .prop_map(
            |(iotlb, walk_caches, fifo, whole, contexts): (_, [Geometry; WALK_CACHES], _, _, _)| {
                UnitConfig {
                    iotlb,
                    walk_caches,
                    contexts: geometry(1 << contexts, 1),
                    replacement: if fifo {
                        Replacement::Fifo
                    } else {
                        Replacement::Lru
                    },
                    fault_log: 4,
                    granularity: if whole {
                        InvalidationGranularity::GlobalOnly
                    } else {
                        InvalidationGranularity::Selective
                    },
                }
            },
        )
}

/// The mappings of a domain, modelled without tables.
#[derive(Default)]
struct Space {
    pages: BTreeMap<u64, (u64, Permissions)>,
    mappings: Vec<PfnRange>,
}

impl Space {
    fn access(&self, iova: u64, bytes: u64, access: Access) -> Seen {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut at = iova;
        let last = iova + bytes - 1;
        while at <= last {
            if at >> 48 != 0 {
                return Err((at, FaultReason::AddressBeyondWidth));
            }
            let end = (at | 0xfff).min(last);
            let Some((pa, permissions)) = self.pages.get(&(at >> 12)) else {
                return Err((at, FaultReason::NotPresent));
            };
            if !permissions.allows(access) {
                return Err((
                    at,
                    match access {
                        Access::Read => FaultReason::ReadDenied,
                        Access::Write => FaultReason::WriteDenied,
                    },
                ));
            }
            let start = (pa << 12) + (at & 0xfff);
            match ranges.last_mut() {
                Some((first, bytes)) if *first + *bytes == start => *bytes += end - at + 1,
                _ => ranges.push((start, end - at + 1)),
            }
            at = end + 1;
        }
        Ok(ranges)
    }
}

fn run(config: &UnitConfig, steps: &[Step], invalidate: bool) -> Result<u64, TestCaseError> {
    let mem = arena();
    let mut rig = Rig::new(&mem, config);
    let mut plain = VtdUnit::vtd(&UnitConfig::UNCACHED);
    plain.set_root_table(rig.contexts.root());
    plain.enable();
    let format = format(Levels::Four, PageSize::Size2M);
    let mut spaces = [Space::default(), Space::default()];
    let mut tables = [0, 1].map(|domain| {
        let table = ReclaimingTable::new(
            format,
            domain_id(domain),
            Coherency::Coherent,
            &mem,
            &rig.frames,
        )
        .unwrap();
        for device in [&[NIC, GPU][..], &[DISK][..]][domain] {
            rig.attach(*device, domain_id(domain), table.root(), Levels::Four);
        }
        table
    });
    let mut stale = 0;
    for step in steps {
        match step {
            Step::Map {
                domain,
                page,
                pa,
                pages,
                permissions,
            } => {
                let space = &mut spaces[*domain];
                let request = request(page << 12, pa << 12, *pages, *permissions);
                let free =
                    (*page..page + pages).all(|p| p >> 36 == 0 && !space.pages.contains_key(&p));
                let mapped = tables[*domain].map(&mem, &rig.frames, request);
                prop_assert_eq!(mapped.is_ok(), free, "{:?}", mapped);
                if free {
                    for i in 0..*pages {
                        space.pages.insert(page + i, (pa + i, *permissions));
                    }
                    space
                        .mappings
                        .push(PfnRange::new(Pfn::new(*page), *pages).unwrap());
                }
            }
            Step::Unmap { domain, nth, scope } => {
                let space = &mut spaces[*domain];
                if space.mappings.is_empty() {
                    continue;
                }
                let range = space.mappings.swap_remove(nth.index(space.mappings.len()));
                space
                    .pages
                    .retain(|page, _| *page < range.lo().get() || *page > range.hi().get());
                let (unmapped, levels) = tables[*domain].unmap(&mem, range).unwrap();
                let retired = tables[*domain].take_unlinked();
                if !invalidate {
                    // Neither the frames of unlinked tables nor the range are ever reused.
                    drop((unmapped, retired));
                    continue;
                }
                let id = domain_id(*domain);
                let request = match scope {
                    Scope::Pages => Invalidation::Pages {
                        domain: id,
                        range,
                        levels,
                    },
                    Scope::Wider => Invalidation::Pages {
                        domain: id,
                        range: PfnRange::inclusive(Pfn::new(0), range.hi()).unwrap(),
                        levels,
                    },
                    Scope::Domain => Invalidation::Domain(id),
                    Scope::Global => Invalidation::Global,
                };
                let pending = Pending::submit(&mut rig.unit, request, unmapped)
                    .map_err(|_| TestCaseError::fail("scope"))?;
                let _ = pending.wait(&mut rig.unit).unwrap();
                let pending = Pending::submit(&mut rig.unit, request, retired)
                    .map_err(|_| TestCaseError::fail("scope"))?;
                UnlinkedTables::release(pending.wait(&mut rig.unit).unwrap(), &rig.frames);
            }
            Step::Invalidate(request) => rig.unit.invalidate(request),
            Step::Access {
                device,
                page,
                offset,
                bytes,
                access,
            } => {
                let iova = page << 12 | offset;
                let expected = spaces[usize::from(*device == DISK)].access(iova, *bytes, *access);
                let walked = plain.translate(&mem, *device, Iova::new(iova), *bytes, *access);
                prop_assert_eq!(
                    &seen(walked.map(|translation| translation.to_vec())),
                    &expected
                );
                let outcome = rig.dma(*device, iova, *bytes, *access);
                if invalidate {
                    prop_assert_eq!(outcome, expected);
                } else {
                    stale += u64::from(outcome != expected);
                }
            }
        }
    }
    if config.iotlb != Geometry::ABSENT {
        prop_assert!(rig.unit.iotlb_live() <= config.iotlb.entries());
    }
    Ok(stale)
}

proptest! {
    #![proptest_config(crate::rig::cases(256, 0x6361_6368_6573))]

    #[test]
    fn caches_change_nothing_if_invalidated(
        config in config(),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        run(&config, &steps, true)?;
    }
}

/// The same operations without invalidations fail: the property above is not vacuous.
#[test]
fn caches_show_if_not_invalidated() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let strategy = prop::collection::vec(step(), 400..401);
    let mut config = crate::rig::roomy();
    config.iotlb = geometry(64, 4);
    let stale: u64 = (0..16)
        .map(|_| {
            let steps = strategy.new_tree(&mut runner).unwrap().current();
            run(&config, &steps, false).unwrap()
        })
        .sum();
    assert!(stale > 100, "only {stale} stale accesses");
}
