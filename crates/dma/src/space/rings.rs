//! The rings of one device: the space of the ring modes. The tail is the allocator, and the flat
//! table is the translation.

use alloc::vec::Vec;

use ringfence_iova::FreeProof;
use ringfence_pgtable::Coherency;
use ringfence_types::{
    CachedLevels, DomainId, Flushed, Invalidation, Iova, IovaRange, Lock, Permissions, Pfn,
    PfnRange, PhysMemory, PhysRange, RequesterId, RingId, RingIova, RingSlot, Unmapped,
    WholeDomain,
};

use super::{
    AddressLimits, AddressSpace, CachingSpace, ClearedRange, CopyingSpace, MapResult,
    ReusesUnflushed, RingSpace, SgSpace, UnmapRefusal,
};
use crate::ring::{DirtyRingLines, Ring, RingRefusal};
use crate::{MapReason, Platform};

/// A driver of one ring. [`Ring`] is the one for devices. The trait is a seam: studies of the
/// rIOMMU paper drive the same rings as its figure does.
pub trait RingDriver {
    /// The proof that [`release`](Self::release) requires before a slot is reused.
    type FreeProof: FreeProof;

    /// Returns the coherency of the ring's page-table walkers.
    fn coherency(&self) -> Coherency;

    /// Maps each piece at its own slot. Returns the first piece's address, which represents the
    /// whole list. `lines` collects the lines to write back; the calling CPU keeps it for this
    /// ring.
    ///
    /// # Errors
    /// Nothing is mapped.
    fn map_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut DirtyRingLines,
        pieces: &[PhysRange],
        permissions: Permissions,
    ) -> Result<RingIova, MapReason>;

    /// Clears the entries of the mapping at `iova`, whose first piece is `bytes` long.
    ///
    /// # Errors
    /// Nothing changed.
    fn unmap_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut DirtyRingLines,
        iova: RingIova,
        bytes: u64,
    ) -> Result<(), UnmapRefusal>;

    /// Returns the number of mapped slots.
    fn live(&self) -> u32;

    /// Frees the slots of the mappings that were unmapped at each slot from `first` to `last`.
    fn release(&mut self, first: RingSlot, last: RingSlot);

    /// Returns the addresses of the pieces of the list at `iova`, in order, beginning with the
    /// first.
    fn list(&self, iova: RingIova) -> impl Iterator<Item = RingIova> + '_;
}

impl RingDriver for Ring {
    type FreeProof = Flushed;

    #[inline]
    fn coherency(&self) -> Coherency {
        self.coherency()
    }

    #[inline]
    fn map_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut DirtyRingLines,
        pieces: &[PhysRange],
        permissions: Permissions,
    ) -> Result<RingIova, MapReason> {
        match pieces {
            [buffer] => self.map(mem, lines, buffer, permissions),
            _ => self.map_list(mem, lines, pieces, permissions),
        }
    }

    // Inlined like `Ring::unmap`: a call would cost more than the function body.
    #[inline(always)]
    fn unmap_list<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        lines: &mut DirtyRingLines,
        iova: RingIova,
        bytes: u64,
    ) -> Result<(), UnmapRefusal> {
        self.unmap(mem, lines, iova, bytes)
    }

    #[inline]
    fn live(&self) -> u32 {
        self.live()
    }

    #[inline]
    fn release(&mut self, first: RingSlot, last: RingSlot) {
        self.release(first, last);
    }

    fn list(&self, iova: RingIova) -> impl Iterator<Item = RingIova> + '_ {
        self.list(iova)
    }
}

/// The rings of one device, each behind a lock of the embedder. An attachment selects the ring of a
/// mapping: [`Dma::on_ring`](crate::Dma::on_ring).
#[derive(Debug)]
pub struct Rings<R, L> {
    domain: DomainId,
    device: RequesterId,
    rings: Vec<SharedRing<L>>,
    coherency: Coherency,
    driver: core::marker::PhantomData<fn() -> R>,
}

/// A ring behind its lock, with constants that are read without the lock.
#[derive(Debug)]
struct SharedRing<L> {
    ring: L,
    /// The last page that an address of the ring can select.
    last: Pfn,
}

