//! Hybrid copying: small buffers are copied, and of large ones only the parts of pages that the
//! buffer may share with other data (Markuze, Morrison and Tsafrir, ASPLOS 2016).
//!
//! A large buffer is split. Its whole pages hold nothing but the buffer, so they are mapped
//! themselves. The parts on its first and last page are copied into slots of the pool. One range of
//! addresses maps slots and pages in the order of the buffer. An unmap clears the range and copies
//! the parts that the device wrote to the buffer. The flush policy invalidates the range before the
//! driver gets the buffer back, so the device reaches no byte outside live mappings.
//!
//! With [`SharedPages::Mapped`], the first and last page of a large buffer are mapped like the
//! others, so the buffer is not split. The device reaches the bytes beside the buffer on them,
//! while the buffer is mapped. The space keeps no record of such a mapping, because a record costs
//! more than the map itself (decision 0041). So it checks no more of an unmap than [`Paged`] does.
//!
//! Slots of a split buffer stay in use until the invalidation. Until then, a stale translation
//! leads to them, and another buffer in them could receive late writes.
//!
//! Departures from the paper:
//!
//! - The threshold counts the bytes on whole pages, which the split saves to copy. The paper counts
//!   all bytes of the buffer.
//! - Pieces of a list are split one by one. The paper splits single buffers.
//!
//! | file | one concept |
//! |---|---|
//! | `runs.rs` | the division of a buffer into parts of pages and whole pages |
//! | `splits.rs` | the split mappings, by address |
//! | `mod.rs` | the space: small buffers go to a [`ShadowSpace`] |

mod runs;
mod splits;

pub use splits::SplitTable;

use alloc::vec::Vec;

use ringfence_iova::{FreeProof, IovaAllocator};
use ringfence_types::{
    Access, CachedLevels, DomainId, Flushed, Invalidation, IovaRange, Lock, Permissions, PfnRange,
    PhysRange, WholeDomain,
};

use super::page::{BufferPart, Page, SlotKind};
use super::pool::Slot;
use super::{FromDevice, ShadowCpu, ShadowDepot, ShadowPolicy, ShadowPool, ShadowSpace};
use crate::error::ShadowError;
use crate::space::{
    AddressLimits, AddressSpace, CachingSpace, CopiedOrCleared, CopyPool, CopyingSpace, GRANULE,
    IoPageTable, MapResult, Paged, RingSpace, SgSpace, UnmapRefusal, WhenExhausted,
};
use crate::{MapReason, Platform};
use runs::{Run, bytes_of, has_whole_pages_only, runs, whole_bytes};
use splits::{Part, Parts};

/// The treatment of pages that a large buffer may share with other data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SharedPages {
    /// The bytes of the buffer on such a page are copied. The space is byte-granular.
    Copied,
    /// The page is mapped. The device reaches all of its bytes while the buffer is mapped: the
    /// space is strict at most.
    Mapped,
}

/// The sizes from which buffers are mapped: numbers of bytes on pages that are not copied.
/// `u64::MAX` copies every buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// For buffers that the device only reads.
    pub transmit: u64,
    /// For buffers that the device may write.
    pub receive: u64,
}

impl Thresholds {
    /// Returns the same threshold for all buffers.
    pub const fn both(bytes: u64) -> Self {
        Self {
            transmit: bytes,
            receive: bytes,
        }
    }

    #[inline]
    fn of(self, permissions: Permissions) -> u64 {
        let bytes = if permissions.allows(Access::Write) {
            self.receive
        } else {
            self.transmit
        };
        bytes.max(GRANULE.bytes())
    }
}

/// The choices of a [`HybridSpace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HybridPolicy {
    /// The contents of copies that the device only writes.
    pub from_device: FromDevice,
    /// Least number of bytes of a buffer that is mapped: those on its whole pages, or all if
    /// [shared pages are mapped](SharedPages::Mapped). Below one page, a buffer is always copied.
    pub thresholds: Thresholds,
    /// The treatment of the first and last page of a mapped buffer.
    pub shared_pages: SharedPages,
}

