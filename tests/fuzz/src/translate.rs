//! The unit over memory that an attacker rewrites while devices access it and caches are
//! invalidated.
//!
//! Input: one byte of configuration (bits 0..=1 IOTLB, 2 walk caches, 3 context cache, 4
//! replacement, 5 only global purges, 6 size of the fault log), then operations of 12 bytes. Byte
//! 0, modulo 5, selects the operation:
//!
//! - 0: store. Byte 1: bits 0..=3 page; bits 4..=7, if not 0, the page that the word's address
//!   field points to. Bytes 2..=3: index. Bytes 4..=11: word.
//! - 1: access. Byte 1: bits 0..=1 device, bit 2 write, bit 7 length in units of 4 GiB. Bytes
//!   2..=3: length. Bytes 4..=11: IOVA.
//! - 2: invalidate. Byte 1: bits 0..=1 pages, domain, all, context; bit 2 leaves only; bits 4..=7
//!   domain or device. Bytes 2..=3: pages minus one. Bytes 4..=11: IOVA.
//! - 3: switch. Byte 1: 0 on, 1 take the faults, 2 clear the overflow.
//! - 4: program. Byte 1: page of the root table; from 16 up outside memory.
//!
//! A second unit without caches runs in parallel. Its answers must equal a walk over present
//! memory. The answers of the first unit must equal a walk over memory as it was at some time since
//! the last invalidation ([`reference`]).

mod history;
mod reference;

use ringfence_hw::{
    FaultRecord, Geometry, InvalidationGranularity, Replacement, UnitConfig, VtdUnit, WALK_CACHES,
};
use ringfence_types::{
    Access, CachedLevels, DomainId, Fault, FaultReason, Invalidation, Iova, Pfn, PfnRange,
    PhysAddr, PhysRange, RequesterId,
};

use crate::OutcomeHook;
use history::{History, PAGE_BYTES, PAGES, Time, View};
use reference::{Asked, Log, Memory, Reference};

/// Outcomes that the corpus reaches: every kind of answer, every invalidation, every reason for a
/// VT-d unit to stop an access.
pub const OUTCOMES: &[&str] = &[
    "one range",
    "several ranges",
    "stale",
    "switched off",
    "invalidate pages",
    "invalidate leaves",
    "invalidate domain",
    "invalidate all",
    "invalidate context",
    "fault lost",
    "RootNotPresent",
    "ContextNotPresent",
    "ContextInvalid",
    "AddressBeyondWidth",
    "WriteDenied",
    "ReadDenied",
    "TableAccess",
    "ReservedBit",
    "NotPresent",
    "BadLength",
    "Blocked",
];

/// Three devices behind one bus, one behind another.
const DEVICES: [RequesterId; 4] = [
    RequesterId::new(0x000),
    RequesterId::new(0x001),
    RequesterId::new(0x002),
    RequesterId::new(0x100),
];

const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Operations of one input; the longest inputs have three times as many.
const MOST: usize = 128;

/// Runs one input.
pub fn run(data: &[u8], reached: OutcomeHook<'_>) {
    let Some((header, records)) = data.split_first() else {
        return;
    };
    let config = config(*header);
    let mut run = Run {
        history: History::default(),
        log: Log::default(),
        cached: Side::new(&config),
        plain: Side::new(&UnitConfig {
            fault_log: config.fault_log,
            ..UnitConfig::UNCACHED
        }),
        reached,
    };
    let (operations, _) = records.as_chunks::<12>();
    for (now, operation) in (1..).zip(operations.iter().take(MOST)) {
        run.step(now, operation);
    }
}

