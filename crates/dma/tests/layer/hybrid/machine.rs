//! A layer with hybrid copying, and a device that uses its table.

use std::cell::RefCell;

use ringfence_dma::flush::FlushPolicy;
use ringfence_dma::space::{
    FromDevice, HybridPolicy, HybridSpace, Paged, Rounding, ShadowDepot, ShadowPool, SplitTable,
};
use ringfence_dma::{Attachment, Cpu, Dma, MapError, Mapping, Outcome, UnmapError};
use ringfence_types::{Access, Direction, Iova, IovaRange, PhysAddr, PhysRange};

use crate::rig::*;
pub(super) use crate::shadow::machine::{POOL, pages_of, pattern};

pub(super) type Hybrid =
    HybridSpace<Accounts<Tree>, Plain, RefCell<ShadowDepot>, RefCell<SplitTable>>;

/// Splits every buffer with a whole page.
pub(super) const POLICY: HybridPolicy = HybridPolicy {
    from_device: FromDevice::Kept,
    threshold: 0,
};

pub(super) struct Machine<F: FlushPolicy<Hybrid, u64>> {
    pub(super) board: Board,
    pub(super) dma: Dma<Hybrid, F, u64>,
    pub(super) cpu: Cpu<Hybrid, F, u64>,
    pub(super) at: Attachment,
}

impl<F: FlushPolicy<Hybrid, u64>> Machine<F> {
    /// Creates a layer with a pool of `pages` pages, full of earlier data.
    pub(super) fn new(pages: u64, policy: HybridPolicy, flush: F) -> Self {
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
                Ok::<_, ()>(HybridSpace::new(paged, pool, policy, RefCell::new))
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

    pub(super) fn space(&self) -> &Hybrid {
        self.dma.space(&self.at).unwrap()
    }

    pub(super) fn bytes_in_use(&self) -> u64 {
        self.space().shadow_space().pool().bytes_in_use()
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

    /// Unmaps a mapping. Returns the buffer unless it is withheld.
    pub(super) fn unmap(&mut self, mapping: Mapping<u64>) -> Option<u64> {
        self.try_unmap(mapping).unwrap()
    }

    pub(super) fn try_unmap(
        &mut self,
        mapping: Mapping<u64>,
    ) -> Result<Option<u64>, UnmapError<u64>> {
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        let unmapped = self.dma.unmap_single(cpu, board, &self.at, mapping);
        unmapped.map(Outcome::into_buffer)
    }

    pub(super) fn unmap_received(&mut self, mapping: Mapping<u64>, received: u64) -> Option<u64> {
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        let unmapped = self
            .dma
            .unmap_received(cpu, board, &self.at, mapping, received);
        unmapped.unwrap().into_buffer()
    }

    /// Ends the burst of a direction and returns its buffers.
    pub(super) fn end_burst(&mut self, direction: Direction) -> Vec<u64> {
        let mut back = Vec::new();
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        let ended = self
            .dma
            .end_burst(cpu, board, &self.at, direction, |buffer| back.push(buffer));
        ended.unwrap();
        back
    }

    /// Returns the memory behind a byte that the device may access; `None` after a fault.
    pub(super) fn translate(&self, iova: Iova, access: Access) -> Option<PhysAddr> {
        let table = &self.space().shadow_space().paged().table().0;
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