/// A [`ShadowSpace`] that maps the whole pages of large buffers.
///
/// # Bounds
/// Those of the [`ShadowSpace`], and those of the [`SplitTable`], which has only split mappings.
///
/// # Limits
/// - A map that finds no free slot is refused.
/// - The device may change the whole pages of a split buffer until the invalidation, also after a
///   sync and beyond the number of received bytes. A driver that must keep what it has examined
///   copies it, as with every mapping without a copy.
/// - With [`SharedPages::Mapped`], an unmap of a [claimed](crate::Mapping::claim) mapping accepts
///   the ranges that [`Paged`] accepts. Without a lookup in the allocator, that includes a part of
///   the pages of a mapping.
#[derive(Debug)]
pub struct HybridSpace<A, T, L, R> {
    shadow: ShadowSpace<A, T, L>,
    splits: R,
    thresholds: Thresholds,
    shared_pages: SharedPages,
}

impl<A, T, L: Lock<ShadowDepot>, R: Lock<SplitTable>> HybridSpace<A, T, L, R> {
    /// Creates a space with `pool` in front of `paged`. `lock` creates the embedder's lock.
    pub fn new(
        paged: Paged<A, T>,
        pool: ShadowPool<L>,
        policy: HybridPolicy,
        lock: impl FnOnce(SplitTable) -> R,
    ) -> Self {
        let shadow = ShadowPolicy {
            from_device: policy.from_device,
            // The pages of a buffer without a copy hold other data.
            when_exhausted: WhenExhausted::Refuse,
        };
        Self {
            shadow: ShadowSpace::new(paged, pool, shadow),
            splits: lock(SplitTable::default()),
            thresholds: policy.thresholds,
            shared_pages: policy.shared_pages,
        }
    }

    /// Returns true if a buffer is mapped, at least in part.
    #[inline]
    fn is_large(&self, pieces: &[PhysRange], permissions: Permissions) -> bool {
        let bytes = match self.shared_pages {
            SharedPages::Copied => whole_bytes(pieces),
            SharedPages::Mapped => bytes_of(pieces),
        };
        bytes >= self.thresholds.of(permissions)
    }

    /// Returns true if large buffers are split, and false if they are mapped as a whole.
    #[inline]
    fn splits_buffers(&self) -> bool {
        self.shared_pages == SharedPages::Copied
    }

    /// Returns the space of small buffers, with allocator, table and pool.
    pub fn shadow_space(&self) -> &ShadowSpace<A, T, L> {
        &self.shadow
    }

    /// Returns the number of live split mappings. The [`shadow_space`](Self::shadow_space) counts
    /// the pages of buffers that are mapped as a whole, and of coherent memory.
    pub fn split_mappings(&self) -> usize {
        self.splits.with(|splits| splits.live())
    }

    fn pool(&self) -> &ShadowPool<L> {
        &self.shadow.pool
    }

    /// Returns the page with the record of a part, and its piece.
    fn record(&self, part: &Part) -> Option<(&Page, BufferPart)> {
        let page = self.pool().page(part.slot)?;
        Some((page, page.piece()?))
    }

    /// Returns the parts of the live mapping at `range`; none if it is not split.
    fn parts(&self, range: IovaRange) -> Parts {
        let parts = self.splits.with(|splits| splits.parts(range));
        parts.unwrap_or_default()
    }
}

