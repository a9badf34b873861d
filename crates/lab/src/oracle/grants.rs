//! Grants: the bytes that a device may access, and the time for which it may.

use ringfence_types::{Access, Direction, Iova, IovaRange, PhysAddr, PhysRange};

use super::Verdict;

/// Identifies a grant. The ID stays unique after the oracle has forgotten the grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GrantId {
    slot: GrantSlot,
    serial: u32,
}

impl GrantId {
    pub(super) fn slot(self) -> GrantSlot {
        self.slot
    }

    /// Returns the ID as one number. The DMA layer carries it as the buffer.
    pub fn to_raw(self) -> u64 {
        u64::from(self.slot.0) << 32 | u64::from(self.serial)
    }

    /// Returns the ID for a number from [`to_raw`](Self::to_raw).
    pub fn from_raw(raw: u64) -> Self {
        Self {
            slot: GrantSlot((raw >> 32) as u32),
            serial: raw as u32,
        }
    }
}

/// Index of a grant in [`Grants`]. A new grant reuses the slot of a forgotten one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct GrantSlot(pub(super) u32);

/// The state of a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GrantState {
    /// From the return of map to the return of unmap.
    Live,
    /// Unmap has returned, but the layer still withholds the buffer.
    Withheld,
    /// The driver has the buffer back.
    Dead,
}

/// One segment of a grant: device-visible bytes and their physical address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct GrantRange {
    iova: IovaRange,
    physical: PhysAddr,
}

/// The segments of a grant; nearly all grants have one.
#[derive(Debug, Clone)]
enum GrantRanges {
    One(GrantRange),
    /// In ascending order of IOVAs, without overlaps.
    Ascending(Box<[GrantRange]>),
    /// In any order. With physical addresses, a list may name the same bytes several times.
    Indexed(Box<[GrantRange]>, Box<[IndexEntry]>),
}

/// An entry of an index of segments in ascending order of their starts.
#[derive(Debug, Clone, Copy)]
struct IndexEntry {
    start: Iova,
    /// The segment with the highest last byte among those of this entry and the entries before.
    longest: u32,
}

impl GrantRanges {
    fn of(count: usize, mut placed: impl Iterator<Item = GrantRange>) -> Self {
        match (count, placed.next()) {
            (1, Some(piece)) => Self::One(piece),
            (_, first) => Self::many(first.into_iter().chain(placed).collect()),
        }
    }

    fn many(pieces: Box<[GrantRange]>) -> Self {
        let ascends = |pair: &[GrantRange]| match pair {
            [one, other] => one.iova.last() < other.iova.start(),
            _ => true,
        };
        if pieces.windows(2).all(ascends) {
            return Self::Ascending(pieces);
        }
        let mut order: Vec<u32> = (0..pieces.len() as u32).collect();
        order.sort_by_key(|piece| pieces[*piece as usize].iova.start());
        let last_of = |piece: u32| pieces[piece as usize].iova.last();
        let mut longest = order.first().copied().unwrap_or_default();
        let index = order.into_iter().map(|piece| {
            if last_of(piece) > last_of(longest) {
                longest = piece;
            }
            let start = pieces[piece as usize].iova.start();
            IndexEntry { start, longest }
        });
        let index = index.collect();
        Self::Indexed(pieces, index)
    }

    fn as_slice(&self) -> &[GrantRange] {
        match self {
            Self::One(piece) => core::slice::from_ref(piece),
            Self::Ascending(pieces) | Self::Indexed(pieces, _) => pieces,
        }
    }

    /// Returns the segment with the highest last byte among those that `begins` accepts by their
    /// starts, in time logarithmic in the segments. `begins` accepts all starts up to an address.
    ///
    /// If any segment that starts early enough also reaches far enough, it is this one.
    #[inline]
    fn longest(&self, begins: impl Fn(Iova) -> bool) -> Option<&GrantRange> {
        match self {
            Self::One(piece) => begins(piece.iova.start()).then_some(piece),
            Self::Ascending(pieces) => {
                let count = pieces.partition_point(|piece| begins(piece.iova.start()));
                pieces.get(count.checked_sub(1)?)
            }
            Self::Indexed(pieces, index) => {
                let count = index.partition_point(|entry| begins(entry.start));
                let entry = index.get(count.checked_sub(1)?)?;
                pieces.get(entry.longest as usize)
            }
        }
    }
}

/// Bytes that a device may access.
#[derive(Debug, Clone)]
pub struct Grant {
    ranges: GrantRanges,
    /// Direction that the device may use.
    pub direction: Direction,
    /// Current state, from which the oracle judges accesses to these bytes.
    pub state: GrantState,
    /// Number of pages that the grant owns, plus one until it is dead.
    pins: u32,
    serial: u32,
}

