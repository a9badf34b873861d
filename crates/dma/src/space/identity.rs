//! Spaces in which a device uses physical addresses: no allocator, and no table or one that never
//! changes.

use ringfence_types::{
    DomainId, Flushed, Iova, IovaRange, PageSize, Permissions, Pfn, PhysRange, WholeDomain,
};

use super::{AddressLimits, MapResult, NothingMapped, Space, UnmapRefusal};
use crate::{MapReason, Platform};

/// The I/O virtual address is the physical address: no IOMMU (`none`), pass-through in hardware
/// (HWpt), or a table that maps all of memory to itself (SWpt; see [`StaticTable`]). Nothing is
/// installed and nothing dies (OS14).
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    domain: DomainId,
}

impl Identity {
    /// The identity space of `domain`.
    pub const fn new(domain: DomainId) -> Self {
        Self { domain }
    }
}

impl Space for Identity {
    type PerCpu = ();
    type FreeProof = Flushed;
    type UnmapResult = NothingMapped;

    const CONTIGUOUS_SG: bool = false;

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
            // Only where pages meet is "contiguous" also "at consecutive pages", which is what the
            // role promises.
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
        if Pfn::containing(range.last()) > limits.mask {
            return Err(MapReason::BeyondMask);
        }
        Ok(MapResult { range, steps: 0 })
    }

    /// Each piece is where it is.
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
        if pieces.iter().any(|p| reaches(p) > Some(limits.mask)) {
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

    /// Mappings are addresses and nothing else.
    fn is_empty<P: Platform>(&self, _platform: &P) -> bool {
        true
    }

    #[inline]
    fn release(&self, _cpu: &mut (), _range: Flushed) {}

    fn flushed(&self, _cpu: &mut (), _proof: Flushed<WholeDomain>) {}

    fn drain(&self, _cpu: &mut ()) {}
}

/// The bytes of `piece` as the device addresses them.
#[inline]
fn in_place(piece: &PhysRange) -> Option<IovaRange> {
    IovaRange::new(Iova::new(piece.start().get()), piece.bytes())
}

/// Fills a table once with an identity map of `memory` (SWpt, HW11; whole-guest maps, OS14).
pub struct StaticTable;

impl StaticTable {
    /// Maps every whole page of each range of `memory` to itself, readable and writable, with the
    /// largest leaves the table takes.
    ///
    /// # Errors
    /// The table's; ranges mapped before stay mapped, for the caller to discard with the table.
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