impl<A, T, L, R> HybridSpace<A, T, L, R>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
    R: Lock<SplitTable>,
{
    /// Maps the pages of `pieces`, and copies of those bytes that the policy does not map.
    fn map_split<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        let mut parts = Parts::default();
        let mapped = if has_whole_pages_only(pieces) {
            let paged = &self.shadow.paged;
            paged.map(&mut cpu.paged, platform, pieces, permissions, limits)
        } else {
            let memory = self.copy_parts(cpu, platform, pieces, permissions, limits, &mut parts);
            memory.and_then(|memory| {
                let paged = &self.shadow.paged;
                paged.map(&mut cpu.paged, platform, &memory, permissions, limits)
            })
        };
        match mapped {
            Ok(mapped) => {
                self.splits
                    .with(|splits| splits.insert(mapped.range, parts));
            }
            Err(reason) => self.undo_parts(cpu, platform, &parts, reason),
        }
        mapped
    }

    /// Copies the parts of pages of `pieces` into slots, and adds them to `parts`. Returns the
    /// memory that the device reaches, in the order of the pieces.
    fn copy_parts<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
        parts: &mut Parts,
    ) -> Result<Vec<PhysRange>, MapReason> {
        let kind = SlotKind {
            order: 0,
            permissions,
        };
        let copies = self.shadow.policy.fills(permissions);
        let mut memory = Vec::with_capacity(pieces.len().saturating_add(2));
        let (mut page, mut before) = (0_u64, 0_u64);
        for run in pieces.iter().flat_map(runs) {
            let original = match run {
                Run::Pages(pages) => {
                    memory.push(pages);
                    pages
                }
                Run::Part(original) => {
                    let slot = self.shadow.take(cpu, platform, kind, limits)?;
                    let (slot, kind) = slot.ok_or(MapReason::Shadow(ShadowError::Exhausted {
                        pages: 1,
                        pool: u64::from(self.pool().total()),
                    }))?;
                    let filled =
                        self.pool()
                            .fill_part(platform.memory(), slot, kind, original, copies);
                    parts.push(Part {
                        slot,
                        kind,
                        page,
                        before,
                    });
                    let copy =
                        filled.map_err(|error| MapReason::Shadow(ShadowError::Memory(error)))?;
                    memory.extend(copy);
                    original
                }
            };
            page = page.saturating_add(original.pages(GRANULE));
            before = before.saturating_add(original.bytes());
        }
        Ok(memory)
    }

    /// Removes the copies of a map that failed.
    #[cold]
    fn undo_parts<P: Platform>(
        &self,
        cpu: &mut ShadowCpu<A::PerCpu, T::PerCpu>,
        platform: &mut P,
        parts: &Parts,
        reason: MapReason,
    ) {
        // The device may reach the slots at addresses that are never invalidated.
        let is_reachable = matches!(reason, MapReason::RollbackFailed(_));
        for part in parts.iter() {
            let copies = self.shadow.policy.fills(part.kind.permissions);
            self.pool()
                .empty(platform.memory(), part.slot, part.kind, copies);
            if !is_reachable {
                self.shadow.put_back(cpu, part.slot, part.kind);
            }
        }
    }

    /// Calls `each` with the bytes that `part` of a split mapping has in each copy: the index of
    /// the copy's page, the page with the record, the piece and its bytes.
    fn each_overlap(
        &self,
        mapping: IovaRange,
        part: IovaRange,
        mut each: impl FnMut(&Part, &Page, BufferPart, super::page::Extent),
    ) {
        for copied in self.parts(mapping).iter() {
            if let Some((page, piece)) = self.record(copied) {
                let start = copied.iova(mapping.start(), piece.offset());
                each(copied, page, piece, piece.overlap(start, part));
            }
        }
    }
}

impl<A, T, L, R> AddressSpace for HybridSpace<A, T, L, R>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
    R: Lock<SplitTable>,
{
    type PerCpu = ShadowCpu<A::PerCpu, T::PerCpu>;
    type FreeProof = A::FreeProof;
    type UnmapResult = CopiedOrCleared<T::Pages>;

    fn per_cpu(&self) -> Self::PerCpu {
        self.shadow.per_cpu()
    }

    #[inline]
    fn domain(&self) -> DomainId {
        self.shadow.domain()
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        if self.is_large(pieces, permissions) {
            if !self.splits_buffers() {
                let shadow = &self.shadow;
                return shadow.map_direct(cpu, platform, pieces, permissions, limits);
            }
            self.map_split(cpu, platform, pieces, permissions, limits)
        } else {
            self.shadow.map(cpu, platform, pieces, permissions, limits)
        }
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        range: IovaRange,
    ) -> Result<Self::UnmapResult, UnmapRefusal> {
        if self.pool().slot_at(range.start()).is_some() {
            return self.shadow.unmap(cpu, platform, range);
        }
        if !self.splits_buffers() {
            return self.shadow.unmap_direct(cpu, platform, range);
        }
        let Some(parts) = self.splits.with(|splits| splits.begin_unmap(range))? else {
            return self.shadow.unmap(cpu, platform, range);
        };
        let paged = &self.shadow.paged;
        match paged.unmap(&mut cpu.paged, platform, range) {
            Ok(cleared) => {
                for part in parts.iter() {
                    if let Some((page, piece)) = self.record(part) {
                        let (memory, index) = (platform.memory(), part.slot);
                        let slot = Slot { index, page };
                        self.pool().finish(memory, slot, part.kind, piece);
                    }
                }
                Ok(CopiedOrCleared::Cleared(cleared))
            }
            Err(refusal) => {
                self.splits.with(|splits| splits.undo_unmap(range));
                Err(refusal)
            }
        }
    }

    #[inline]
    fn sync<P: Platform>(&self, cpu: &mut Self::PerCpu, platform: &mut P) {
        self.shadow.sync(cpu, platform);
    }

    fn is_empty<P: Platform>(&self, platform: &P) -> bool {
        self.splits.with(|splits| splits.live()) == 0 && self.shadow.is_empty(platform)
    }

    /// Frees a range, and the slots that it mapped.
    #[inline]
    fn release(&self, cpu: &mut Self::PerCpu, range: Self::FreeProof) {
        if self.splits_buffers() {
            let page = range.range().lo();
            let parts = self.splits.with(|splits| splits.remove(page));
            for part in parts.iter().flat_map(Parts::iter) {
                self.shadow.put_back(cpu, part.slot, part.kind);
            }
        }
        self.shadow.release(cpu, range);
    }

    fn flushed(&self, cpu: &mut Self::PerCpu, proof: Flushed<WholeDomain>) {
        self.shadow.flushed(cpu, proof);
    }

    fn drain(&self, cpu: &mut Self::PerCpu) {
        self.shadow.drain(cpu);
    }

    fn reserved(&self, range: PfnRange) -> PfnRange {
        self.shadow.reserved(range)
    }

    #[inline]
    fn invalidation(&self, range: PfnRange, levels: CachedLevels) -> Invalidation {
        self.shadow.invalidation(range, levels)
    }
}

