//! A layer with shadow buffers, and a device that uses its table.

use std::cell::RefCell;

use ringfence_dma::flush::Strict;
use ringfence_dma::space::{
    FromDevice, Paged, Rounding, ShadowDepot, ShadowPolicy, ShadowPool, ShadowSpace, WhenExhausted,
};
use ringfence_dma::{Attachment, Cpu, Dma, MapError, Mapping, Released};
use ringfence_types::{Access, Direction, Iova, IovaRange, PhysAddr, PhysRange};

use crate::rig::*;

pub(super) type Shadowed = ShadowSpace<Accounts<Tree>, Plain, RefCell<ShadowDepot>>;

/// First byte of the pool. Buffers lie below.
pub(crate) const POOL: u64 = 8 << 20;

pub(super) const POLICY: ShadowPolicy = ShadowPolicy {
    from_device: FromDevice::Kept,
    when_exhausted: WhenExhausted::Refuse,
};

pub(super) struct Machine {
    pub(super) board: Board,
    pub(super) dma: Dma<Shadowed, Strict, u64>,
    pub(super) cpu: Cpu<Shadowed, Strict, u64>,
    pub(super) at: Attachment,
}

impl Machine {
    /// Creates a layer with a pool of `pages` pages, full of earlier data.
    pub(super) fn new(pages: u64, policy: ShadowPolicy) -> Self {
        let board = Board::new();
        let old = vec![0x5a; (pages * PAGE) as usize];
        board.arena.write_bytes(PhysAddr::new(POOL), &old).unwrap();
        let mut dma = Dma::new(Strict);
        let at = dma
            .attach(DEVICE, Iova::new(u64::MAX), |domain| {
                let table = Plain::make(&board, domain);
                let paged =
                    Paged::new(Accounts::new(Tree::make(LAST_PAGE)), table, Rounding::Exact);
                let pool = ShadowPool::new(memory(POOL, pages * PAGE), RefCell::new).unwrap();
                Ok::<_, ()>(ShadowSpace::new(paged, pool, policy))
            })
            .unwrap();
        let cpu = dma.cpu();
        Self {
            board,
            dma,
            cpu,
            at,
        }
    }

    pub(super) fn space(&self) -> &Shadowed {
        self.dma.space(&self.at).unwrap()
    }

    pub(super) fn map(
        &mut self,
        memory: PhysRange,
        direction: Direction,
    ) -> Result<Mapping<u64>, MapError> {
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        let buffer = memory.start().get();
        self.dma
            .map_single(cpu, board, &self.at, buffer, memory, direction)
            .map(|(mapping, _)| mapping)
            .map_err(|(back, error)| {
                assert_eq!(back, buffer);
                error
            })
    }

    pub(super) fn unmap(&mut self, mapping: Mapping<u64>) -> u64 {
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        let Released(buffer) = self
            .dma
            .unmap_single(cpu, board, &self.at, mapping)
            .unwrap();
        buffer
    }

    pub(super) fn unmap_received(&mut self, mapping: Mapping<u64>, received: u64) -> u64 {
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        let dma = &self.dma;
        let Released(buffer) = dma
            .unmap_received(cpu, board, &self.at, mapping, received)
            .unwrap();
        buffer
    }

    /// Returns the memory behind a byte that the device may access; `None` after a fault.
    pub(super) fn translate(&self, iova: Iova, access: Access) -> Option<PhysAddr> {
        let table = &self.space().paged().table().0;
        let leaf = table.lookup(&*self.board.arena, iova)?;
        leaf.permissions
            .allows(access)
            .then(|| leaf.base.wrapping_add(iova.offset_in(PAGE)))
    }

    /// Makes the device write bytes; returns the number of bytes before the first fault.
    pub(super) fn device_write(&self, at: Iova, bytes: &[u8]) -> usize {
        let mut done = 0;
        while done < bytes.len() {
            let iova = at.wrapping_add(done as u64);
            let count = (bytes.len() - done).min((PAGE - iova.offset_in(PAGE)) as usize);
            let Some(target) = self.translate(iova, Access::Write) else {
                break;
            };
            self.write(target.get(), &bytes[done..done + count]);
            done += count;
        }
        done
    }

    /// Makes the device read bytes up to the first fault.
    pub(super) fn device_read(&self, range: IovaRange) -> Vec<u8> {
        let mut found = Vec::new();
        while found.len() < range.bytes() as usize {
            let iova = range.start().wrapping_add(found.len() as u64);
            let left = range.bytes() as usize - found.len();
            let count = left.min((PAGE - iova.offset_in(PAGE)) as usize);
            let Some(source) = self.translate(iova, Access::Read) else {
                break;
            };
            found.extend(self.read(source.get(), count));
        }
        found
    }

    pub(super) fn write(&self, start: u64, bytes: &[u8]) {
        let start = PhysAddr::new(start);
        self.board.arena.write_bytes(start, bytes).unwrap();
    }

    pub(super) fn read(&self, start: u64, bytes: usize) -> Vec<u8> {
        let mut data = vec![0; bytes];
        let start = PhysAddr::new(start);
        self.board.arena.read_bytes(start, &mut data).unwrap();
        data
    }
}

/// Returns bytes that differ from their neighbours, none of which is 0.
pub(crate) fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed) | 1)
        .collect()
}

/// Returns the whole pages of a mapping.
pub(crate) fn pages_of(range: IovaRange) -> IovaRange {
    let start = range.start().align_down(PAGE);
    let last = range.last().align_down(PAGE).wrapping_add(PAGE - 1);
    IovaRange::inclusive(start, last).unwrap()
}
