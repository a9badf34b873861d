//! Requests, and the caches that they reach.

use ringfence_types::{
    CachedLevels, DomainId, Invalidation, InvalidationError, Invalidator, RequesterId, RingId,
};

use crate::rig::{
    DEVICE, DOMAIN, FEATURE, HEADER, IOVA, OTHER, PA, Rig, host, invalidate, pages, range,
};

/// Each request removes what it names, and the model keeps the rest.
#[test]
fn scopes_are_exact() {
    let six = DomainId::new(6);
    for (request, own_page, next_page, other_domain) in [
        (pages(DOMAIN, IOVA, 1), false, true, true),
        (pages(six, IOVA, 1), true, true, false),
        (Invalidation::Domain(DOMAIN), false, false, true),
        (Invalidation::Domain(six), true, true, false),
        (Invalidation::Global, false, false, false),
        (Invalidation::Context(DEVICE), false, false, true),
    ] {
        // With and without IASup.
        for feature in [FEATURE, FEATURE & !0x40] {
            let rig = Rig::new(feature);
            let mut unit = rig.unit();
            let tables = [rig.table(DOMAIN, 3), rig.table(six, 3)];
            for (table, device) in tables.iter().zip([DEVICE, OTHER]) {
                unit.attach(device, table.domain(), host(table)).unwrap();
                rig.map(table, IOVA, PA, 2);
                assert!(rig.access(device, IOVA).is_some());
                assert!(rig.access(device, IOVA + 0x1000).is_some());
                rig.unmap(table, IOVA, 2);
            }
            invalidate(&mut unit, request);
            let cached = (
                rig.access(DEVICE, IOVA).is_some(),
                rig.access(DEVICE, IOVA + 0x1000).is_some(),
                rig.access(OTHER, IOVA).is_some(),
            );
            assert_eq!(cached, (own_page, next_page, other_domain), "{request:?}");
        }
    }
}

/// A freed table page is in a walk cache until PDE is set.
#[test]
fn directories_are_invalidated_on_request_only() {
    for (levels, cached) in [(CachedLevels::Leaves, true), (CachedLevels::All, false)] {
        let rig = Rig::new(FEATURE);
        let mut unit = rig.unit();
        let table = rig.table(DOMAIN, 3);
        unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
        rig.map(&table, IOVA, PA, 1);
        assert!(rig.access(DEVICE, IOVA).is_some());
        // Unlink the directory as a reclaiming table does; the leaf in it stays.
        rig.model.store(table.root().get() + (IOVA >> 30) * 8, 0);
        let range = range(IOVA, 1);
        let request = Invalidation::Pages {
            domain: DOMAIN,
            range,
            levels,
        };
        invalidate(&mut unit, request);
        assert_eq!(rig.access(DEVICE, IOVA).is_some(), cached, "{levels:?}");
    }
}

/// NpCache: the unit remembers that a page was not present.
#[test]
fn a_map_owes_an_invalidation_if_the_unit_caches_absent_pages() {
    for (header, owes) in [(HEADER, false), (HEADER | 1 << 26, true)] {
        let rig = Rig::with(header, FEATURE);
        let mut unit = rig.unit();
        let table = rig.table(DOMAIN, 3);
        unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
        assert_eq!(unit.invalidates_after_map(), owes);
        assert_eq!(rig.access(DEVICE, IOVA), None);
        rig.map(&table, IOVA, PA, 1);
        assert_eq!(rig.access(DEVICE, IOVA).is_none(), owes);
        invalidate(&mut unit, pages(DOMAIN, IOVA, 1));
        assert_eq!(rig.access(DEVICE, IOVA), Some(PA));
    }
}

/// The entry of a device was changed behind the driver's back, as a bug or an attack would.
#[test]
fn a_context_invalidation_reads_the_entry_again() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    let table = rig.table(DOMAIN, 3);
    rig.map(&table, IOVA, PA, 1);
    unit.attach(DEVICE, DOMAIN, host(&table)).unwrap();
    assert!(rig.access(DEVICE, IOVA).is_some());
    rig.executed();
    rig.model
        .store(crate::rig::DEVICE_TABLE + 32 * u64::from(DEVICE.get()), 3);
    invalidate(&mut unit, Invalidation::Context(DEVICE));
    assert_eq!(rig.access(DEVICE, IOVA), None);
    let opcodes: Vec<_> = rig
        .executed()
        .iter()
        .map(|[first, _]| first >> 60)
        .collect();
    // The barrier keeps the order, in one burst.
    assert_eq!(opcodes, [2, 1, 3, 1]);
}

#[test]
fn requests_that_the_unit_cannot_express_are_refused() {
    let rig = Rig::new(FEATURE);
    let mut unit = rig.unit();
    let ring = Invalidation::Ring {
        domain: DOMAIN,
        device: DEVICE,
        ring: RingId::new(1),
    };
    let beyond = Invalidation::Context(RequesterId::new(0x200));
    let doorbells = rig.model.state().doorbells;
    for request in [ring, beyond] {
        assert_eq!(unit.submit(request), Err(InvalidationError::Unsupported));
        let all = [pages(DOMAIN, IOVA, 1), request];
        assert_eq!(unit.submit_all(&all), Err(InvalidationError::Unsupported));
    }
    assert_eq!(rig.model.state().doorbells, doorbells);
}
