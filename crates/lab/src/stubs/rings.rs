//! Stubs for rings, whose slots and entries are one object: rings without slot management, and also
//! without entries.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::rc::Rc;

use ringfence_dma::ring::{FullReason, Ring, RingFull};
use ringfence_dma::space::{
    AddressLimits, AddressSpace, CachingSpace, ClearedRange, CopyingSpace, MapResult,
    ReusesUnflushed, RingDriver, RingSpace, Rings, SgSpace, UnmapRefusal,
};
use ringfence_dma::{FlushPolicy, MapReason, Platform};
use ringfence_memory::Arena;
use ringfence_papers::RingAsPublished;
use ringfence_pgtable::{Coherency, RingDevice, RingPte, RingTable, ring_words};
use ringfence_types::{
    CachedLevels, Direction, DomainId, Flushed, Invalidation, Iova, IovaRange, Permissions,
    PfnRange, PhysAddr, PhysMemory, PhysRange, RequesterId, RingId, RingIova, RingSlot, Unmapped,
    WholeDomain,
};

use crate::alloc_trace::AllocTrace;
use crate::error::LabError;
use crate::layer::{AttachInfo, ring_of};

/// A flush policy that works with a ring, real or stubbed.
pub trait FlushForRings<D: ReplayRing>:
    FlushPolicy<Rings<D, RefCell<D>>, u64>
    + FlushPolicy<ReplayedRings<D, true>, u64>
    + FlushPolicy<ReplayedRings<D, false>, u64>
{
}

impl<D: ReplayRing, F> FlushForRings<D> for F where
    F: FlushPolicy<Rings<D, RefCell<D>>, u64>
        + FlushPolicy<ReplayedRings<D, true>, u64>
        + FlushPolicy<ReplayedRings<D, false>, u64>
{
}

/// A ring driver that a replay can use.
pub trait ReplayRing: RingDriver + From<Ring> + 'static {
    /// True if the driver writes back each entry separately, as in Fig. 11; false if it writes back
    /// each line once.
    const WRITES_ENTRIES_BACK: bool;
}

impl ReplayRing for Ring {
    const WRITES_ENTRIES_BACK: bool = false;
}

impl ReplayRing for RingAsPublished {
    const WRITES_ENTRIES_BACK: bool = true;
}

/// The rings of a device whose slots come from an [`AllocTrace`]. With `ENTRIES`, the replay fills,
/// clears and writes back entries; without, it only computes addresses.
pub struct ReplayedRings<D, const ENTRIES: bool> {
    domain: DomainId,
    device: RequesterId,
    coherency: Coherency,
    rings: Vec<RefCell<ReplayedRing>>,
    trace: Rc<AllocTrace>,
    driver: PhantomData<fn() -> D>,
}

impl<const ENTRIES: bool> ReusesUnflushed for ReplayedRings<RingAsPublished, ENTRIES> {}

/// One ring of [`ReplayedRings`].
struct ReplayedRing {
    table: RingTable,
    /// The next slot of the same list by slot; the slot itself at the end of a list.
    next: Vec<u32>,
    /// Numbers of the lines that the last map and the last unmap changed.
    changed: [Option<u64>; 2],
}

/// The operation that changed a line.
#[derive(Clone, Copy)]
enum ChangedLine {
    Fill = 0,
    Clear = 1,
}

const LINE: u64 = 64;

impl ReplayedRing {
    #[inline]
    fn mark_changed<M: PhysMemory + ?Sized>(
        &mut self,
        mem: &M,
        slot: RingSlot,
        change: ChangedLine,
        alone: bool,
    ) {
        let Some(at) = self.table.entry(slot) else {
            return;
        };
        if alone {
            mem.write_back(at, ringfence_pgtable::RING_ENTRY_BYTES);
            mem.drain();
            return;
        }
        let line = at.get() / LINE;
        let changed = &mut self.changed[change as usize];
        if *changed != Some(line)
            && let Some(old) = changed.replace(line)
        {
            mem.write_back(PhysAddr::new(old * LINE), LINE);
        }
    }