/// One CPU's state of [`Rings`]: the rings that it changed since its last sync, with their lines to
/// write back. Always empty if the walkers snoop.
#[derive(Debug, Default)]
pub struct RingsCpu {
    changed: Vec<(RingId, DirtyRingLines)>,
    /// The placeholder for rings whose walkers snoop.
    none: DirtyRingLines,
}

impl<R: RingDriver, L: Lock<R>> Rings<R, L> {
    /// Creates the space from the rings of `device` that [`lay_out`](crate::ring::lay_out) returns.
    /// `lock` wraps each ring.
    pub fn new(
        domain: DomainId,
        device: RequesterId,
        rings: Vec<Ring>,
        mut lock: impl FnMut(R) -> L,
    ) -> Self
    where
        R: From<Ring>,
    {
        let all_snoop = |ring: &Ring| ring.coherency() == Coherency::Coherent;
        let coherency = if rings.iter().all(all_snoop) {
            Coherency::Coherent
        } else {
            Coherency::NonCoherent
        };
        let shared = |ring: Ring| SharedRing {
            last: last_page(ring.id(), ring.slots()),
            ring: lock(ring.into()),
        };
        let rings = rings.into_iter().map(shared).collect();
        Self {
            domain,
            device,
            rings,
            coherency,
            driver: core::marker::PhantomData,
        }
    }

    /// Returns the lock of a ring, for statistics. `None` if the device has no such ring.
    #[inline]
    pub fn ring(&self, ring: RingId) -> Option<&L> {
        Some(&self.rings.get(usize::from(ring.get()))?.ring)
    }

    /// Returns the lines of `ring` that this CPU's next [`sync`](AddressSpace::sync) writes back.
    #[inline]
    fn lines<'c>(&self, cpu: &'c mut RingsCpu, ring: RingId) -> &'c mut DirtyRingLines {
        if self.coherency == Coherency::Coherent {
            return &mut cpu.none;
        }
        let known = cpu.changed.iter().position(|(id, _)| *id == ring);
        let index = known.unwrap_or_else(|| {
            cpu.changed.push((ring, DirtyRingLines::none()));
            cpu.changed.len() - 1
        });
        match cpu.changed.get_mut(index) {
            Some((_, lines)) => lines,
            None => &mut cpu.none,
        }
    }
}

/// A driver that takes a slot back unflushed reuses it before the invalidation.
impl<R: RingDriver<FreeProof = Unmapped>, L: Lock<R>> ReusesUnflushed for Rings<R, L> {}

/// Returns the last page that an address of the ring can select.
fn last_page(ring: RingId, slots: u32) -> Pfn {
    let last = RingSlot::new(slots.wrapping_sub(1)).unwrap_or(RingSlot::MAX);
    RingIova::start(ring, last).slot_pages().hi()
}

impl<R: RingDriver, L: Lock<R>> AddressSpace for Rings<R, L> {
    type PerCpu = RingsCpu;
    type FreeProof = R::FreeProof;
    type UnmapResult = ClearedRange;

    fn per_cpu(&self) -> RingsCpu {
        RingsCpu::default()
    }

    #[inline]
    fn domain(&self) -> DomainId {
        self.domain
    }

    /// Maps a single piece. One slot holds one piece, and slots are 2^30 bytes apart, so several
    /// pieces cannot be contiguous.
    #[inline]
    fn map<P: Platform>(
        &self,
        cpu: &mut RingsCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        if pieces.len() > 1 {
            return Err(MapReason::NotContiguous);
        }
        self.map_list(cpu, platform, pieces, permissions, limits)
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        cpu: &mut RingsCpu,
        platform: &mut P,
        range: IovaRange,
    ) -> Result<ClearedRange, UnmapRefusal> {
        let iova = RingIova::from(range.start());
        let ring = self.ring(iova.ring()).ok_or(UnmapRefusal::NotAllocated)?;
        let lines = self.lines(cpu, iova.ring());
        ring.with(|ring| ring.unmap_list(platform.memory(), lines, iova, range.bytes()))?;
        // The first slot's pages represent the whole list, because only an invalidation of the ring
        // covers them.
        Ok(ClearedRange {
            unmapped: Unmapped::attest_cleared(self.domain, iova.slot_pages()),
            levels: CachedLevels::Leaves,
            tables: (),
        })
    }

