//! Lists in a space that may keep unmapped translations, over an allocator that requests flushes.

use std::cell::RefCell;
use std::collections::VecDeque;

use ringfence_dma::flush::Strict;
use ringfence_dma::space::{
    AddressLimits, AddressSpace, CachingSpace, ClearedRange, CopyingSpace, MapResult, Paged,
    RingSpace, Rounding, SgSpace, UnmapRefusal,
};
use ringfence_dma::{
    Attachment, Cpu, Dma, DmaSegment, MapReason, Platform, Released, SgLimits, SgMapping,
    SgRequest, UnmapFailure, UnmapReason,
};
use ringfence_iova::AllocError;
use ringfence_pgtable::UnmapError;
use ringfence_types::{
    CachedLevels, Direction, DomainId, Flushed, Invalidation, Iova, IovaRange, Permissions,
    PfnRange, PhysRange, WholeDomain,
};

use crate::rig::*;

/// Last page of the space, and its number of pages.
const LAST: u64 = 4;

/// A space that maps each piece separately and keeps no unmapped translation. It answers the next
/// unmaps as the list says.
struct PerPiece<A>(Space<A, Plain>, RefCell<VecDeque<Result<(), UnmapRefusal>>>);

impl<A: Make> AddressSpace for PerPiece<A> {
    type PerCpu = <Space<A, Plain> as AddressSpace>::PerCpu;
    type FreeProof = A::FreeProof;
    type UnmapResult = ClearedRange;

    fn per_cpu(&self) -> Self::PerCpu {
        self.0.per_cpu()
    }

    fn domain(&self) -> DomainId {
        self.0.domain()
    }

    fn map<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        self.0.map(cpu, platform, pieces, permissions, limits)
    }

    fn unmap<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        range: IovaRange,
    ) -> Result<ClearedRange, UnmapRefusal> {
        let scripted = self.1.borrow_mut().pop_front();
        scripted.unwrap_or(Ok(()))?;
        self.0.unmap(cpu, platform, range)
    }

    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P) {
        self.0.sync(cpu, platform);
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        self.0.is_empty(platform)
    }

    fn release(&self, cpu: &mut Self::PerCpu, range: A::FreeProof) {
        self.0.release(cpu, range);
    }

    fn flushed(&self, cpu: &mut Self::PerCpu, proof: Flushed<WholeDomain>) {
        self.0.flushed(cpu, proof);
    }

    fn drain(&self, cpu: &mut Self::PerCpu) {
        self.0.drain(cpu);
    }

    fn reserved(&self, range: PfnRange) -> PfnRange {
        self.0.reserved(range)
    }

    fn invalidation(&self, range: PfnRange, levels: CachedLevels) -> Invalidation {
        self.0.invalidation(range, levels)
    }
}

impl<A: Make> SgSpace for PerPiece<A> {
    const CONTIGUOUS_SG: bool = false;
}

impl<A: Make> RingSpace for PerPiece<A> {}

impl<A: Make> CopyingSpace for PerPiece<A> {}

impl<A: Make> CachingSpace for PerPiece<A> {
    const CACHES_UNMAPPED: bool = true;

    fn map_per_segment<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
        placed: &mut Vec<IovaRange>,
    ) -> Result<u32, MapReason> {
        let mut steps = 0;
        for piece in pieces {
            let piece = std::slice::from_ref(piece);
            match self.0.map(cpu, platform, piece, permissions, limits) {
                Ok(found) => {
                    placed.push(found.range);
                    steps += found.steps;
                }
                // The fake loses the pieces before this one.
                Err(reason) => return Err(reason),
            }
        }
        Ok(steps)
    }
}

struct Lists<A: Make> {
    board: Board,
    dma: Dma<PerPiece<A>, Strict, u64>,
    cpu: Cpu<PerPiece<A>, Strict, u64>,
    at: Attachment,
}