impl Grant {
    /// Returns the IOVA ranges of the segments.
    pub fn pieces(&self) -> impl ExactSizeIterator<Item = IovaRange> + '_ {
        self.ranges.as_slice().iter().map(|piece| piece.iova)
    }

    /// Returns the memory of the segments.
    pub(super) fn memory(&self) -> impl Iterator<Item = PhysRange> + '_ {
        let pieces = self.ranges.as_slice().iter();
        pieces.filter_map(|piece| PhysRange::new(piece.physical, piece.iova.bytes()))
    }

    /// Returns the physical address of the `bytes` bytes at `iova`; `None` unless they lie in one
    /// segment.
    #[inline]
    pub fn translate(&self, iova: Iova, bytes: u64) -> Option<PhysAddr> {
        let range = IovaRange::new(iova, bytes)?;
        let piece = self.ranges.longest(|start| start <= range.start());
        let piece = piece.filter(|piece| piece.iova.contains(&range))?;
        let offset = iova.offset_from(&piece.iova.start())?;
        Some(piece.physical.wrapping_add(offset))
    }

    /// Returns true if a segment of an identity grant shares a byte with `range`.
    pub(super) fn overlaps(&self, range: &PhysRange) -> bool {
        let piece = self
            .ranges
            .longest(|start| start.get() <= range.last().get());
        piece.is_some_and(|piece| range.start().get() <= piece.iova.last().get())
    }

    /// Judges an access that the hardware let through at an address that this grant owns.
    #[inline]
    pub(super) fn judge(
        &self,
        iova: Iova,
        bytes: u64,
        access: Access,
        reached: PhysAddr,
    ) -> Verdict {
        match (self.translate(iova, bytes), self.state) {
            (_, GrantState::Dead) => Verdict::Stale,
            (Some(granted), _) if granted != reached => Verdict::Stale,
            (Some(_), _) if self.direction.permissions().allows(access) => Verdict::Granted,
            (Some(_), _) => Verdict::Direction,
            (None, _) if self.is_colocated(iova, reached) => Verdict::Colocated,
            (None, _) => Verdict::Stale,
        }
    }

    /// Returns true if the address is on a page of this grant, outside its bytes, and reaches the
    /// memory beside the buffer on that page. Segments on one page have one frame.
    fn is_colocated(&self, iova: Iova, reached: PhysAddr) -> bool {
        let piece = self.ranges.longest(|start| start.align_down(4096) <= iova);
        piece.is_some_and(|piece| {
            iova.get() <= piece.iova.last().get() | 4095
                && reached.get().wrapping_sub(piece.physical.get())
                    == iova.get().wrapping_sub(piece.iova.start().get())
        })
    }
}

/// All grants that are not dead or still own a page.
#[derive(Debug, Default)]
pub(super) struct Grants {
    slots: Vec<Option<Grant>>,
    free: Vec<u32>,
    serial: u32,
}

impl Grants {
    /// Inserts a grant whose segments lie at consecutive pages; the first byte is at
    /// `iova.start()`.
    pub(super) fn insert(
        &mut self,
        iova: IovaRange,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> GrantId {
        let mut page = iova.start().align_down(4096);
        let placed = pieces.iter().filter_map(|piece| {
            let start = page.wrapping_add(piece.start().offset_in(4096));
            page = page.wrapping_add(piece.pages(ringfence_types::PageSize::Size4K) << 12);
            Some(GrantRange {
                iova: IovaRange::new(start, piece.bytes())?,
                physical: piece.start(),
            })
        });
        self.push(GrantRanges::of(pieces.len(), placed), direction)
    }

    /// Inserts a grant of `pieces`, each at the IOVA range of the same index in `iovas`.
    pub(super) fn insert_per_segment(
        &mut self,
        iovas: &[IovaRange],
        pieces: &[PhysRange],
        direction: Direction,
    ) -> GrantId {
        let placed = iovas.iter().zip(pieces).map(|(iova, piece)| GrantRange {
            iova: *iova,
            physical: piece.start(),
        });
        self.push(GrantRanges::of(pieces.len(), placed), direction)
    }

    /// Inserts a grant whose IOVAs equal the physical addresses.
    pub(super) fn insert_identity(
        &mut self,
        pieces: &[PhysRange],
        direction: Direction,
    ) -> GrantId {
        let placed = pieces.iter().filter_map(|piece| {
            Some(GrantRange {
                iova: IovaRange::new(Iova::new(piece.start().get()), piece.bytes())?,
                physical: piece.start(),
            })
        });
        self.push(GrantRanges::of(pieces.len(), placed), direction)
    }

    /// Returns the ID of the next grant.
    pub(super) fn next(&self) -> GrantId {
        let slot = self.free.last().copied();
        GrantId {
            slot: GrantSlot(slot.unwrap_or(self.slots.len() as u32)),
            serial: self.serial.wrapping_add(1),
        }
    }

    fn push(&mut self, pieces: GrantRanges, direction: Direction) -> GrantId {
        self.serial = self.serial.wrapping_add(1);
        let serial = self.serial;
        let grant = Some(Grant {
            ranges: pieces,
            direction,
            state: GrantState::Live,
            pins: 1,
            serial,
        });
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = grant;
                slot
            }
            None => {
                self.slots.push(grant);
                self.slots.len() as u32 - 1
            }
        };
        GrantId {
            slot: GrantSlot(slot),
            serial,
        }
    }

    /// Returns the grant; `None` if it is forgotten.
    #[inline]
    pub(super) fn named(&self, id: GrantId) -> Option<&Grant> {
        self.get(id.slot).filter(|grant| grant.serial == id.serial)
    }

    #[inline]
    pub(super) fn get(&self, id: GrantSlot) -> Option<&Grant> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    pub(super) fn set(&mut self, id: GrantId, state: GrantState) {
        if let Some(Some(grant)) = self.slots.get_mut(id.slot.0 as usize)
            && grant.serial == id.serial
        {
            grant.state = state;
        }
    }

    /// Adds an owned page.
    #[inline]
    pub(super) fn pin(&mut self, id: GrantSlot) {
        if let Some(Some(grant)) = self.slots.get_mut(id.0 as usize) {
            grant.pins += 1;
        }
    }

    /// Removes an owned page, or the reference of a grant that dies. Forgets the grant at the last
    /// reference.
    #[inline]
    pub(super) fn unpin(&mut self, id: GrantSlot) {
        if let Some(slot) = self.slots.get_mut(id.0 as usize)
            && let Some(grant) = slot
        {
            grant.pins -= 1;
            if grant.pins == 0 {
                *slot = None;
                self.free.push(id.0);
            }
        }
    }

    /// Returns the number of remembered grants.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.slots.iter().flatten().count()
    }
}
