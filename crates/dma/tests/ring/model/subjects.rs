//! The implementations under test: a layer of shared rings, and rings that one CPU owns.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ringfence_dma::flush::Burst;
use ringfence_dma::ring::{OwnedRing, Ring, RingMapping, SlotChoice};
use ringfence_dma::space::Rings;
use ringfence_dma::{
    Attachment, Cpu, Dma, DmaSegment, MapReason, Mapping, SgLimits, SgMapping, SgRequest, Withheld,
};
use ringfence_types::{Direction, Iova, IovaRange, PhysRange, RingId, RingIova};

use super::SLOTS;
use crate::rig::*;

/// A layer with `SLOTS.len()` rings and two CPUs.
pub(super) trait Subject {
    /// Maps pieces and returns the address of each.
    fn map(
        &mut self,
        board: &mut Board,
        at: usize,
        id: u64,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Result<Vec<RingIova>, MapReason>;
    fn unmap(&mut self, board: &mut Board, cpu: usize, id: u64);
    /// Unmaps a range by its address alone, as a mapping of `ring`. Returns true if that succeeded.
    fn claim(&mut self, board: &mut Board, ring: usize, range: IovaRange) -> bool;
    fn end_burst(
        &mut self,
        board: &mut Board,
        cpu: usize,
        ring: usize,
        direction: Direction,
    ) -> Result<Vec<u64>, ()>;
    fn doorbell(&mut self, board: &mut Board);
    /// True if a burst covers only one direction.
    fn by_direction(&self) -> bool;
}

enum Held {
    One(Mapping<u64>),
    List(SgMapping<u64>),
}

type Space = Rings<Ring, RefCell<Ring>>;

pub(super) struct Layer {
    dma: Dma<Space, Burst, u64>,
    cpus: Vec<Cpu<Space, Burst, u64>>,
    at: Vec<Attachment>,
    held: BTreeMap<u64, (usize, Held)>,
}

impl Layer {
    pub(super) fn new(board: &Board, choice: SlotChoice) -> Self {
        // Longer than any burst of this test, so no burst is invalidated in parts.
        let mut dma = Dma::new(Burst::new(64));
        let first = dma
            .attach(DEVICE, Iova::new(u64::MAX), |domain| {
                let rings = board.rings(choice, &SLOTS);
                Ok::<_, ()>(Rings::new(domain, DEVICE, rings, RefCell::new))
            })
            .unwrap();
        let at = (0..SLOTS.len())
            .map(|ring| dma.on_ring(&first, RingId::new(ring as u16)).unwrap())
            .collect();
        Self {
            cpus: vec![dma.cpu(), dma.cpu()],
            dma,
            at,
            held: BTreeMap::new(),
        }
    }
}

impl Subject for Layer {
    fn map(
        &mut self,
        board: &mut Board,
        ring: usize,
        id: u64,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Result<Vec<RingIova>, MapReason> {
        let (dma, at) = (&self.dma, &self.at[ring]);
        let cpu = &mut self.cpus[id as usize % 2];
        let (held, found) = if let [piece] = pieces {
            match dma.map_single(cpu, board, at, id, *piece, direction) {
                Ok((mapping, _)) => {
                    let found = vec![mapping.iova().into()];
                    (Held::One(mapping), found)
                }
                Err((back, error)) => {
                    assert_eq!(back, id);
                    return Err(error.reason);
                }
            }
        } else {
            let empty = IovaRange::inclusive(Iova::ZERO, Iova::ZERO).unwrap();
            let mut out = vec![DmaSegment { range: empty }; pieces.len()];
            let request = SgRequest {
                buffer: id,
                pieces,
                direction,
                limits: SgLimits::default(),
                out: &mut out,
            };
            match dma.map_sg(cpu, board, at, request) {
                Ok((mapping, count)) => {
                    assert_eq!(count, pieces.len());
                    for (segment, piece) in out.iter().zip(pieces) {
                        assert_eq!(segment.range.bytes(), piece.bytes());
                    }
                    let found = out.iter().map(|s| s.range.start().into()).collect();
                    (Held::List(mapping), found)
                }
                Err((back, error)) => {
                    assert_eq!(back, id);
                    return Err(error.reason);
                }
            }
        };
        self.held.insert(id, (ring, held));
        Ok(found)
    }

    fn unmap(&mut self, board: &mut Board, cpu: usize, id: u64) {
        let (ring, held) = self.held.remove(&id).unwrap();
        let (dma, at, cpu) = (&self.dma, &self.at[ring], &mut self.cpus[cpu]);
        let Withheld = match held {
            Held::One(mapping) => dma.unmap_single(cpu, board, at, mapping).unwrap(),
            Held::List(mapping) => dma.unmap_sg(cpu, board, at, mapping).unwrap(),
        };
    }

    fn claim(&mut self, board: &mut Board, ring: usize, range: IovaRange) -> bool {
        let (dma, at, cpu) = (&self.dma, &self.at[ring], &mut self.cpus[0]);
        let mapping = Mapping::claim(at, range, Direction::ToDevice, 0);
        dma.unmap_single(cpu, board, at, mapping).is_ok()
    }

    fn end_burst(
        &mut self,
        board: &mut Board,
        cpu: usize,
        ring: usize,
        direction: Direction,
    ) -> Result<Vec<u64>, ()> {
        let mut back = Vec::new();
        let (dma, at, cpu) = (&self.dma, &self.at[ring], &mut self.cpus[cpu]);
        dma.end_burst(cpu, board, at, direction, |id| back.push(id))
            .map_err(drop)?;
        Ok(back)
    }

    fn doorbell(&mut self, board: &mut Board) {
        for cpu in &mut self.cpus {
            self.dma.sync_map(cpu, board, &self.at[0]);
        }
    }

    fn by_direction(&self) -> bool {
        true
    }
}

pub(super) struct Owner {
    rings: Vec<OwnedRing<'static, u64>>,
    held: BTreeMap<u64, (usize, RingMapping<u64>)>,
}

impl Owner {
    pub(super) fn new(board: &Board, choice: SlotChoice) -> Self {
        let rings = board.rings(choice, &SLOTS);
        // A driver keeps its ring's memory mapped for its lifetime; leak it here.
        let memory: &'static Memory = Box::leak(Box::new(board.memory.clone()));
        Self {
            rings: rings
                .into_iter()
                .map(|ring| OwnedRing::new(ring, memory, DOMAIN, DEVICE).unwrap())
                .collect(),
            held: BTreeMap::new(),
        }
    }
}

impl Subject for Owner {
    fn map(
        &mut self,
        board: &mut Board,
        ring: usize,
        id: u64,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> Result<Vec<RingIova>, MapReason> {
        let mapping = self.rings[ring]
            .map(&*board.memory, id, &pieces[0], direction)
            .map_err(|(back, reason)| {
                assert_eq!(back, id);
                reason
            })?;
        let iova = mapping.iova().into();
        self.held.insert(id, (ring, mapping));
        Ok(vec![iova])
    }

    fn unmap(&mut self, board: &mut Board, _cpu: usize, id: u64) {
        let (ring, mapping) = self.held.remove(&id).unwrap();
        // Another ring rejects the mapping and returns it.
        let other = (ring + 1) % self.rings.len();
        let mapping = self.rings[other]
            .unmap(&*board.memory, mapping)
            .unwrap_err()
            .0;
        let Withheld = self.rings[ring].unmap(&*board.memory, mapping).unwrap();
    }

    fn claim(&mut self, board: &mut Board, ring: usize, range: IovaRange) -> bool {
        let ring = &mut self.rings[ring];
        let mapping = RingMapping::claim(ring, range, 0);
        mapping.is_some_and(|mapping| ring.unmap(&*board.memory, mapping).is_ok())
    }

    fn end_burst(
        &mut self,
        board: &mut Board,
        _cpu: usize,
        ring: usize,
        _direction: Direction,
    ) -> Result<Vec<u64>, ()> {
        let mut back = Vec::new();
        let memory = board.memory.clone();
        self.rings[ring]
            .end_burst(&*memory, &mut board.port, |id| back.push(id))
            .map_err(drop)?;
        Ok(back)
    }

    fn doorbell(&mut self, board: &mut Board) {
        for ring in &mut self.rings {
            ring.sync_map(&*board.memory);
        }
    }

    fn by_direction(&self) -> bool {
        false
    }
}