fn config(header: u8) -> UnitConfig {
    let geometry = |sets, ways| Geometry::new(sets, ways).expect("powers of two");
    let if_set = |bit: u8, geometry| {
        if header & bit == 0 {
            Geometry::ABSENT
        } else {
            geometry
        }
    };
    UnitConfig {
        iotlb: match header & 3 {
            0 => Geometry::ABSENT,
            1 => geometry(1, 1),
            2 => geometry(2, 2),
            _ => geometry(8, 4),
        },
        walk_caches: [if_set(4, geometry(2, 2)); WALK_CACHES],
        contexts: if_set(8, geometry(2, 1)),
        replacement: if header & 16 == 0 {
            Replacement::Lru
        } else {
            Replacement::Fifo
        },
        fault_log: if header & 64 == 0 { 2 } else { 16 },
        granularity: if header & 32 == 0 {
            InvalidationGranularity::Selective
        } else {
            InvalidationGranularity::GlobalOnly
        },
    }
}

/// A unit, and the counts of its fault log.
struct Side {
    unit: VtdUnit,
    /// Number of stopped accesses.
    stopped: u64,
    /// Number of records taken.
    taken: u64,
}

struct Run<'a> {
    history: History,
    log: Log,
    cached: Side,
    plain: Side,
    reached: OutcomeHook<'a>,
}

impl Run<'_> {
    fn step(&mut self, now: Time, operation: &[u8; 12]) {
        let [kind, a, b, c, rest @ ..] = *operation;
        let count = u16::from_le_bytes([b, c]);
        let word = u64::from_le_bytes(rest);
        match kind % 5 {
            0 => {
                let target = u64::from(a >> 4);
                let word = match target {
                    0 => word,
                    _ => (word & !ADDRESS) | (target * PAGE_BYTES),
                };
                self.history
                    .store(now, u64::from(a) % PAGES, u64::from(count) % 512, word);
            }
            1 => self.access(
                now,
                &Asked {
                    device: DEVICES[usize::from(a & 3)],
                    iova: Iova::new(word),
                    bytes: u64::from(count) << (a >> 7 << 5),
                    access: if a & 4 == 0 {
                        Access::Read
                    } else {
                        Access::Write
                    },
                },
            ),
            2 => self.invalidate(now, a, count, word),
            3 => self.switch(a),
            _ => {
                let root = PhysAddr::new(u64::from(a) * PAGE_BYTES);
                self.log.program(now, root);
                self.both(|side| side.unit.set_root_table(root));
            }
        }
        self.both(|side| side.check());
    }

    fn both(&mut self, mut work: impl FnMut(&mut Side)) {
        work(&mut self.cached);
        work(&mut self.plain);
    }

    fn access(&mut self, now: Time, asked: &Asked) {
        let memory = View::new(&self.history, now);
        let cached = self.cached.translate(&memory, asked);
        let plain = self.plain.translate(&memory, asked);
        match &cached {
            Ok(ranges) if ranges.len() > 1 => (self.reached)("several ranges"),
            Ok(_) => (self.reached)("one range"),
            Err(fault) => (self.reached)(name(fault.reason)),
        }
        if !self.cached.unit.is_enabled() {
            (self.reached)("switched off");
            let same = PhysRange::new(PhysAddr::new(asked.iova.get()), asked.bytes);
            assert_eq!(cached.clone().ok(), same.map(|range| vec![range]));
            assert_eq!(cached, plain);
            return;
        }
        if cached.is_ok() && cached != plain {
            (self.reached)("stale");
        }
        let whole =
            self.cached.unit.invalidation_granularity() == InvalidationGranularity::GlobalOnly;
        for (answer, caches) in [(&plain, Memory::None), (&cached, Memory::Cached { whole })] {
            let reference = Reference {
                history: &self.history,
                log: &self.log,
                devices: &DEVICES,
                now,
                caches,
            };
            assert!(reference.allows(asked, answer), "{answer:x?} at {now}");
        }
    }

    fn invalidate(&mut self, now: Time, a: u8, count: u16, word: u64) {
        let domain = DomainId::new(u16::from(a >> 4));
        let first = Pfn::containing(Iova::new(word));
        let request = match a & 3 {
            0 => {
                let Some(range) = PfnRange::new(first, u64::from(count) + 1) else {
                    return;
                };
                let (levels, name) = if a & 4 == 0 {
                    (CachedLevels::All, "invalidate pages")
                } else {
                    (CachedLevels::Leaves, "invalidate leaves")
                };
                (self.reached)(name);
                Invalidation::Pages {
                    domain,
                    range,
                    levels,
                }
            }
            1 => {
                (self.reached)("invalidate domain");
                Invalidation::Domain(domain)
            }
            2 => {
                (self.reached)("invalidate all");
                Invalidation::Global
            }
            _ => {
                (self.reached)("invalidate context");
                Invalidation::Context(DEVICES[usize::from(a >> 4 & 3)])
            }
        };
        self.log.invalidate(now, request);
        self.both(|side| side.unit.invalidate(&request));
    }

    fn switch(&mut self, a: u8) {
        if self.cached.unit.faults().overflowed() {
            (self.reached)("fault lost");
        }
        self.both(|side| {
            if a & 1 == 0 {
                side.unit.disable();
            } else {
                side.unit.enable();
            }
            while a & 2 != 0 && side.unit.faults().take().is_some() {
                side.taken += 1;
            }
            if a & 4 != 0 {
                side.unit.faults().clear_overflow();
            }
        });
    }
}

