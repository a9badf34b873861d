//! With N >= L + the longest burst, no map in ring order waits. With fewer slots maps wait, without
//! any other effect.

use std::collections::VecDeque;

use proptest::prelude::*;
use ringfence_dma::MapReason;
use ringfence_dma::ring::{FullReason, OwnedRing, RingMapping, SlotChoice};
use ringfence_pgtable::Coherency;
use ringfence_types::Direction;

use crate::rig::*;

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(128)
    })]

    #[test]
    fn a_ring_with_room_for_live_and_burst_never_stalls(
        live in 1..40_usize,
        burst in 1..40_usize,
        missing in 0..12_usize,
        next_free in any::<bool>(),
        steps in prop::collection::vec(any::<bool>(), 1..400),
    ) {
        let slots = (live + burst).saturating_sub(missing).max(1);
        let choice = if next_free { SlotChoice::NextFree } else { SlotChoice::Tail };
        let mut board = Board::new(Coherency::Coherent);
        let memory = board.memory.clone();
        let ring = board.rings(choice, &[slots as u32]).remove(0);
        let mut ring = OwnedRing::new(ring, &*memory, DOMAIN, DEVICE).unwrap();
        let mut held: VecDeque<RingMapping<u64>> = VecDeque::new();
        let (mut withheld, mut back, mut stalls) = (0, 0_u64, 0);
        for (id, map) in steps.into_iter().enumerate() {
            if held.len() == live || !map && !held.is_empty() {
                let oldest = held.pop_front().unwrap();
                let _ = ring.unmap(&*memory, oldest).unwrap();
                withheld += 1;
                if withheld == burst {
                    ring.end_burst(&*memory, &mut board.port, |id| {
                        assert_eq!(id, back, "in order, each once");
                        back += 1;
                    }).unwrap();
                    withheld = 0;
                }
                continue;
            }
            let next = back + (held.len() + withheld) as u64;
            match ring.map(&*memory, next, &buffer(id as u64 * 64, 64), Direction::ToDevice) {
                Ok(mapping) => held.push_back(mapping),
                Err((again, MapReason::RingFull(full))) => {
                    prop_assert_eq!(again, next);
                    prop_assert!(held.len() + withheld == slots, "{}", full);
                    let wait = if withheld > 0 { FullReason::BurstEnd } else { FullReason::Unmap };
                    prop_assert_eq!(full.reason, wait);
                    // The state of the named slot matches the reason.
                    let named = board.entry((0, full.slot.get())).is_valid();
                    prop_assert_eq!(named, wait == FullReason::Unmap);
                    stalls += 1;
                }
                Err(other) => panic!("{other:?}"),
            }
            prop_assert_eq!(ring.live() as usize, held.len());
            prop_assert_eq!(ring.withheld(), withheld as u32);
        }
        if slots >= live + burst {
            prop_assert_eq!(stalls, 0);
        }
        let counted = ring.stalls();
        prop_assert_eq!(counted.unmap + counted.burst_end, stalls);
        for mapping in held {
            let _ = ring.unmap(&*memory, mapping).unwrap();
        }
    }
}