    fn sync<M: PhysMemory + ?Sized>(&mut self, mem: &M) {
        let mut any = false;
        for line in &mut self.changed {
            if let Some(line) = line.take() {
                mem.write_back(PhysAddr::new(line * LINE), LINE);
                any = true;
            }
        }
        if any {
            mem.drain();
        }
    }
}

impl<D, const ENTRIES: bool> ReplayedRings<D, ENTRIES> {
    /// Replays `tape` in the rings of a device whose rDEVICE is at `rings`.
    ///
    /// # Errors
    /// The rDEVICE cannot be read.
    pub fn new(
        of: &AttachInfo,
        coherency: Coherency,
        rings: PhysAddr,
        memory: &Arena,
        tape: Rc<AllocTrace>,
    ) -> Result<Self, LabError> {
        let missing = |_| LabError::Internal("the stub cannot read a ring");
        let device = RingDevice::read(memory, rings).map_err(missing)?;
        let table = |direction| {
            let table = RingTable::read(memory, &device, ring_of(direction)).map_err(missing)?;
            Ok(RefCell::new(ReplayedRing {
                next: (0..table.slots()).collect(),
                table,
                changed: [None; 2],
            }))
        };
        Ok(Self {
            domain: of.domain,
            device: of.device,
            coherency,
            rings: Direction::ALL
                .into_iter()
                .map(table)
                .collect::<Result<_, LabError>>()?,
            trace: tape,
            driver: PhantomData,
        })
    }

    #[inline]
    fn ring(&self, ring: RingId) -> Option<&RefCell<ReplayedRing>> {
        self.rings.get(usize::from(ring.get()))
    }
}

impl<D: ReplayRing, const ENTRIES: bool> AddressSpace for ReplayedRings<D, ENTRIES> {
    type PerCpu = ();
    type FreeProof = D::FreeProof;
    type UnmapResult = ClearedRange;

    fn per_cpu(&self) {}

    #[inline]
    fn domain(&self) -> DomainId {
        self.domain
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        cpu: &mut (),
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        self.map_list(cpu, platform, pieces, permissions, limits)
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        (): &mut (),
        platform: &mut P,
        range: IovaRange,
    ) -> Result<ClearedRange, UnmapRefusal> {
        let iova = RingIova::from(range.start());
        let ring = self.ring(iova.ring()).ok_or(UnmapRefusal::NotAllocated)?;
        let mut ring = ring.borrow_mut();
        let mut slot = iova.slot();
        loop {
            if ENTRIES {
                let at = ring.table.entry(slot).ok_or(UnmapRefusal::NotAllocated)?;
                let words = ring_words(platform.memory(), at);
                RingPte::clear(words.map_err(|_| UnmapRefusal::NotAllocated)?);
                if self.coherency == Coherency::NonCoherent {
                    write_back::<D, P>(&mut ring, platform, slot, ChangedLine::Clear);
                }
            }
            let Some(link) = ring.next.get_mut(slot.get() as usize) else {
                break;
            };
            let next = core::mem::replace(link, slot.get());
            match RingSlot::new(next) {
                Some(next) if next != slot => slot = next,
                _ => break,
            }
        }
        Ok(ClearedRange {
            unmapped: Unmapped::attest_cleared(self.domain, iova.slot_pages()),
            levels: CachedLevels::Leaves,
            tables: (),
        })
    }

    #[inline]
    fn sync<P: Platform>(&self, (): &mut (), platform: &mut P) {
        if ENTRIES && self.coherency == Coherency::NonCoherent {
            for ring in &self.rings {
                ring.borrow_mut().sync(platform.memory());
            }
        }
    }

    fn is_empty<P: Platform>(&self, _platform: &P) -> bool {
        true
    }

