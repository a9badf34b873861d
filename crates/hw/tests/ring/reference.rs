//! The unit against a minimal implementation of Fig. 10: a map from ring to entry, without capacity
//! limit or fast paths.

use std::collections::HashMap;

use proptest::prelude::*;
use ringfence_hw::{FixedLogic, Prefetch, RingLogic};
use ringfence_pgtable::RingPte;
use ringfence_types::FaultReason::{self, *};
use ringfence_types::{Access, RequesterId};

use crate::rig::{NIC, R, READ, RW, Rig, SSD, Seen, W, WRITE, arena, cases, iova, pte, roomy};
use crate::ring_logic::{ByValue, LogicAsPublished};

const SLOTS: u32 = 5;

/// The defects of the figure that the model has.
#[derive(Clone, Copy)]
struct Defects {
    start_only: bool,
    keeps_next: bool,
    by_value: bool,
}

#[derive(Clone, Copy)]
struct Cached {
    slot: u32,
    pte: RingPte,
    next: Option<RingPte>,
}

struct Model {
    defects: Defects,
    memory: HashMap<(RequesterId, u16, u32), RingPte>,
    riotlb: HashMap<(RequesterId, u16), Cached>,
}

impl Model {
    fn read(&self, device: RequesterId, ring: u16, slot: u32) -> Option<RingPte> {
        self.memory.get(&(device, ring, slot)).copied()
    }

    fn prefetch(&self, device: RequesterId, ring: u16, cached: &mut Cached) {
        match self.read(device, ring, (cached.slot + 1) % SLOTS) {
            Some(pte) => cached.next = Some(pte),
            None if self.defects.keeps_next => {}
            None => cached.next = None,
        }
    }

