//! Contiguous addresses for descriptors of 64 pages, in front of another allocator.
//!
//! F&S (SOSP 2024, section 3) takes one range of 64 pages for a receive descriptor and maps the
//! descriptor's pages one after the other into it. The translations of a descriptor then share the
//! tables of one walk, and one invalidation by address covers them. Here the allocator forms the
//! descriptors, so drivers need no change:
//!
//! - Each CPU has one open block of 64 pages for each set of permissions, and hands out its pages
//!   in ascending order.
//! - A block is used again when all of its pages are free. Until then none of them is.
//! - A request that does not fit opens the next block, if it has at most 32 pages. Larger requests
//!   that do not fit, and all requests without a block, go to the allocator below.
//!
//! Blocks lie below 4 GiB and never return to the allocator below. A bound on their number leaves
//! it the other addresses. One mapping that lives for long keeps one block.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU8, Ordering};

use ringfence_types::{Flushed, Lock, Permissions, Pfn, PfnRange};

use crate::allocator::LAST_32BIT_PAGE;
use crate::debug_check::DebugCheck;
use crate::{AllocError, AllocRequest, Allocation, IovaAllocator};

/// Binary logarithm of the pages of a block.
const BLOCK_ORDER: u8 = 6;
const BLOCK_PAGES: u64 = 1 << BLOCK_ORDER;

/// Largest request that opens a block, so that at most half of a block stays unused.
const OPENS_BLOCK: u64 = BLOCK_PAGES / 2;

/// Free blocks that a CPU keeps without the lock.
const LOCAL_BLOCKS: usize = 8;

/// Blocks below 4 GiB.
const MAX_BLOCKS: usize = (LAST_32BIT_PAGE as usize + 1) >> BLOCK_ORDER;

/// An allocator of contiguous addresses in front of `A`. `L` is a lock around [`FreeBlocks`].
///
/// ```
/// use std::sync::Mutex;
/// use ringfence_iova::{AllocRequest, Contiguous, FreeBlocks, IovaAllocator, MagazineLimits};
/// use ringfence_iova::Magazines;
/// use ringfence_types::{Pfn, PfnRange};
///
/// let space = PfnRange::inclusive(Pfn::new(1), Pfn::MAX).unwrap();
/// let below = Magazines::new(space, MagazineLimits::DEFAULT, Mutex::new)?;
/// let allocator = Contiguous::new(below, FreeBlocks::HALF_OF_32_BITS, Mutex::new)?;
/// let mut cpu = allocator.per_cpu();
/// let request = AllocRequest::new(1, Pfn::new(0xf_ffff));
/// let first = allocator.alloc(&mut cpu, &request)?.range;
/// let second = allocator.alloc(&mut cpu, &request)?.range;
/// assert_eq!(first.lo().get() + 1, second.lo().get());
/// # Ok::<(), ringfence_iova::AllocError>(())
/// ```
#[derive(Debug)]
pub struct Contiguous<A, L> {
    below: A,
    /// By block: pages that are allocated, or that a CPU can still hand out. 0 if the block is
    /// free, or belongs to the allocator below.
    held: Box<[AtomicU8]>,
    free: L,
}

/// The free blocks that CPUs share.
#[derive(Debug)]
pub struct FreeBlocks {
    /// Has room for all blocks that were taken, so that a free never allocates memory.
    blocks: Vec<u16>,
    /// Blocks that were taken from the allocator below.
    taken: usize,
    most: usize,
    debug_check: DebugCheck,
}

/// The handle of one CPU. [`drain`](IovaAllocator::drain) it before dropping it, or its blocks are
/// lost.
#[derive(Debug)]
pub struct ContiguousCpu<C> {
    below: C,
    /// By [`index_of`] the permissions.
    open: [Option<OpenBlock>; 3],
    free: [u16; LOCAL_BLOCKS],
    len: usize,
}

/// A block with pages that were not handed out yet.
#[derive(Debug, Clone, Copy)]
struct OpenBlock {
    block: u16,
    /// Index of the next page.
    next: u64,
}

impl OpenBlock {
    /// Returns the index of the request's first page; `None` if the block has no room for it.
    #[inline]
    fn index_for(&self, request: &AllocRequest) -> Option<u64> {
        let mask = (1_u64 << request.align_order.min(BLOCK_ORDER)) - 1;
        let first = (self.next + mask) & !mask;
        let fits = first.saturating_add(request.pages) <= BLOCK_PAGES;
        (fits && request.align_order <= BLOCK_ORDER).then_some(first)
    }
}

/// Returns the first page of a block.
#[inline]
const fn first_page(block: u16) -> u64 {
    (block as u64) << BLOCK_ORDER
}

