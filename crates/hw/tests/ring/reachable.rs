//! Brute-force check of reachable buffers: after every step, accesses every slot of every ring on a
//! copy of the unit.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use ringfence_hw::{FixedLogic, Prefetch, Replacement, RingUnitConfig};
use ringfence_pgtable::RingPte;
use ringfence_types::RequesterId;

use crate::rig::{NIC, R, READ, RW, Rig, SSD, W, WRITE, arena, cases, geometry, iova, pte, roomy};

const SLOTS: u32 = 6;
const USED_RINGS: u16 = 3;

type SlotKey = (RequesterId, u16, u32);

/// The buffers that a device may reach, modelled without a cache.
#[derive(Default)]
struct Truth {
    live: HashMap<SlotKey, RingPte>,
    /// Unmapped since the last invalidation of their ring.
    stale: HashMap<SlotKey, RingPte>,
}

#[derive(Debug, Clone)]
enum Step {
    Map {
        bytes: u64,
        dir: usize,
    },
    Unmap,
    Invalidate,
    Use {
        offset: u32,
        bytes: u64,
        write: bool,
    },
    Prefetch,
}

fn step() -> impl Strategy<Value = (usize, u16, u32, Step)> {
    let step = prop_oneof![
        4 => (1..50_u64, 0..3_usize).prop_map(|(bytes, dir)| Step::Map { bytes, dir }),
        3 => Just(Step::Unmap),
        1 => Just(Step::Invalidate),
        6 => (0..50_u32, 1..20_u64, any::<bool>())
            .prop_map(|(offset, bytes, write)| Step::Use { offset, bytes, write }),
        1 => Just(Step::Prefetch),
    ];
    (0..2_usize, 0..USED_RINGS, 0..SLOTS, step)
}

fn inside(pte: &RingPte, (start, bytes): (u64, u64)) -> bool {
    let first = pte.start().get();
    first <= start && start + bytes <= first + pte.bytes()
}

/// Accesses every slot, each on a fresh copy of the unit, so that the accesses are independent.
fn probe_all(rig: &Rig<'_, FixedLogic>, truth: &Truth, cached: bool) -> Result<(), TestCaseError> {
    for device in [NIC, SSD] {
        for ring in 0..USED_RINGS {
            let mut stale = HashSet::new();
            for slot in 0..SLOTS {
                for access in [READ, WRITE] {
                    let key = (device, ring, slot);
                    let seen = rig.clone().dma(device, iova(ring, slot, 0), 1, access);
                    match (truth.live.get(&key), seen) {
                        (Some(pte), seen) => {
                            // Neither a false fault nor another buffer.
                            let expected = pte.allows(access).then(|| (pte.start().get(), 1));
                            prop_assert_eq!(seen.ok(), expected, "live {:?}", key);
                        }
                        (None, Ok(at)) => {
                            let was = truth.stale.get(&key);
                            prop_assert!(
                                was.is_some_and(|was| inside(was, at)),
                                "{:?} reaches {:?}",
                                key,
                                at
                            );
                            stale.insert(slot);
                        }
                        (None, Err(_)) => {}
                    }
                }
            }
            // Errata 8: only the current and the prefetched entry may be stale.
            prop_assert!(
                stale.len() <= if cached { 2 } else { 0 },
                "{} ring {}: {:?}",
                device,
                ring,
                stale
            );
        }
    }
    Ok(())
}

fn run(config: &RingUnitConfig, steps: &[(usize, u16, u32, Step)]) -> Result<(), TestCaseError> {
    let mem = arena();
    let mut rig = Rig::<FixedLogic>::new(&mem, config, SLOTS);
    let mut truth = Truth::default();
    for (number, (device, ring, slot, step)) in steps.iter().enumerate() {
        let (device, ring, slot) = ([NIC, SSD][*device], *ring, *slot);
        let key = (device, ring, slot);
        match *step {
            // A driver that follows the rules: it overwrites no live slot and reuses no slot before
            // the invalidation.
            Step::Map { bytes, dir } => {
                if !truth.live.contains_key(&key) && !truth.stale.contains_key(&key) {
                    let pte = pte((number as u64 + 1) << 20 | 0x123, bytes, [R, W, RW][dir]);
                    rig.map(device, ring, slot, pte);
                    truth.live.insert(key, pte);
                }
            }
            Step::Unmap => {
                if let Some(pte) = truth.live.remove(&key) {
                    rig.unmap(device, ring, slot);
                    truth.stale.insert(key, pte);
                }
            }
            Step::Invalidate => {
                rig.invalidate(device, ring);
                truth
                    .stale
                    .retain(|(d, r, _), _| (*d, *r) != (device, ring));
            }
            Step::Use {
                offset,
                bytes,
                write,
            } => {
                let access = if write { WRITE } else { READ };
                let seen = rig.dma(device, iova(ring, slot, offset), bytes, access);
                let allowed =
                    |pte: &&RingPte| pte.allows(access) && u64::from(offset) + bytes <= pte.bytes();
                let live = truth.live.get(&key);
                if let Some(pte) = live.filter(allowed) {
                    prop_assert_eq!(seen, Ok((pte.start().get() + u64::from(offset), bytes)));
                } else if let Ok(at) = seen {
                    let was = truth.stale.get(&key).filter(allowed);
                    prop_assert!(
                        live.is_none() && was.is_some_and(|was| inside(was, at)),
                        "{:?} {:?}",
                        key,
                        at
                    );
                }
            }
            Step::Prefetch => {
                rig.unit.complete_prefetch(&mem);
            }
        }
        probe_all(&rig, &truth, config.riotlb.entries() > 0)?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases(60, 0x72_6561_6368))]

    #[test]
    fn nothing_but_live_buffers_and_two_stale_ones(steps in prop::collection::vec(step(), 1..80)) {
        for prefetch in [Prefetch::Immediate, Prefetch::Deferred, Prefetch::Absent] {
            run(&roomy(prefetch), &steps)?;
            for (rings, replacement) in [(1, Replacement::Lru), (2, Replacement::Fifo)] {
                run(
                    &RingUnitConfig {
                        riotlb: geometry(1, rings),
                        replacement,
                        ..roomy(prefetch)
                    },
                    &steps,
                )?;
            }
        }
        run(&RingUnitConfig::UNCACHED, &steps)?;
    }
}
