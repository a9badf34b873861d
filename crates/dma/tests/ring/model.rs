//! Random maps, unmaps, ends of bursts and failing invalidations, on an owned ring and on shared
//! rings of two CPUs. A reference checks the entries that a device may reach and those that it must
//! reach.

mod subjects;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use ringfence_dma::MapReason;
use ringfence_dma::ring::{FullReason, SlotChoice};
use ringfence_pgtable::{Coherency, RingPte};
use ringfence_types::{Direction, Iova, IovaRange, PhysRange};

use self::subjects::{Layer, Owner, Subject};
use crate::rig::*;

const SLOTS: [u32; 2] = [3, 8];

/// The reference's record of a mapping.
#[derive(Debug, Clone)]
struct Known {
    ring: usize,
    direction: Direction,
    pieces: Vec<(SlotKey, PhysRange)>,
    /// True if the device received the address.
    told: bool,
    /// The CPU that unmapped it, while the buffer is withheld.
    withheld: Option<usize>,
}

impl Known {
    fn words(&self, piece: &PhysRange) -> [u64; 2] {
        RingPte::new(piece, self.direction.permissions())
            .unwrap()
            .words()
    }
}

#[derive(Debug, Clone)]
enum Op {
    Map(usize, Vec<(u64, u64)>, Direction),
    Unmap(usize, usize),
    UnmapOldest(usize),
    Claim(usize, u64),
    EndBurst(usize, usize, Direction),
    Doorbell,
    Evict(u64),
    RefuseInvalidations(bool),
}

fn directions() -> impl Strategy<Value = Direction> {
    prop_oneof![
        Just(Direction::FromDevice),
        Just(Direction::ToDevice),
        Just(Direction::Bidirectional)
    ]
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let sizes = prop_oneof![1..5000_u64, Just((1 << 30) - 1)];
    let one = (0..1_u64 << 40, sizes);
    let pieces = prop_oneof![
        4 => prop::collection::vec(one.clone(), 1..=1),
        1 => prop::collection::vec(one, 2..=4)
    ];
    let op = prop_oneof![
        6 => (0..2_usize, pieces, directions()).prop_map(|(r, p, d)| Op::Map(r, p, d)),
        3 => (0..2_usize, any::<usize>()).prop_map(|(c, n)| Op::Unmap(c, n)),
        3 => (0..2_usize).prop_map(Op::UnmapOldest),
        2 => (0..2_usize, 0..12_u64).prop_map(|(r, s)| Op::Claim(r, s)),
        1 => (0..8_u64).prop_map(Op::Evict),
        3 => (0..2_usize, 0..2_usize, directions()).prop_map(|(c, r, d)| Op::EndBurst(c, r, d)),
        2 => Just(Op::Doorbell),
        1 => any::<bool>().prop_map(Op::RefuseInvalidations),
    ];
    prop::collection::vec(op, 1..120)
}

struct Checked<'a> {
    board: Board,
    subject: &'a mut dyn Subject,
    known: BTreeMap<u64, Known>,
    /// The slot of each ring after the one mapped last.
    tail: [u32; 2],
}