/// Returns true if all pages of `block` lie at or below `limit`.
#[inline]
const fn is_within(block: u16, limit: Pfn) -> bool {
    first_page(block) + (BLOCK_PAGES - 1) <= limit.get()
}

#[inline]
fn index_of(permissions: Permissions) -> usize {
    if permissions == Permissions::READ {
        0
    } else if permissions == Permissions::WRITE {
        1
    } else {
        2
    }
}

/// The source of the next block.
enum Source {
    Free(u16),
    /// The allocator below; the block is already counted.
    Below,
    Exhausted,
}

impl FreeBlocks {
    /// A bound on the blocks: half of the 32-bit space.
    pub const HALF_OF_32_BITS: usize = MAX_BLOCKS / 2;

    /// Takes a free block within `limit`, or counts one that the caller takes from below.
    fn take(&mut self, limit: Pfn) -> Source {
        if let Some(block) = self.blocks.pop_if(|last| is_within(*last, limit)) {
            return Source::Free(block);
        }
        let room = (self.taken + 1).saturating_sub(self.blocks.len());
        if self.taken >= self.most || self.blocks.try_reserve(room).is_err() {
            return Source::Exhausted;
        }
        self.taken += 1;
        Source::Below
    }
}

impl<A: IovaAllocator<FreeProof = Flushed>, L: Lock<FreeBlocks>> Contiguous<A, L> {
    /// Creates an allocator that takes at most `most` blocks of 64 pages from `below`. `lock` wraps
    /// the shared state, for example `Mutex::new`.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`].
    pub fn new(
        below: A,
        most: usize,
        lock: impl FnOnce(FreeBlocks) -> L,
    ) -> Result<Self, AllocError> {
        let mut held = Vec::new();
        held.try_reserve_exact(MAX_BLOCKS)
            .map_err(|_| AllocError::OutOfMemory)?;
        held.resize_with(MAX_BLOCKS, AtomicU8::default);
        Ok(Self {
            below,
            held: held.into_boxed_slice(),
            free: lock(FreeBlocks {
                blocks: Vec::new(),
                taken: 0,
                most,
                debug_check: DebugCheck::default(),
            }),
        })
    }

    /// Returns the number of blocks that were taken from the allocator below.
    pub fn blocks(&self) -> usize {
        self.free.with(|free| free.taken)
    }

    /// Returns the block that contains `range`; `None` if the allocator below owns it.
    #[inline]
    fn block_of(&self, range: PfnRange) -> Option<u16> {
        let block = range.lo().get() >> BLOCK_ORDER;
        let held = self.held.get(usize::try_from(block).ok()?)?;
        // No other CPU frees the caller's pages, so the count of their block is not 0.
        (block == range.hi().get() >> BLOCK_ORDER && held.load(Ordering::Relaxed) > 0)
            .then_some(block as u16)
    }

