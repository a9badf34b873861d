//! Tests of refused maps.

use ringfence_dma::space::IoPageTable;
use ringfence_pgtable::MapError;
use ringfence_types::{Invalidator, Permissions, Pfn};

use super::*;
use crate::guest::SharedHost;
use crate::hardware::Host;
use crate::layer::{FreeInvalidator, LayerPlatform};

const DOMAIN: DomainId = DomainId::new(1);

/// A table of a guest, and the guest's host and platform.
struct Guest {
    table: VirtioTable,
    host: SharedHost<VirtioHost>,
    platform: LayerPlatform<FreeInvalidator>,
}

/// Maps `pages` pages from page `first`.
fn request(first: u64, pages: u64) -> MapRequest {
    MapRequest {
        iova: Pfn::new(first).iova(),
        pa: PhysAddr::new(16 << 12),
        pages,
        permissions: Permissions::READ_WRITE,
    }
}

fn range(first: u64, pages: u64) -> PfnRange {
    PfnRange::new(Pfn::new(first), pages).unwrap()
}

impl Guest {
    /// Creates a guest whose page 5 is mapped, so that its host refuses another map of it.
    fn new(mode: DomainMode) -> Self {
        let platform = LayerPlatform::timed().unwrap();
        let (_, host) = SharedHost::for_meter(&platform.arena, Coherency::Coherent).unwrap();
        let table = VirtioTable::new(&host, DOMAIN, mode).unwrap();
        let mut guest = Self {
            table,
            host,
            platform,
        };
        assert_eq!(guest.map(5, 1), Ok(()));
        guest
    }

    fn map(&mut self, first: u64, pages: u64) -> Result<(), MapError> {
        let request = request(first, pages);
        self.table.map(&mut (), &mut self.platform, request)
    }

    /// Maps a piece of a list.
    fn map_piece(&mut self, first: u64, pages: u64) {
        let request = request(first, pages);
        let mapped = self.table.map_nosync(&mut (), &mut self.platform, request);
        assert_eq!(mapped, Ok(()));
    }

    fn sync(&mut self, first: u64, pages: u64) -> Result<(), InvalidationError> {
        self.table.sync(&mut (), &mut self.platform);
        self.table
            .iotlb_sync_map(&mut self.platform, range(first, pages))
    }
}

fn guests() -> impl Iterator<Item = Guest> {
    [DomainMode::Strict, DomainMode::Lazy]
        .into_iter()
        .map(Guest::new)
}

#[test]
fn each_map_has_its_own_refusal() {
    for mut guest in guests() {
        guest.map_piece(4, 3);
        guest.map_piece(20, 1);
        assert_eq!(guest.map(30, 2), Ok(()));
        assert_eq!(guest.sync(20, 1), Ok(()));
        assert_eq!(guest.sync(4, 3), Err(InvalidationError::Failed));
        assert_eq!(guest.sync(4, 3), Ok(()), "reported twice");
        let refused = MapError::Refused {
            iova: Pfn::new(5).iova(),
        };
        assert_eq!(guest.map(5, 1), Err(refused));
    }
}

#[test]
fn the_refusal_of_an_abandoned_list_does_not_fail_a_later_map() {
    for mut guest in guests() {
        guest.map_piece(4, 3);
        // The layer abandons the list before it asks for the result, which unmaps page 5 also.
        let unmapped = guest.table.unmap(&mut (), &mut guest.platform, range(4, 3));
        unmapped.map(drop).unwrap();
        let ticket = guest.host.submit(Invalidation::Domain(DOMAIN)).unwrap();
        assert_eq!(guest.host.poll(ticket), Ok(true));
        assert!(guest.host.with(|host| host.refused.is_empty()));
        assert!(guest.table.is_empty(&guest.platform));
        guest.map_piece(4, 3);
        assert_eq!(guest.sync(4, 3), Ok(()));
    }
}

/// A driver that is bound again gets a domain of the same number.
#[test]
fn refusals_end_with_their_domain() {
    for mut guest in guests() {
        guest.map_piece(4, 3);
        guest.table = VirtioTable::new(&guest.host, DOMAIN, DomainMode::Strict).unwrap();
        guest.map_piece(4, 3);
        assert_eq!(guest.sync(4, 3), Ok(()));
    }
}

#[test]
fn a_map_without_pages_is_refused() {
    for mut guest in guests() {
        assert_eq!(guest.map(9, 0), Err(MapError::Empty));
    }
}