impl Checked<'_> {
    fn run(&mut self, ops: &[Op], choice: SlotChoice, lists: bool) {
        for (id, op) in ops.iter().enumerate() {
            let id = id as u64;
            self.step(id, op, choice, lists);
            self.check(op);
        }
        // Everything can be unmapped and returned.
        self.board.port.refuse = 0;
        self.board.port.fail = 0;
        for id in self.live() {
            self.subject.unmap(&mut self.board, 0, id);
            self.known.get_mut(&id).unwrap().withheld = Some(0);
        }
        for cpu in 0..2 {
            for ring in 0..SLOTS.len() {
                for direction in Direction::ALL {
                    self.end_burst(cpu, ring, direction);
                }
            }
        }
        assert!(self.known.is_empty(), "{:?}", self.known);
    }

    fn live(&self) -> Vec<u64> {
        let live = self.known.iter().filter(|(_, k)| k.withheld.is_none());
        live.map(|(id, _)| *id).collect()
    }

    fn step(&mut self, id: u64, op: &Op, choice: SlotChoice, lists: bool) {
        match op {
            Op::Map(ring, pieces, direction) => {
                let count = if lists { pieces.len() } else { 1 };
                let pieces: Vec<_> = pieces
                    .iter()
                    .take(count)
                    .map(|(s, b)| buffer(*s, *b))
                    .collect();
                self.map(id, *ring, &pieces, *direction, choice);
            }
            Op::Unmap(..) | Op::UnmapOldest(_) => {
                let live = self.live();
                let (cpu, id) = match op {
                    Op::Unmap(cpu, nth) if !live.is_empty() => (*cpu, live[nth % live.len()]),
                    Op::UnmapOldest(cpu) if !live.is_empty() => (*cpu, live[0]),
                    _ => return,
                };
                let asked = self.board.port.log.len();
                self.subject.unmap(&mut self.board, cpu, id);
                let asked = self.board.port.log.len() - asked;
                assert_eq!(asked, 0, "only the end of a burst invalidates");
                self.known.get_mut(&id).unwrap().withheld = Some(cpu);
            }
            Op::Claim(ring, slot) => self.claim(*ring, *slot),
            Op::EndBurst(cpu, ring, direction) => self.end_burst(*cpu, *ring, *direction),
            Op::Doorbell => {
                self.subject.doorbell(&mut self.board);
                self.known.values_mut().for_each(|known| known.told = true);
            }
            // A cache may write back any line at any time.
            Op::Evict(line) => self.board.memory.evict(TABLES.wrapping_add(line * 64)),
            Op::RefuseInvalidations(refuse) => {
                if *refuse {
                    self.board.port.refuse = 1;
                } else {
                    self.board.port.fail = 1;
                }
            }
        }
    }

    /// Unmap accepts only a live mapping, with its own range and ring.
    fn claim(&mut self, ring: usize, slot: u64) {
        let start = Iova::new((ring as u64) << 48 | slot << 30);
        let key = (ring as u16, slot as u32);
        let here = |known: &&Known| known.pieces.iter().any(|(at, _)| *at == key);
        let (mut wrong, mut right) = (vec![1 << 29], None);
        if let Some(known) = self.known.values().find(here) {
            let is_head = known.pieces[0].0 == key;
            let (_, piece) = known.pieces.iter().find(|(at, _)| *at == key).unwrap();
            wrong.push(piece.bytes() + 1);
            if is_head && known.withheld.is_none() {
                right = Some(piece.bytes());
            } else {
                // An inner piece of a list, or unmapped before.
                wrong.push(piece.bytes());
            }
        }
        let before = words(&self.board);
        let mut refused = |ring, start, bytes| {
            let range = IovaRange::new(start, bytes).unwrap();
            assert!(!self.subject.claim(&mut self.board, ring, range), "{range}");
        };
        for bytes in wrong {
            refused(ring, start, bytes);
        }
        if let Some(bytes) = right {
            refused((ring + 1) % SLOTS.len(), start, bytes);
            refused(ring, start.wrapping_add(1), bytes);
        }
        assert_eq!(words(&self.board), before);
    }

    fn map(
        &mut self,
        id: u64,
        ring: usize,
        pieces: &[PhysRange],
        direction: Direction,
        choice: SlotChoice,
    ) {
        let before = words(&self.board);
        // The slots in use, and the event that frees each.
        let mut taken: BTreeMap<SlotKey, FullReason> = BTreeMap::new();
        for known in self.known.values() {
            let wait = if known.withheld.is_none() {
                FullReason::Unmap
            } else {
                FullReason::BurstEnd
            };
            taken.extend(known.pieces.iter().map(|(key, _)| (*key, wait)));
        }
        match self
            .subject
            .map(&mut self.board, ring, id, pieces, direction)
        {
            Ok(found) => {
                assert_eq!(found.len(), pieces.len());
                for iova in &found {
                    assert_eq!(iova.offset(), 0);
                    assert_eq!(
                        taken.insert(slot_key(*iova), FullReason::Unmap),
                        None,
                        "{iova} is taken"
                    );
                    if choice == SlotChoice::Tail {
                        assert_eq!(slot_key(*iova).1, self.tail[ring], "not at the tail");
                        self.tail[ring] = (self.tail[ring] + 1) % SLOTS[ring];
                    }
                }
                let pieces = found.into_iter().map(slot_key).zip(pieces.iter().copied());
                let known = Known {
                    ring,
                    direction,
                    pieces: pieces.collect(),
                    told: false,
                    withheld: None,
                };
                self.known.insert(id, known);
            }
            Err(MapReason::RingFull(full)) => {
                assert_eq!(words(&self.board), before, "a stalled map changes nothing");
                let key = (full.ring.get(), full.slot.get());
                assert_eq!(taken.get(&key), Some(&full.reason), "{full}");
                if choice == SlotChoice::Tail {
                    let next = (0..pieces.len() as u32)
                        .map(|n| (ring as u16, (self.tail[ring] + n) % SLOTS[ring]));
                    let mut taken = next.filter(|key| taken.contains_key(key));
                    assert!(
                        taken.next().is_some(),
                        "{full}, the slots at the tail are free"
                    );
                }
                if choice == SlotChoice::NextFree {
                    let of_ring = taken.iter().filter(|((r, _), _)| usize::from(*r) == ring);
                    let free = SLOTS[ring] as usize - of_ring.clone().count();
                    assert!(free < pieces.len(), "{full}, {free} are free");
                    let any = of_ring
                        .clone()
                        .any(|(_, wait)| *wait == FullReason::BurstEnd);
                    assert_eq!(full.reason == FullReason::BurstEnd, any, "{full}");
                }
            }
            Err(MapReason::Ring(_)) => {
                assert!(pieces.len() as u32 > SLOTS[ring]);
                assert_eq!(words(&self.board), before);
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    fn end_burst(&mut self, cpu: usize, ring: usize, direction: Direction) {
        let by_direction = self.subject.by_direction();
        let (troubled, asked) = {
            let port = &self.board.port;
            (port.refuse + port.fail > 0, port.log.len())
        };
        let Ok(back) = self
            .subject
            .end_burst(&mut self.board, cpu, ring, direction)
        else {
            assert!(troubled);
            return;
        };
        assert!(
            self.board.port.log.len() <= asked + 1,
            "one invalidation a burst"
        );
        for id in &back {
            let known = self.known.remove(id).expect("comes back once");
            assert_eq!(known.ring, ring);
            assert!(!by_direction || (known.direction, known.withheld) == (direction, Some(cpu)));
            assert!(known.withheld.is_some());
        }
        if !troubled {
            let left = self.known.values().find(|known| {
                known.ring == ring
                    && known.withheld.is_some()
                    && (!by_direction
                        || known.direction == direction && known.withheld == Some(cpu))
            });
            assert!(left.is_none(), "{left:?} was not handed back");
        }
    }

    /// The ring holds every buffer that the device may reach, and the device reaches every buffer
    /// whose address it received.
    fn check(&mut self, op: &Op) {
        let reachable = self.board.reachable();
        let mut granted: BTreeMap<SlotKey, [u64; 2]> = BTreeMap::new();
        for known in self.known.values() {
            for (key, piece) in &known.pieces {
                let twice = granted.insert(*key, known.words(piece));
                assert_eq!(twice, None, "{key:?} is given twice");
            }
        }
        for (key, entries) in &reachable {
            let held: BTreeSet<_> = granted.get(key).copied().into_iter().collect();
            assert!(
                entries.is_subset(&held),
                "after {op:?} the device reaches {entries:x?} by {key:?}, held are {held:x?}"
            );
        }
        for known in self.known.values().filter(|k| k.withheld.is_none()) {
            if !known.told && self.board.coherency == Coherency::NonCoherent {
                continue;
            }
            for (key, piece) in &known.pieces {
                assert_eq!(
                    self.board.entry(*key).words(),
                    known.words(piece),
                    "{key:?}"
                );
            }
        }
    }
}

fn check(
    make: &mut dyn FnMut(&Board) -> Box<dyn Subject>,
    coherency: Coherency,
    choice: SlotChoice,
    ops: &[Op],
    lists: bool,
) {
    let board = Board::new(coherency);
    let mut subject = make(&board);
    let mut checked = Checked {
        board,
        subject: &mut *subject,
        known: BTreeMap::new(),
        tail: [0; 2],
    };
    checked.run(ops, choice, lists);
}

const ALL: [(Coherency, SlotChoice); 4] = [
    (Coherency::Coherent, SlotChoice::Tail),
    (Coherency::Coherent, SlotChoice::NextFree),
    (Coherency::NonCoherent, SlotChoice::Tail),
    (Coherency::NonCoherent, SlotChoice::NextFree),
];

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(192)
    })]

    #[test]
    fn a_shared_ring_gives_no_buffer_back_that_a_device_may_reach(ops in ops()) {
        for (coherency, choice) in ALL {
            check(&mut |board| Box::new(Layer::new(board, choice)), coherency, choice, &ops, true);
        }
    }

    #[test]
    fn an_owned_ring_gives_no_buffer_back_that_a_device_may_reach(ops in ops()) {
        for (coherency, choice) in ALL {
            check(&mut |board| Box::new(Owner::new(board, choice)), coherency, choice, &ops, false);
        }
    }
}