    fn access(
        &mut self,
        device: RequesterId,
        (ring, slot, offset): (u16, u32, u32),
        bytes: u64,
        access: Access,
    ) -> Seen {
        let stop = |reason: FaultReason| Err((iova(ring, slot, offset), reason));
        if bytes == 0 || bytes > 1 << 30 {
            return stop(BadLength);
        }
        let key = (device, ring);
        if !self.riotlb.contains_key(&key) {
            if ring >= 4 {
                return stop(RingBeyondDevice);
            }
            if slot >= SLOTS {
                return stop(SlotBeyondRing);
            }
            let Some(pte) = self.read(device, ring, slot) else {
                return stop(NotPresent);
            };
            let mut cached = Cached {
                slot,
                pte,
                next: None,
            };
            if !self.defects.by_value {
                self.prefetch(device, ring, &mut cached);
            }
            self.riotlb.insert(key, cached);
        }
        let mut cached = self.riotlb[&key];
        if cached.slot != slot {
            match cached.next {
                Some(next) if slot == (cached.slot + 1) % SLOTS => {
                    cached = Cached {
                        slot,
                        pte: next,
                        next: None,
                    };
                }
                _ => {
                    if slot >= SLOTS {
                        return stop(SlotBeyondRing);
                    }
                    let Some(pte) = self.read(device, ring, slot) else {
                        return stop(NotPresent);
                    };
                    cached.slot = slot;
                    cached.pte = pte;
                    if !self.defects.keeps_next {
                        cached.next = None;
                    }
                }
            }
            self.prefetch(device, ring, &mut cached);
            if !self.defects.by_value {
                self.riotlb.insert(key, cached);
            }
        }
        let pte = self.riotlb[&key].pte;
        let (start, size, offset) = (pte.start().get(), pte.bytes(), u64::from(offset));
        let last = if self.defects.start_only {
            offset
        } else {
            offset + bytes - 1
        };
        if last >= size {
            let first = offset.max(size) as u32;
            return Err((iova(ring, slot, first), BeyondBuffer));
        }
        match (pte.allows(access), access) {
            (false, Access::Read) => stop(ReadDenied),
            (false, Access::Write) => stop(WriteDenied),
            (true, _) => Ok((start + offset, bytes)),
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Map {
        ring: u16,
        slot: u32,
        bytes: u64,
        dir: usize,
    },
    Unmap {
        ring: u16,
        slot: u32,
    },
    Invalidate {
        ring: u16,
    },
    Access {
        ring: u16,
        slot: u32,
        offset: u32,
        bytes: u64,
        write: bool,
    },
    /// Accesses `count` slots from `slot` on, in ring order.
    Sweep {
        ring: u16,
        slot: u32,
        count: u32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let ring = || 0..2_u16;
    let slot = || 0..SLOTS;
    prop_oneof![
        4 => (ring(), slot(), 1..100_u64, 0..3_usize)
            .prop_map(|(ring, slot, bytes, dir)| Step::Map { ring, slot, bytes, dir }),
        3 => (ring(), slot()).prop_map(|(ring, slot)| Step::Unmap { ring, slot }),
        1 => ring().prop_map(|ring| Step::Invalidate { ring }),
        6 => (0..5_u16, 0..SLOTS + 1, 0..110_u32, 0..40_u64, any::<bool>()).prop_map(
            |(ring, slot, offset, bytes, write)| Step::Access {
                // Mostly the two rings that have mappings.
                ring: if ring == 4 { 4 } else { ring % 2 },
                slot,
                offset,
                bytes,
                write,
            }
        ),
        3 => (ring(), slot(), 1..12_u32)
            .prop_map(|(ring, slot, count)| Step::Sweep { ring, slot, count }),
    ]
}

fn agree<L: RingLogic>(defects: Defects, steps: &[(bool, Step)]) -> Result<(), TestCaseError> {
    let mem = arena();
    let mut rig = Rig::<L>::new(&mem, &roomy(Prefetch::Immediate), SLOTS);
    let mut model = Model {
        defects,
        memory: HashMap::new(),
        riotlb: HashMap::new(),
    };
    for (number, (second, step)) in steps.iter().enumerate() {
        let device = if *second { SSD } else { NIC };
        match *step {
            Step::Map {
                ring,
                slot,
                bytes,
                dir,
            } => {
                // Each mapping has a different physical address.
                let pte = pte((number as u64 + 1) << 20, bytes, [R, W, RW][dir]);
                rig.unmap(device, ring, slot);
                rig.map(device, ring, slot, pte);
                model.memory.insert((device, ring, slot), pte);
            }
            Step::Unmap { ring, slot } => {
                rig.unmap(device, ring, slot);
                model.memory.remove(&(device, ring, slot));
            }
            Step::Invalidate { ring } => {
                rig.invalidate(device, ring);
                model.riotlb.remove(&(device, ring));
            }
            Step::Access {
                ring,
                slot,
                offset,
                bytes,
                write,
            } => {
                let access = if write { WRITE } else { READ };
                let seen = rig.dma(device, iova(ring, slot, offset), bytes, access);
                let expected = model.access(device, (ring, slot, offset), bytes, access);
                prop_assert_eq!(seen, expected, "step {} {:?}", number, step);
            }
            Step::Sweep { ring, slot, count } => {
                for slot in (slot..slot + count).map(|slot| slot % SLOTS) {
                    let seen = rig.dma(device, iova(ring, slot, 0), 1, READ);
                    let expected = model.access(device, (ring, slot, 0), 1, READ);
                    prop_assert_eq!(seen, expected, "step {} {:?}, slot {}", number, step, slot);
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(cases(300, 0x7269_6f6d_6d75))]

    #[test]
    fn all_versions_follow_the_figure(
        steps in prop::collection::vec((any::<bool>(), step()), 1..120),
    ) {
        let [fixed, as_published, by_value] = [
            (false, false, false),
            (true, true, false),
            (true, true, true),
        ]
        .map(|(start_only, keeps_next, by_value)| Defects {
            start_only,
            keeps_next,
            by_value,
        });
        agree::<FixedLogic>(fixed, &steps)?;
        agree::<LogicAsPublished>(as_published, &steps)?;
        agree::<ByValue>(by_value, &steps)?;
    }
}