impl Side {
    fn new(config: &UnitConfig) -> Self {
        Self {
            unit: VtdUnit::vtd(config),
            stopped: 0,
            taken: 0,
        }
    }

    /// Returns the answer and checks its type's guarantees.
    fn translate(&mut self, memory: &View<'_>, asked: &Asked) -> Result<Vec<PhysRange>, Fault> {
        let Asked {
            device,
            iova,
            bytes,
            access,
        } = *asked;
        let mut answer = None;
        memory.every(1, |memory| {
            let ranges = self.unit.translate(memory, device, iova, bytes, access);
            answer = Some(ranges.map(|ranges| ranges.to_vec()));
        });
        let answer = answer.expect("asked once");
        match &answer {
            Ok(ranges) => {
                let length = |range: &PhysRange| range.last().get() - range.start().get() + 1;
                assert_eq!(ranges.iter().map(length).sum::<u64>(), bytes);
                for pair in ranges.windows(2) {
                    let next = pair[0].last().checked_add(1);
                    assert_ne!(next, Some(pair[1].start()), "adjacent: {ranges:x?}");
                }
            }
            Err(fault) => {
                self.stopped += 1;
                assert_eq!((fault.device, fault.access), (device, access));
                let log = self.unit.faults();
                if !log.overflowed() {
                    assert_eq!(log.iter().last(), Some(&FaultRecord::new(fault)));
                }
            }
        }
        answer
    }

    /// Checks that every fault is counted and that the log is bounded.
    fn check(&mut self) {
        assert_eq!(self.unit.stats().faults, self.stopped);
        let log = self.unit.faults();
        assert!(log.len() <= log.capacity());
        assert_eq!(log.len() as u64 + log.lost() + self.taken, self.stopped);
    }
}

/// Reasons of other units have no name here, which the corpus test reports.
const fn name(reason: FaultReason) -> &'static str {
    match reason {
        FaultReason::RootNotPresent => "RootNotPresent",
        FaultReason::ContextNotPresent => "ContextNotPresent",
        FaultReason::ContextInvalid => "ContextInvalid",
        FaultReason::AddressBeyondWidth => "AddressBeyondWidth",
        FaultReason::WriteDenied => "WriteDenied",
        FaultReason::ReadDenied => "ReadDenied",
        FaultReason::TableAccess => "TableAccess",
        FaultReason::ReservedBit => "ReservedBit",
        FaultReason::NotPresent => "NotPresent",
        FaultReason::BadLength => "BadLength",
        FaultReason::Blocked => "Blocked",
        _ => "unknown reason",
    }
}