impl<A: Make> Lists<A> {
    fn new() -> Self {
        let board = Board::new();
        let mut dma = Dma::new(Strict);
        let at = dma
            .attach(DEVICE, Iova::new(u64::MAX), |domain| {
                let (allocator, table) =
                    (Accounts::new(A::make(LAST)), Plain::make(&board, domain));
                let paged = Paged::new(allocator, table, Rounding::Exact);
                Ok::<_, ()>(PerPiece(paged, RefCell::default()))
            })
            .unwrap();
        Self {
            cpu: dma.cpu(),
            board,
            dma,
            at,
        }
    }

    /// Maps `count` pieces of `pages` pages each.
    fn map(&mut self, count: u64, pages: u64) -> Result<SgMapping<u64>, MapReason> {
        let piece = |at: u64| memory(at * 8 * PAGE, pages * PAGE);
        let pieces: Vec<_> = (0..count).map(piece).collect();
        let range = IovaRange::new(Iova::ZERO, 1).unwrap();
        let request = SgRequest {
            buffer: 7,
            pieces: &pieces,
            direction: Direction::ToDevice,
            limits: SgLimits::default(),
            out: &mut [DmaSegment { range }; LAST as usize],
        };
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        let mapped = self.dma.map_sg(cpu, board, &self.at, request);
        mapped
            .map(|(mapping, _)| mapping)
            .map_err(|(_, error)| error.reason)
    }

    fn unmap(&mut self, list: SgMapping<u64>) {
        let (cpu, board) = (&mut self.cpu, &mut self.board);
        let unmapped = self.dma.unmap_sg(cpu, board, &self.at, list);
        assert_eq!(unmapped.unwrap(), Released(7));
    }
}

/// The bitmap requests a flush of the domain each time when it has allocated every address.
#[test]
fn a_list_gets_the_addresses_that_a_flush_of_the_domain_releases() {
    let mut lists = Lists::<Bits>::new();
    for round in 0..6 {
        let list = lists.map(LAST, 1);
        let list = list.unwrap_or_else(|reason| panic!("round {round}: {reason:?}"));
        lists.unmap(list);
    }
    let flushes = lists.board.port.log.iter();
    let flushes = flushes.filter(|request| matches!(request, Invalidation::Domain(_)));
    assert_eq!(flushes.count(), 5, "one before each list but the first");
}

/// The freed pages wait in the CPU's magazines, as ranges of one page.
#[test]
fn a_list_gets_the_addresses_that_this_cpu_caches() {
    let mut lists = Lists::<Product>::new();
    let list = lists.map(LAST, 1).unwrap();
    lists.unmap(list);
    let list = lists.map(1, 2).unwrap();
    lists.unmap(list);
}

#[test]
fn a_list_fails_if_every_address_is_mapped() {
    let mut lists = Lists::<Bits>::new();
    let all = lists.map(LAST, 1).unwrap();
    let failed = lists.map(1, 1).unwrap_err();
    assert!(
        matches!(failed, MapReason::Alloc(AllocError::Exhausted { .. })),
        "{failed:?}"
    );
    lists.unmap(all);
}

/// Two further pieces are refused, for different reasons, in both orders.
#[test]
fn a_list_reports_its_first_refused_piece() {
    let iova = Iova::ZERO;
    let table = UnmapRefusal::Table(UnmapError::NotMapped { iova });
    for refusals in [
        [UnmapRefusal::NotAllocated, table],
        [table, UnmapRefusal::NotAllocated],
    ] {
        let mut lists = Lists::<Bits>::new();
        let list = lists.map(LAST, 1).unwrap();
        let [first, second] = refusals;
        let space = lists.dma.space(&lists.at).unwrap();
        *space.1.borrow_mut() = [Ok(()), Err(first), Ok(()), Err(second)].into();
        let (cpu, board) = (&mut lists.cpu, &mut lists.board);
        let unmapped = lists.dma.unmap_sg(cpu, board, &lists.at, list);
        match unmapped.map(drop).unwrap_err().reason {
            UnmapReason::PartlyUnmapped(failure, _) => {
                assert_eq!(failure, UnmapFailure::Refused(first));
            }
            other => panic!("{other:?}"),
        }
    }
}