    #[inline]
    fn sync<P: Platform>(&self, cpu: &mut RingsCpu, platform: &mut P) {
        let mut waits = false;
        for (_, mut lines) in cpu.changed.drain(..) {
            waits |= lines.write_back(platform.memory());
        }
        if waits {
            platform.memory().drain();
        }
    }

    fn is_empty<P: Platform>(&self, _platform: &P) -> bool {
        self.rings
            .iter()
            .all(|shared| shared.ring.with(|ring| ring.live()) == 0)
    }

    #[inline]
    fn release(&self, _cpu: &mut RingsCpu, range: R::FreeProof) {
        // A run stays in one ring. No ring has a slot at the last index that an address can encode,
        // so no run continues in the next ring.
        let first = RingIova::from(range.range().lo().iova());
        let last = RingIova::from(range.range().hi().iova());
        if let Some(ring) = self.ring(first.ring()) {
            ring.with(|ring| ring.release(first.slot(), last.slot()));
        }
    }

    /// Does nothing: a ring never requests a flush of the domain.
    fn flushed(&self, _cpu: &mut RingsCpu, _proof: Flushed<WholeDomain>) {}

    fn drain(&self, _cpu: &mut RingsCpu) {}

    /// Returns an invalidation of the ring, the narrowest one: the unit caches one entry per ring.
    #[inline]
    fn invalidation(&self, range: PfnRange, _levels: CachedLevels) -> Invalidation {
        let ring = RingIova::from(range.lo().iova()).ring();
        if ring.pages().contains(&range) {
            Invalidation::Ring {
                domain: self.domain,
                device: self.device,
                ring,
            }
        } else {
            Invalidation::Domain(self.domain)
        }
    }

    fn serves(&self, device: RequesterId) -> bool {
        device == self.device
    }
}

impl<R: RingDriver, L: Lock<R>> SgSpace for Rings<R, L> {
    const CONTIGUOUS_SG: bool = false;

    #[inline]
    fn map_list<P: Platform>(
        &self,
        cpu: &mut RingsCpu,
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        let first = pieces.first().ok_or(MapReason::Empty)?;
        let id = limits.ring;
        let shared = self
            .rings
            .get(usize::from(id.get()))
            .ok_or(MapReason::Ring(RingRefusal::NoSuchRing(id)))?;
        if shared.last > limits.mask {
            return Err(MapReason::Ring(RingRefusal::BeyondMask(id)));
        }
        let lines = self.lines(cpu, id);
        let start = shared
            .ring
            .with(|ring| ring.map_list(platform.memory(), lines, pieces, permissions))?;
        // A slot has more addresses than its buffer has bytes.
        let extra = first.last().get().wrapping_sub(first.start().get());
        let last = start.iova().wrapping_add(extra);
        let range = IovaRange::inclusive(start.iova(), last).ok_or(MapReason::TooLarge)?;
        Ok(MapResult { range, steps: 0 })
    }

    fn pieces<'a>(
        &'a self,
        start: Iova,
        pieces: &'a [PhysRange],
    ) -> impl Iterator<Item = IovaRange> + 'a {
        let head = RingIova::from(start);
        // A single piece lies at the start of the range; only longer lists need the ring.
        let rest = match self.ring(head.ring()) {
            Some(ring) if pieces.len() > 1 => {
                ring.with(|ring| ring.list(head).skip(1).take(pieces.len()).collect())
            }
            _ => Vec::new(),
        };
        core::iter::once(head)
            .chain(rest)
            .zip(pieces)
            .filter_map(|(slot, piece)| IovaRange::new(slot.iova(), piece.bytes()))
    }
}

impl<R: RingDriver, L: Lock<R>> RingSpace for Rings<R, L> {
    const CAN_BE_FULL: bool = true;

    const COALESCES_FREE: bool = true;

    fn rings(&self) -> u32 {
        u32::try_from(self.rings.len()).unwrap_or(u32::MAX)
    }

    #[inline]
    fn ring_of(&self, range: &IovaRange) -> RingId {
        RingIova::from(range.start()).ring()
    }
}

impl<R: RingDriver, L: Lock<R>> CachingSpace for Rings<R, L> {}

impl<R: RingDriver, L: Lock<R>> CopyingSpace for Rings<R, L> {}
