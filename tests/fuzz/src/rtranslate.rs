//! The ring unit over memory that an attacker has written and continues to write.
//!
//! Input: 4 bytes of header, as many records of memory (`memory.rs`) as byte 1 states, then steps
//! of 8 bytes. Bytes of the header:
//!
//! - 0: bits 0..=1 version of the figure, 2..=3 prefetch, 4..=5 rIOTLB, 6 contexts cached.
//! - 1: number of records.
//! - 2: page of the root table.
//! - 3: device and function; the bus is 0.
//!
//! Byte 0 of a step, modulo 7, selects the action:
//!
//! - 0, 1: an access (1: a write). Ring in byte 1, slot in 2, offset in 3..=4, bytes in 5..=7.
//! - 2: a read of 64 bytes at any address, whose highest bytes are bytes 1..=7.
//! - 3: a word of memory changes. Page in byte 1, index in 2..=3, shift in 4, bits to flip in
//!   5..=6.
//! - 4: the ring is invalidated.
//! - 5: everything is invalidated.
//! - 6: a prefetch completes.

use std::sync::atomic::Ordering;

use ringfence_hw::{
    FixedLogic, Geometry, Prefetch, Replacement, RingLogic, RingUnit, RingUnitConfig, Translate,
};
use ringfence_papers::{ByValue, LogicAsPublished};
use ringfence_types::{
    Access, DomainId, FaultReason, Invalidation, Iova, PhysAddr, PhysMemory, RequesterId, RingId,
    RingIova,
};

use crate::OutcomeHook;
use crate::memory::{Memory, PAGE_BYTES};

/// Outcomes that the corpus reaches: every way to serve an access, and every reason to stop one.
pub const OUTCOMES: &[&str] = &[
    "hit",
    "prefetch hit",
    "slot walk",
    "miss",
    "eviction",
    "late prefetch",
    "stale",
    "fault: RootNotPresent",
    "fault: ContextNotPresent",
    "fault: ContextInvalid",
    "fault: ReservedBit",
    "fault: TableAccess",
    "fault: NotPresent",
    "fault: BadLength",
    "fault: RingBeyondDevice",
    "fault: SlotBeyondRing",
    "fault: BeyondBuffer",
    "fault: ReadDenied",
    "fault: WriteDenied",
];

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let Some((&[config, records, root, devfn], rest)) = data.split_first_chunk::<4>() else {
        return;
    };
    let (records, steps) = rest.split_at(rest.len().min(usize::from(records) * 11));
    let run = Run {
        memory: Memory::parse(records),
        device: RequesterId::new(u16::from(devfn)),
        root: PhysAddr::new(u64::from(root) * PAGE_BYTES),
        config: shape(config),
    };
    match config & 3 {
        0 | 1 => run.steps::<FixedLogic>(steps, true, reached),
        2 => run.steps::<LogicAsPublished>(steps, false, reached),
        _ => run.steps::<ByValue>(steps, false, reached),
    }
}

fn shape(bits: u8) -> RingUnitConfig {
    let geometry = |sets, ways| Geometry::new(sets, ways).expect("powers of two");
    RingUnitConfig {
        riotlb: match bits >> 4 & 3 {
            0 => Geometry::ABSENT,
            1 => geometry(1, 1),
            2 => geometry(1, 2),
            _ => geometry(2, 2),
        },
        replacement: Replacement::Lru,
        contexts: if bits & 0x40 != 0 {
            geometry(2, 1)
        } else {
            Geometry::ABSENT
        },
        prefetch: match bits >> 2 & 3 {
            0 | 1 => Prefetch::Immediate,
            2 => Prefetch::Deferred,
            _ => Prefetch::Absent,
        },
        // The log is full after two faults.
        fault_log: 2,
    }
}

struct Run {
    memory: Memory,
    device: RequesterId,
    root: PhysAddr,
    config: RingUnitConfig,
}

/// An access: address, number of bytes, kind.
type Request = (Iova, u64, Access);

impl Run {
    fn unit<L: RingLogic>(&self, config: &RingUnitConfig) -> RingUnit<L> {
        let mut unit = RingUnit::new(config);
        unit.set_root_table(self.root);
        unit.enable();
        unit
    }

