//! Registers and tables with arbitrary contents: no access leaves memory or the live buffers, and
//! nothing panics.

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use ringfence_riommu_device::{Config, InvalidateScope};
use ringfence_types::{Access, Iova, PhysAddr, PhysMemory, RingId};

use crate::rig::{DISK, MEMORY, READ, Rig, SLOTS, cached, riova};

#[derive(Debug, Clone)]
enum Step {
    Write {
        offset: u64,
        bytes: u64,
        value: u64,
    },
    Store {
        word: u64,
        value: u64,
    },
    Access {
        iova: u64,
        bytes: u64,
        write: bool,
    },
    Restore {
        control: u32,
        queue: u64,
        head: u32,
        tail: u32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let offset = prop_oneof![(0..16u64).prop_map(|index| index * 4), any::<u64>()];
    let bytes = prop_oneof![Just(4), Just(8), any::<u64>()];
    // Addresses near the tables, and any others.
    let value = prop_oneof![
        0..MEMORY,
        any::<u64>(),
        (0..8u64).prop_map(|bits| bits << 12 | bits)
    ];
    prop_oneof![
        (offset, bytes, value.clone()).prop_map(|(offset, bytes, value)| Step::Write {
            offset,
            bytes,
            value
        }),
        (0..MEMORY / 8, value).prop_map(|(word, value)| Step::Store { word, value }),
        (any::<u64>(), 0..1u64 << 20, any::<bool>())
            .prop_map(|(iova, bytes, write)| Step::Access { iova, bytes, write }),
        (0..3u64, 0..SLOTS + 2, 0..80u64, any::<bool>()).prop_map(|(ring, slot, offset, write)| {
            let iova = riova(ring, slot, offset).get();
            Step::Access {
                iova,
                bytes: 4,
                write,
            }
        }),
        (any::<u32>(), any::<u64>(), any::<u32>(), any::<u32>()).prop_map(
            |(control, queue, head, tail)| Step::Restore {
                control: control & 15,
                queue: queue & !0xff0,
                head,
                tail
            }
        ),
    ]
}

proptest! {
    #[test]
    fn no_step_panics_and_state_survives_a_round_trip(
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let mut rig = Rig::started(&cached());
        for slot in 0..SLOTS {
            rig.map(0, slot, 0x8000 + slot * 64, 64, READ);
        }
        for step in steps {
            match step {
                Step::Write { offset, bytes, value } => rig.device.write(offset, bytes, value),
                Step::Store { word, value } => {
                    let at = PhysAddr::new(word * 8);
                    rig.memory.word(at).unwrap().store(value, Ordering::Release);
                }
                Step::Access { iova, bytes, write } => {
                    let access = if write { Access::Write } else { Access::Read };
                    let _ = rig.access(Iova::new(iova), bytes, access);
                }
                Step::Restore { control, queue, head, tail } => {
                    let mut state = rig.device.save();
                    state.control = control;
                    state.fault_queue = queue;
                    (state.head, state.tail) = (head, tail);
                    let before = rig.device.save();
                    let restored = rig.device.restore(&state);
                    let kept = if restored.is_ok() { state } else { before };
                    prop_assert_eq!(rig.device.save(), kept);
                }
            }
            let state = rig.device.save();
            prop_assert!(rig.device.restore(&state).is_ok());
            prop_assert_eq!(rig.device.save(), state);
        }
    }

    /// Against a unit without caches: after an invalidation of what changed, a cached unit answers
    /// as one that reads all tables anew.
    #[test]
    fn invalidated_caches_answer_as_none(
        steps in prop::collection::vec(
            (0..2usize, 0..SLOTS, any::<bool>(), 0..2u64, 0..SLOTS),
            1..100,
        ),
    ) {
        let mut rig = Rig::started(&cached());
        let mut reference = Rig::started(&Config::default());
        for (ring, slot, map, read_ring, read_slot) in steps {
            for rig in [&mut rig, &mut reference] {
                if map {
                    rig.map(ring, slot, 0x8000 + slot * 64, 64, READ);
                } else {
                    rig.clear(ring, slot);
                }
            }
            rig.invalidate(InvalidateScope::Ring(DISK, RingId::new(ring as u16)));
            let iova = riova(read_ring, read_slot, 8);
            prop_assert_eq!(rig.reads(iova, 8), reference.reads(iova, 8));
        }
    }
}