    #[inline]
    fn release(&self, (): &mut (), _range: D::FreeProof) {}

    fn flushed(&self, (): &mut (), _proof: Flushed<WholeDomain>) {}

    fn drain(&self, (): &mut ()) {}

    #[inline]
    fn invalidation(&self, range: PfnRange, _levels: CachedLevels) -> Invalidation {
        Invalidation::Ring {
            domain: self.domain,
            device: self.device,
            ring: RingIova::from(range.lo().iova()).ring(),
        }
    }

    fn serves(&self, device: RequesterId) -> bool {
        device == self.device
    }
}

impl<D: ReplayRing, const ENTRIES: bool> SgSpace for ReplayedRings<D, ENTRIES> {
    const CONTIGUOUS_SG: bool = false;

    #[inline]
    fn map_list<P: Platform>(
        &self,
        (): &mut (),
        platform: &mut P,
        pieces: &[PhysRange],
        permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        let full = MapReason::RingFull(RingFull {
            ring: limits.ring,
            slot: RingSlot::FIRST,
            reason: FullReason::Unmap,
        });
        let first = pieces.first().ok_or(MapReason::Empty)?;
        let head = self.trace.next().ok_or(full)?;
        let head = RingIova::from(head.lo().iova());
        let range = IovaRange::new(head.iova(), first.bytes()).ok_or(MapReason::TooLarge)?;
        let mut ring = self.ring(head.ring()).ok_or(full)?.borrow_mut();
        let mut slot = head.slot();
        for (number, piece) in pieces.iter().enumerate() {
            if number > 0 {
                let next = RingIova::from(self.trace.next().ok_or(full)?.lo().iova()).slot();
                if let Some(link) = ring.next.get_mut(slot.get() as usize) {
                    *link = next.get();
                }
                slot = next;
            }
            if ENTRIES {
                let entry = RingPte::new(piece, permissions).map_err(|_| full)?;
                let at = ring.table.entry(slot).ok_or(full)?;
                entry.store(ring_words(platform.memory(), at).map_err(|_| full)?);
                if self.coherency == Coherency::NonCoherent {
                    write_back::<D, P>(&mut ring, platform, slot, ChangedLine::Fill);
                }
            }
        }
        Ok(MapResult { range, steps: 0 })
    }

    fn pieces<'a>(
        &'a self,
        start: Iova,
        pieces: &'a [PhysRange],
    ) -> impl Iterator<Item = IovaRange> + 'a {
        let head = RingIova::from(start);
        let mut slot = Some(head.slot());
        pieces.iter().filter_map(move |piece| {
            let here = slot?;
            if pieces.len() > 1 {
                let ring = self.ring(head.ring())?.borrow();
                slot = RingSlot::new(*ring.next.get(here.get() as usize)?);
            }
            IovaRange::new(RingIova::start(head.ring(), here).iova(), piece.bytes())
        })
    }
}

impl<D: ReplayRing, const ENTRIES: bool> RingSpace for ReplayedRings<D, ENTRIES> {
    const CAN_BE_FULL: bool = true;

    fn rings(&self) -> u32 {
        self.rings.len() as u32
    }

    #[inline]
    fn ring_of(&self, range: &IovaRange) -> RingId {
        RingIova::from(range.start()).ring()
    }
}

impl<D: ReplayRing, const ENTRIES: bool> CachingSpace for ReplayedRings<D, ENTRIES> {}

impl<D: ReplayRing, const ENTRIES: bool> CopyingSpace for ReplayedRings<D, ENTRIES> {}

/// Records or writes back the changed line.
#[inline]
fn write_back<D: ReplayRing, P: Platform>(
    ring: &mut ReplayedRing,
    platform: &P,
    slot: RingSlot,
    change: ChangedLine,
) {
    ring.mark_changed(platform.memory(), slot, change, D::WRITES_ENTRIES_BACK);
}