    /// Gives `pages` pages of a block back. Returns true if no other page of it is held, so that
    /// the caller owns the block; `None` if fewer pages were held.
    #[inline]
    fn give_back(&self, block: u16, pages: u64) -> Option<bool> {
        let held = self.held.get(usize::from(block))?;
        let pages = u8::try_from(pages).ok()?;
        // Acquire and release: the CPU that uses the block again sees the end of all mappings.
        let before = held.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |held| {
            held.checked_sub(pages)
        });
        Some(before.ok()? == pages)
    }

    /// Keeps a block of which no page is held.
    fn keep_free(&self, cpu: &mut ContiguousCpu<A::PerCpu>, block: u16) {
        match cpu.free.get_mut(cpu.len) {
            Some(slot) => {
                *slot = block;
                cpu.len += 1;
            }
            None => self.free.with(|free| free.blocks.push(block)),
        }
    }

    /// Gives the rest of an open block back.
    fn close(&self, cpu: &mut ContiguousCpu<A::PerCpu>, open: OpenBlock) {
        let rest = BLOCK_PAGES - open.next;
        if self.give_back(open.block, rest) == Some(true) {
            self.keep_free(cpu, open.block);
        }
    }

    /// Returns a block within `limit` of which no page is held. `None` if there is none.
    fn free_block(&self, cpu: &mut ContiguousCpu<A::PerCpu>, limit: Pfn) -> Option<u16> {
        if let Some(last) = cpu.len.checked_sub(1) {
            let block = *cpu.free.get(last)?;
            if is_within(block, limit) {
                cpu.len = last;
                return Some(block);
            }
        }
        match self.free.with(|free| free.take(limit)) {
            Source::Free(block) => return Some(block),
            Source::Exhausted => return None,
            Source::Below => {}
        }
        let request = AllocRequest {
            align_order: BLOCK_ORDER,
            ..AllocRequest::new(BLOCK_PAGES, limit.min(Pfn::new(LAST_32BIT_PAGE)))
        };
        match self.below.alloc(&mut cpu.below, &request) {
            Ok(found) => u16::try_from(found.range.lo().get() >> BLOCK_ORDER).ok(),
            Err(_) => {
                self.free.with(|free| free.taken -= 1);
                None
            }
        }
    }

    /// Opens the next block for `request`, and returns its range in it. `None` if the allocator
    /// below serves the request.
    #[cold]
    fn open_next(
        &self,
        cpu: &mut ContiguousCpu<A::PerCpu>,
        request: &AllocRequest,
    ) -> Option<PfnRange> {
        if request.pages > OPENS_BLOCK || request.align_order > BLOCK_ORDER {
            return None;
        }
        let index = index_of(request.permissions);
        let block = self.free_block(cpu, request.limit)?;
        self.held
            .get(usize::from(block))?
            .store(BLOCK_PAGES as u8, Ordering::Relaxed);
        let next = OpenBlock {
            block,
            next: request.pages,
        };
        if let Some(old) = cpu.open.get_mut(index)?.replace(next) {
            self.close(cpu, old);
        }
        PfnRange::new(Pfn::new(first_page(block)), request.pages)
    }

    /// Allocates from the open block.
    #[inline]
    fn alloc_open(
        &self,
        cpu: &mut ContiguousCpu<A::PerCpu>,
        request: &AllocRequest,
    ) -> Option<PfnRange> {
        let slot = cpu.open.get_mut(index_of(request.permissions))?;
        let open = slot.as_mut()?;
        let first = open.index_for(request)?;
        if !is_within(open.block, request.limit) {
            return None;
        }
        let (block, skipped) = (open.block, first - open.next);
        open.next = first + request.pages;
        if open.next == BLOCK_PAGES {
            *slot = None;
        }
        if skipped > 0 {
            self.give_back(block, skipped);
        }
        PfnRange::new(Pfn::new(first_page(block) + first), request.pages)
    }
}

impl<A: IovaAllocator<FreeProof = Flushed>, L: Lock<FreeBlocks>> IovaAllocator
    for Contiguous<A, L>
{
    type PerCpu = ContiguousCpu<A::PerCpu>;
    type FreeProof = Flushed;

    const HAS_LOOKUP: bool = false;

    fn per_cpu(&self) -> Self::PerCpu {
        ContiguousCpu {
            below: self.below.per_cpu(),
            open: [None; 3],
            free: [0; LOCAL_BLOCKS],
            len: 0,
        }
    }

    #[inline]
    fn alloc(
        &self,
        cpu: &mut Self::PerCpu,
        request: &AllocRequest,
    ) -> Result<Allocation, AllocError> {
        request.validate()?;
        let local = match self.alloc_open(cpu, request) {
            Some(range) => Some(range),
            None => self.open_next(cpu, request),
        };
        let Some(range) = local else {
            return self.below.alloc(&mut cpu.below, request);
        };
        if DebugCheck::CHECKED {
            self.free.with(|free| free.debug_check.insert(range));
        }
        Ok(Allocation { range, steps: 0 })
    }

    /// Returns `None`: the allocator keeps no index of allocated ranges.
    #[inline]
    fn find(&self, _: &mut Self::PerCpu, _: Pfn) -> Option<PfnRange> {
        None
    }

    #[inline]
    fn free(&self, cpu: &mut Self::PerCpu, flushed: Flushed) -> bool {
        let range = flushed.range();
        let Some(block) = self.block_of(range) else {
            return self.below.free(&mut cpu.below, flushed);
        };
        if DebugCheck::CHECKED && !self.free.with(|free| free.debug_check.remove(range)) {
            return false;
        }
        match self.give_back(block, range.pages()) {
            Some(true) => self.keep_free(cpu, block),
            Some(false) => {}
            None => return false,
        }
        true
    }

    fn drain(&self, cpu: &mut Self::PerCpu) {
        for index in 0..cpu.open.len() {
            if let Some(open) = cpu.open.get_mut(index).and_then(Option::take) {
                self.close(cpu, open);
            }
        }
        let local = cpu.free.get(..cpu.len).unwrap_or_default();
        self.free.with(|free| free.blocks.extend_from_slice(local));
        cpu.len = 0;
        self.below.drain(&mut cpu.below);
    }

    fn footprint(&self) -> usize {
        let blocks = self.free.with(|free| free.blocks.capacity());
        self.below.footprint() + self.held.len() + blocks * size_of::<u16>()
    }
}
