//! A layer that copies buffers into its own pool, and a device that uses its table.

use std::cell::RefCell;

use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::{Paged, Rounding, ShadowDepot, ShadowPool};
use ringfence_dma::{Attachment, Cpu, Dma, MapError, Mapping, Outcome, Space, UnmapError};
use ringfence_types::{Access, Direction, Iova, IovaRange, PhysAddr, PhysRange};

use crate::rig::{
    Accounts, Board, DEVICE, LAST_PAGE, Make, MakeTable, PAGE, Parts, Plain, Tree, memory,
};

/// First byte of the pool. Buffers lie below.
pub(crate) const POOL: u64 = 8 << 20;

pub(crate) type Table = Paged<Accounts<Tree>, Plain>;
pub(crate) type Pool = ShadowPool<RefCell<ShadowDepot>>;

/// Spaces whose copies lie in a pool that one table maps.
pub(crate) trait PoolSpace: Space {
    fn paged_part(&self) -> &Table;
    fn pool_part(&self) -> &Pool;
}

pub(crate) struct Machine<S: Space, F: FlushPolicy<S, u64>> {
    pub(crate) board: Board,
    pub(crate) dma: Dma<S, F, u64>,
    pub(crate) cpu: Cpu<S, F, u64>,
    pub(crate) at: Attachment,
}

impl<S: PoolSpace, F: FlushPolicy<S, u64>> Machine<S, F> {
    /// Creates a layer with a pool of `pages` pages, full of earlier data.
    pub(crate) fn with(pages: u64, flush: F, space: impl FnOnce(Table, Pool) -> S) -> Self {
        let board = Board::new();
        let old = vec![0x5a; (pages * PAGE) as usize];
        board.arena.write_bytes(PhysAddr::new(POOL), &old).unwrap();
        let mut dma = Dma::new(flush);
        let at = dma
            .attach(DEVICE, Iova::new(u64::MAX), |domain| {
                let table = Plain::make(&board, domain);
                let paged =
                    Paged::new(Accounts::new(Tree::make(LAST_PAGE)), table, Rounding::Exact);
                let pool = ShadowPool::new(memory(POOL, pages * PAGE), RefCell::new).unwrap();
                Ok::<_, ()>(space(paged, pool))
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

    /// Borrows the arguments of calls of the layer.
    pub(crate) fn parts(&mut self) -> Parts<'_, S, F, u64> {
        (&mut self.board, &mut self.dma, &mut self.cpu, &self.at)
    }

    pub(crate) fn space(&self) -> &S {
        self.dma.space(&self.at).unwrap()
    }

    pub(crate) fn bytes_in_use(&self) -> u64 {
        self.space().pool_part().bytes_in_use()
    }

    pub(crate) fn map(
        &mut self,
        memory: PhysRange,
        direction: Direction,
    ) -> Result<Mapping<u64>, MapError> {
        let (board, dma, cpu, at) = self.parts();
        let buffer = memory.start().get();
        dma.map_single(cpu, board, at, buffer, memory, direction)
            .map(|(mapping, _)| mapping)
            .map_err(|(back, error)| {
                assert_eq!(back, buffer);
                error
            })
    }

    /// Unmaps a mapping. Returns the buffer unless it is withheld.
    pub(crate) fn unmap(&mut self, mapping: Mapping<u64>) -> Option<u64> {
        self.try_unmap(mapping).unwrap()
    }

    pub(crate) fn try_unmap(
        &mut self,
        mapping: Mapping<u64>,
    ) -> Result<Option<u64>, UnmapError<u64>> {
        let (board, dma, cpu, at) = self.parts();
        let unmapped = dma.unmap_single(cpu, board, at, mapping);
        unmapped.map(Outcome::into_buffer)
    }

    pub(crate) fn unmap_received(&mut self, mapping: Mapping<u64>, received: u64) -> Option<u64> {
        let (board, dma, cpu, at) = self.parts();
        let unmapped = dma.unmap_received(cpu, board, at, mapping, received);
        unmapped.unwrap().into_buffer()
    }

    /// Ends the burst of a direction and returns its buffers.
    pub(crate) fn end_burst(&mut self, direction: Direction) -> Vec<u64> {
        let mut back = Vec::new();
        let (board, dma, cpu, at) = self.parts();
        dma.end_burst(cpu, board, at, direction, |buffer| back.push(buffer))
            .unwrap();
        back
    }

    /// Returns the memory behind a byte that the device may access; `None` after a fault.
    pub(crate) fn translate(&self, iova: Iova, access: Access) -> Option<PhysAddr> {
        let table = &self.space().paged_part().table().0;
        let leaf = table.lookup(&*self.board.arena, iova)?;
        leaf.permissions
            .allows(access)
            .then(|| leaf.base.wrapping_add(iova.offset_in(PAGE)))
    }

    /// Makes the device write bytes; returns the number of bytes before the first fault.
    pub(crate) fn device_write(&self, at: Iova, bytes: &[u8]) -> usize {
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
    pub(crate) fn device_read(&self, range: IovaRange) -> Vec<u8> {
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

    pub(crate) fn write(&self, start: u64, bytes: &[u8]) {
        let start = PhysAddr::new(start);
        self.board.arena.write_bytes(start, bytes).unwrap();
    }

    pub(crate) fn read(&self, start: u64, bytes: usize) -> Vec<u8> {
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