impl<A, T, L, R> SgSpace for HybridSpace<A, T, L, R>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
    R: Lock<SplitTable>,
{
}

impl<A, T, L, R> RingSpace for HybridSpace<A, T, L, R>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
    R: Lock<SplitTable>,
{
}

impl<A, T, L, R> CachingSpace for HybridSpace<A, T, L, R>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
    R: Lock<SplitTable>,
{
    /// Maps memory that the CPU and the device share, which a copy cannot replace.
    fn map_bypass_cache<P: Platform>(
        &self,
        cpu: &mut Self::PerCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        self.shadow
            .map_bypass_cache(cpu, platform, pieces, permissions, limits)
    }
}

impl<A, T, L, R> CopyingSpace for HybridSpace<A, T, L, R>
where
    A: IovaAllocator,
    T: IoPageTable,
    L: Lock<ShadowDepot>,
    R: Lock<SplitTable>,
{
    fn copies(&self) -> Option<CopyPool> {
        self.shadow.copies()
    }

    fn shadow(&self, range: IovaRange) -> Option<PhysRange> {
        self.shadow.shadow(range)
    }

    fn each_copied_part(&self, range: IovaRange, each: &mut dyn FnMut(IovaRange, PhysRange)) {
        for part in self.parts(range).iter() {
            let Some((_, piece)) = self.record(part) else {
                continue;
            };
            let bytes = piece.bytes;
            let copy = self.pool().address(part.slot).wrapping_add(piece.offset());
            let iova = IovaRange::new(part.iova(range.start(), piece.offset()), bytes);
            if let (Some(iova), Some(copy)) = (iova, PhysRange::new(copy, bytes)) {
                each(iova, copy);
            }
        }
    }

    fn set_received(&self, range: IovaRange, bytes: u64) {
        if self.pool().slot_at(range.start()).is_some() {
            return self.shadow.set_received(range, bytes);
        }
        for part in self.parts(range).iter() {
            if let Some((page, _)) = self.record(part) {
                page.set_received(bytes.saturating_sub(part.before));
            }
        }
    }

    fn sync_for_cpu<P: Platform>(&self, platform: &P, mapping: IovaRange, part: IovaRange) {
        if self.pool().slot_at(mapping.start()).is_some() {
            return self.shadow.sync_for_cpu(platform, mapping, part);
        }
        self.each_overlap(mapping, part, |copied, page, piece, wanted| {
            if copied.kind.permissions.allows(Access::Write) {
                let memory = platform.memory();
                self.pool()
                    .give_to_cpu(memory, copied.slot, page, &piece, wanted);
            }
        });
    }

    fn sync_for_device<P: Platform>(&self, platform: &P, mapping: IovaRange, part: IovaRange) {
        if self.pool().slot_at(mapping.start()).is_some() {
            return self.shadow.sync_for_device(platform, mapping, part);
        }
        self.each_overlap(mapping, part, |copied, page, piece, wanted| {
            let copies = self.shadow.policy.fills(copied.kind.permissions);
            let memory = platform.memory();
            self.pool()
                .give_to_device(memory, copied.slot, page, &piece, wanted, copies);
        });
    }
}