    /// Runs the steps. With `exact`, an access has the same outcome as without caches for any cache
    /// contents, unless memory has changed since the last invalidation of everything.
    fn steps<L: RingLogic>(&self, steps: &[u8], exact: bool, reached: OutcomeHook<'_>) {
        let mut unit = self.unit::<L>(&self.config);
        let mut uncached = self.unit::<FixedLogic>(&RingUnitConfig::UNCACHED);
        let mut changed = false;
        for step in steps.as_chunks::<8>().0 {
            let request = match step[0] % 7 {
                kind @ 0..=1 => access(step, kind),
                2 => {
                    let high = u64::from_be_bytes([
                        step[1], step[2], step[3], step[4], step[5], step[6], step[7], 0,
                    ]);
                    (Iova::new(high), 64, Access::Read)
                }
                3 => {
                    changed |= self.flip(step);
                    continue;
                }
                4 => {
                    unit.invalidate(&Invalidation::Ring {
                        domain: DomainId::new(0),
                        device: self.device,
                        ring: RingId::new(u16::from(step[1])),
                    });
                    continue;
                }
                5 => {
                    unit.invalidate(&Invalidation::Context(self.device));
                    unit.invalidate(&Invalidation::Global);
                    assert_eq!(unit.riotlb_live(), 0, "everything was invalidated");
                    changed = false;
                    continue;
                }
                _ => {
                    if unit.complete_prefetch(&self.memory) {
                        reached("late prefetch");
                    }
                    continue;
                }
            };
            let seen = self.access(&mut unit, request);
            let expected = self.access(&mut uncached, request);
            if exact && !changed {
                assert_eq!(seen, expected, "{request:?}");
            } else if seen != expected {
                reached("stale");
            }
            if let Err(reason) = seen {
                reached(fault(reason));
            }
            assert!(unit.riotlb_live() <= self.config.riotlb.entries());
            assert!(unit.prefetches_waiting() <= self.config.riotlb.entries() as usize);
        }
        let stats = unit.stats();
        for (count, outcome) in [
            (stats.hits, "hit"),
            (stats.prefetch_hits, "prefetch hit"),
            (stats.slot_walks, "slot walk"),
            (stats.misses, "miss"),
            (stats.evictions, "eviction"),
        ] {
            if count > 0 {
                reached(outcome);
            }
        }
    }

    /// Returns the physical address of an access, or the reason to stop it.
    fn access<L: RingLogic>(
        &self,
        unit: &mut RingUnit<L>,
        (iova, bytes, access): Request,
    ) -> Result<PhysAddr, FaultReason> {
        match unit.translate(&self.memory, self.device, iova, bytes, access) {
            Ok(ranges) => {
                assert_eq!(ranges.len(), 1, "a buffer is contiguous");
                let range = ranges.first();
                assert_eq!(range.bytes(), bytes, "all of it");
                Ok(range.start())
            }
            Err(fault) => {
                let (from, at) = (RingIova::from(iova), RingIova::from(fault.iova));
                assert_eq!((at.ring(), at.slot()), (from.ring(), from.slot()));
                assert!(at.offset() >= from.offset(), "{fault}");
                Err(fault.reason)
            }
        }
    }

    /// Flips bits of a word if it is in memory; returns true if the word changed.
    fn flip(&self, step: &[u8; 8]) -> bool {
        let index = u64::from(u16::from_le_bytes([step[2], step[3]])) % 512;
        let at = PhysAddr::new(u64::from(step[1] & 15) * PAGE_BYTES + index * 8);
        let bits = u64::from(u16::from_le_bytes([step[5], step[6]])) << (step[4] & 63);
        match self.memory.word(at) {
            Ok(word) => {
                word.fetch_xor(bits, Ordering::Relaxed);
                bits != 0
            }
            Err(_) => false,
        }
    }
}

fn access(step: &[u8; 8], kind: u8) -> Request {
    let offset = u64::from(u16::from_le_bytes([step[3], step[4]]));
    let iova = u64::from(step[1]) << 48 | u64::from(step[2]) << 30 | offset;
    let bytes = u64::from(u32::from_le_bytes([step[5], step[6], step[7], 0]));
    let access = if kind == 0 {
        Access::Read
    } else {
        Access::Write
    };
    (Iova::new(iova), bytes, access)
}

/// A reason added later has no name here, which the corpus test reports.
const fn fault(reason: FaultReason) -> &'static str {
    match reason {
        FaultReason::RootNotPresent => "fault: RootNotPresent",
        FaultReason::ContextNotPresent => "fault: ContextNotPresent",
        FaultReason::ContextInvalid => "fault: ContextInvalid",
        FaultReason::ReservedBit => "fault: ReservedBit",
        FaultReason::TableAccess => "fault: TableAccess",
        FaultReason::NotPresent => "fault: NotPresent",
        FaultReason::BadLength => "fault: BadLength",
        FaultReason::RingBeyondDevice => "fault: RingBeyondDevice",
        FaultReason::SlotBeyondRing => "fault: SlotBeyondRing",
        FaultReason::BeyondBuffer => "fault: BeyondBuffer",
        FaultReason::ReadDenied => "fault: ReadDenied",
        FaultReason::WriteDenied => "fault: WriteDenied",
        _ => "fault: unknown",
    }
}
