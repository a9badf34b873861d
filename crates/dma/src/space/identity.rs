//! Spaces in which a device uses physical addresses. They have no allocator, and no table or a
//! static one.

use ringfence_types::{
    DomainId, Flushed, Iova, IovaRange, PageSize, Permissions, Pfn, PhysRange, WholeDomain,
};

use super::{
    AddressLimits, AddressSpace, CachingSpace, CopyingSpace, MapResult, NothingMapped, RingSpace,
    SgSpace, UnmapRefusal,
};
use crate::{MapReason, Platform};

/// A space whose I/O virtual addresses are physical addresses: no IOMMU (`none`), pass-through in
/// hardware (HWpt), or a table that maps all memory to itself (SWpt; see [`StaticTable`]). Map
/// installs no entry and unmap invalidates none (OS14).
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    domain: DomainId,
    last: Pfn,
}

impl Identity {
    /// Creates the identity space of `domain`.
    pub const fn new(domain: DomainId) -> Self {
        Self::up_to(domain, Pfn::new(u64::MAX))
    }

    /// Creates the identity space of `domain` for hardware that translates pages up to `last`. Maps
    /// beyond it are refused, as beyond a DMA mask.
    pub const fn up_to(domain: DomainId, last: Pfn) -> Self {
        Self { domain, last }
    }
}

impl AddressSpace for Identity {
    type PerCpu = ();
    type FreeProof = Flushed;
    type UnmapResult = NothingMapped;

    fn per_cpu(&self) -> Self::PerCpu {}

    #[inline]
    fn domain(&self) -> DomainId {
        self.domain
    }

    #[inline]
    fn map<P: Platform>(
        &self,
        _cpu: &mut (),
        _platform: &mut P,
        pieces: &[PhysRange],
        _permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else {
            return Err(MapReason::Empty);
        };
        let contiguous = pieces.windows(2).all(|pair| match pair {
            // The trait promises consecutive pages: the next piece must begin at a page boundary.
            [a, b] => {
                a.last().checked_add(1) == Some(b.start())
                    && b.start().is_aligned(PageSize::Size4K.bytes())
            }
            _ => true,
        });
        if !contiguous {
            return Err(MapReason::NotContiguous);
        }
        let range =
            IovaRange::inclusive(Iova::new(first.start().get()), Iova::new(last.last().get()))
                .ok_or(MapReason::TooLarge)?;
        if Pfn::containing(range.last()) > limits.mask.min(self.last) {
            return Err(MapReason::BeyondMask);
        }
        Ok(MapResult { range, steps: 0 })
    }

    #[inline]
    fn unmap<P: Platform>(
        &self,
        _cpu: &mut (),
        _platform: &mut P,
        _range: IovaRange,
    ) -> Result<NothingMapped, UnmapRefusal> {
        Ok(NothingMapped)
    }

    #[inline]
    fn sync<P: Platform>(&self, _cpu: &mut (), _platform: &mut P) {}

    /// Always true, because a mapping installs no entries.
    fn is_empty<P: Platform>(&self, _platform: &P) -> bool {
        true
    }

    #[inline]
    fn release(&self, _cpu: &mut (), _range: Flushed) {}

    fn flushed(&self, _cpu: &mut (), _proof: Flushed<WholeDomain>) {}

    fn drain(&self, _cpu: &mut ()) {}
}

impl SgSpace for Identity {
    const CONTIGUOUS_SG: bool = false;

    /// Maps each piece at its own physical address.
    #[inline]
    fn map_list<P: Platform>(
        &self,
        _cpu: &mut (),
        _platform: &mut P,
        pieces: &[PhysRange],
        _permissions: Permissions,
        limits: AddressLimits,
    ) -> Result<MapResult, MapReason> {
        let first = pieces.first().ok_or(MapReason::Empty)?;
        let reaches = |piece: &PhysRange| in_place(piece).map(|r| Pfn::containing(r.last()));
        let last = limits.mask.min(self.last);
        if pieces.iter().any(|p| reaches(p) > Some(last)) {
            return Err(MapReason::BeyondMask);
        }
        let range = in_place(first).ok_or(MapReason::TooLarge)?;
        Ok(MapResult { range, steps: 0 })
    }

    fn pieces<'a>(
        &'a self,
        _start: Iova,
        pieces: &'a [PhysRange],
    ) -> impl Iterator<Item = IovaRange> + 'a {
        pieces.iter().filter_map(in_place)
    }
}

impl RingSpace for Identity {}

impl CachingSpace for Identity {}

impl CopyingSpace for Identity {}

/// Returns the range of `piece` in the device's address space.
#[inline]
fn in_place(piece: &PhysRange) -> Option<IovaRange> {
    IovaRange::new(Iova::new(piece.start().get()), piece.bytes())
}

/// Fills a table once with an identity map of `memory` (SWpt, HW11; whole-guest maps, OS14).
pub struct StaticTable;

impl StaticTable {
    /// Maps every page that a range of `memory` touches to itself, readable and writable, with the
    /// largest leaves that the table supports.
    ///
    /// # Errors
    /// Returns the table's error. Earlier ranges stay mapped; the caller discards them with the
    /// table.
    pub fn fill<F: ringfence_pgtable::Format, P: Platform>(
        table: &ringfence_pgtable::Table<F>,
        platform: &P,
        memory: &[PhysRange],
    ) -> Result<(), ringfence_pgtable::MapError> {
        for range in memory {
            let pages = range.to_pages(PageSize::Size4K);
            let request = ringfence_pgtable::MapRequest {
                iova: Iova::new(pages.start().get()),
                pa: pages.start(),
                pages: pages.pages(PageSize::Size4K),
                permissions: Permissions::READ_WRITE,
            };
            table.map(platform.memory(), platform.frames(), request)?;
        }
        Ok(())
    }
}
