//! Tests of refused maps.

use ringfence_dma::space::IoPageTable;
use ringfence_pgtable::Coherency;
use ringfence_types::{Invalidation, Invalidator, Iova, Permissions};

use super::*;
use crate::hardware::Host;
use crate::layer::{FreeInvalidator, LayerPlatform};
use crate::replay_platform::MEMORY_BYTES;

#[test]
fn a_refused_map_has_the_reason_of_xen() {
    let (iova, pa) = (Iova::new(0x7000), PhysAddr::new(0x9000));
    let request = MapRequest {
        iova,
        pa,
        pages: 1,
        permissions: Permissions::READ,
    };
    for (error, wanted) in [
        (XenError::NoMemory, MapError::OutOfFrames),
        (XenError::Occupied, MapError::AlreadyMapped { iova }),
        (XenError::BeyondSpace, MapError::BeyondWidth { iova }),
        (XenError::NoFrame, MapError::PhysicalBeyondWidth { at: pa }),
        (XenError::NoSpace, MapError::Refused { iova }),
        (XenError::Busy, MapError::Refused { iova }),
        (XenError::BadGrant, MapError::Refused { iova }),
    ] {
        assert_eq!(map_error(error, &request), wanted, "{error}");
    }
}

/// The domain of the tests. Its space is on bus 0.
const DOMAIN: DomainId = DomainId::new(1);
/// A page of the guest, and one that it does not have.
const FRAME: u64 = 16;
const NO_FRAME: u64 = MEMORY_BYTES >> 12;

/// A table of a guest of Xen, and the guest's host and platform.
struct Guest {
    table: XenTable,
    host: SharedHost<XenHost>,
    platform: LayerPlatform<FreeInvalidator>,
}

/// Maps `pages` pages from page `first` to the guest's pages from `frame`.
fn request(first: u64, pages: u64, frame: u64) -> MapRequest {
    MapRequest {
        iova: Pfn::new(first).iova(),
        pa: PhysAddr::new(frame << 12),
        pages,
        permissions: Permissions::READ_WRITE,
    }
}

impl Guest {
    fn new(owner: Owner, flush: FlushKind) -> Self {
        let platform = LayerPlatform::timed().unwrap();
        let (frames, coherency) = (&platform.frames, Coherency::Coherent);
        let (_, host) = SharedHost::for_meter(&platform.arena, coherency).unwrap();
        let make = xen_table(owner, flush);
        let table = make(DOMAIN, coherency, &platform.arena, frames, Some(&host)).unwrap();
        Self {
            table,
            host,
            platform,
        }
    }

    fn map(&mut self, request: MapRequest) -> Result<(), MapError> {
        self.table.map(&mut (), &mut self.platform, request)
    }

    /// Maps a piece of a list.
    fn map_piece(&mut self, request: MapRequest) -> PfnRange {
        let mapped = self.table.map_nosync(&mut (), &mut self.platform, request);
        assert_eq!(mapped, Ok(()));
        pages_of(&request).unwrap()
    }

    fn sync(&mut self, range: PfnRange) -> Result<(), InvalidationError> {
        self.table.iotlb_sync_map(&mut self.platform, range)
    }

    /// Unmaps a range and waits for its invalidation.
    fn unmap(&mut self, range: PfnRange) {
        self.unmap_later(range);
        let mut host = self.host.clone();
        let ticket = host.submit(Invalidation::Domain(DOMAIN)).unwrap();
        assert_eq!(host.poll(ticket), Ok(true));
    }

    fn unmap_later(&mut self, range: PfnRange) {
        let unmapped = self.table.unmap(&mut (), &mut self.platform, range);
        unmapped.map(drop).unwrap();
    }
}

/// A guest of each mode.
fn guests() -> impl Iterator<Item = (Guest, String)> {
    let (at_once, later) = (FlushKind::PerUnmap, FlushKind::Deferred);
    let modes = [
        (Owner::Xen, at_once),
        (Owner::Xen, later),
        (Owner::XenMulticall, at_once),
        (Owner::XenMulticall, later),
        (Owner::XenGrant, at_once),
    ];
    modes.into_iter().map(|(owner, flush)| {
        let name = format!("{owner:?}, {flush:?}");
        (Guest::new(owner, flush), name)
    })
}

#[test]
fn the_refusal_of_an_abandoned_list_does_not_fail_a_later_map() {
    for (mut guest, mode) in guests() {
        let refused = guest.map_piece(request(5, 1, NO_FRAME));
        // The layer abandons the list before it asks for the result.
        guest.unmap_later(refused);
        assert_eq!(guest.map(request(9, 3, FRAME)), Ok(()), "{mode}");
        let mapped = pages_of(&request(9, 3, FRAME)).unwrap();
        guest.unmap(mapped);
        assert!(guest.host.with(|host| host.refused.is_empty()), "{mode}");
        assert!(guest.table.is_empty(&guest.platform), "{mode}");
        // The pages of the abandoned list are free for the next one.
        let again = guest.map_piece(request(5, 1, FRAME));
        assert_eq!(guest.sync(again), Ok(()), "{mode}");
    }
}

#[test]
fn each_map_has_its_own_refusal() {
    for (mut guest, mode) in guests() {
        let refused = guest.map_piece(request(5, 1, NO_FRAME));
        let mapped = guest.map_piece(request(6, 1, FRAME));
        assert_eq!(guest.map(request(9, 2, FRAME)), Ok(()), "{mode}");
        assert_eq!(guest.sync(mapped), Ok(()), "{mode}");
        let failed = Err(InvalidationError::Failed);
        assert_eq!(guest.sync(refused), failed, "{mode}");
        assert_eq!(guest.sync(refused), Ok(()), "{mode}: reported twice");
    }
}

/// The first page of the second map is stored before Xen refuses the second page.
#[test]
fn a_refused_map_removes_its_own_entries_and_no_others() {
    for (mut guest, mode) in guests() {
        let waiting = guest.map_piece(request(5, 1, FRAME));
        let half = request(9, 2, NO_FRAME - 1);
        let refused = match guest.table.name.calls {
            // The device's domain has no grant of such a page.
            Calls::Grants => MapError::Refused { iova: half.iova },
            _ => MapError::PhysicalBeyondWidth { at: half.pa },
        };
        assert_eq!(guest.map(half), Err(refused), "{mode}");
        assert_eq!(guest.sync(waiting), Ok(()), "{mode}");
        let iova = Pfn::new(5).iova();
        let occupied = Err(MapError::AlreadyMapped { iova });
        assert_eq!(guest.map(request(5, 1, FRAME)), occupied, "{mode}");
        assert_eq!(guest.map(request(9, 2, FRAME)), Ok(()), "{mode}");
    }
}

#[test]
fn a_map_without_pages_is_refused() {
    for (mut guest, mode) in guests() {
        assert_eq!(
            guest.map(request(5, 0, FRAME)),
            Err(MapError::Empty),
            "{mode}"
        );
    }
}
